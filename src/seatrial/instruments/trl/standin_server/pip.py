"""Stands in for pip in a vLLM server whose environment has none: vLLM answers `/server_info`, which TRL asks for, with `pip list`."""

from __future__ import annotations

from importlib.metadata import distributions

if __name__ == "__main__":
    for line in sorted({f"{each.metadata['Name']}=={each.version}" for each in distributions()}):
        print(line)
