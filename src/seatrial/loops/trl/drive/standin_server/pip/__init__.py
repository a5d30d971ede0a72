"""Stands in for pip in a vLLM server whose environment has none: vLLM answers `/server_info`, which TRL asks for, with `pip list`."""
