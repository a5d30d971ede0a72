"""The file of a function that scores, found without running anything of it.

- `path/file.py:name` is that file. `module:name` is looked for as Python does, from the campaign's directory on, but nothing is
  imported, not even the packages above it: what only an import hook would find is known by its name alone.
- It is one file: what it imports may change without being noticed.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.machinery import PathFinder
from pathlib import Path

from seatrial.rollouts.inputs.reading import sha256_of


def sha256_of_function(spec: str, base: Path) -> str | None:
    """Of the content of the function's file; None when it cannot be found or read."""
    file = file_of(spec, base)
    try:
        return sha256_of(file) if file is not None else None
    except OSError:
        return None


def file_of(spec: str, base: Path) -> Path | None:
    """The file that `spec` means; a relative path and a search begin at `base`."""
    module = spec.rpartition(":")[0]
    if module.endswith(".py"):
        return base / module
    importlib.invalidate_caches()
    where: Sequence[str] | None = [str(base), *sys.path]
    found = None
    for part in module.split("."):
        # By the last part of its name alone: with the whole one, packages above it would have to be imported.
        found = PathFinder.find_spec(part, where) if where is not None else None
        if found is None:
            return None
        where = None if found.submodule_search_locations is None else [*found.submodule_search_locations]
    return Path(found.origin) if found is not None and found.has_location and found.origin is not None else None
