"""Instruments inside generation engines, or next to them: vLLM, transformers, and hooks for the loops' own refits."""
