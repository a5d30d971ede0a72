"""The directory of a package `vllm` for a trainer's process that has none: see its docstring."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path


def allow_import() -> None:
    """Before TRL is imported: it takes up its client of vLLM only where `vllm` can be imported. An installed one goes first."""
    if importlib.util.find_spec("vllm") is None:
        sys.path.append(str(Path(__file__).parent))
