"""JSON and TOML of others as data: a value, or a ValueError.

- Nesting is bounded, so that what was read can be walked and shown. An integer fits into a double.
- Imports nothing before it is needed: it is loaded at the start of every session.
"""

from __future__ import annotations

import re
from typing import Any

DEPTH = 100  # nested lists and tables that a value may have
BITS = 1023  # of an integer that fits into a double
LENGTH = 4_000_000
_DOTTED = re.compile(r"""(?<![\w"'-])(?:[\w"'-]++[ \t]*+\.[ \t]*+){100}""")  # a dotted key whose parts alone would cost quadratic time


def parse_json(data: bytes) -> Any:
    import json

    try:
        return _bounded(json.loads(data.decode("utf-8", "backslashreplace").removeprefix("\ufeff")))
    except (RecursionError, MemoryError) as error:
        raise ValueError(_told(error)) from error


def parse_toml(text: str) -> dict[str, Any]:
    if len(text) > LENGTH:
        raise ValueError(f"longer than {LENGTH} characters")
    if _DOTTED.search(text):
        raise ValueError("a key of 100 parts or more")
    import tomllib

    try:
        value = tomllib.loads(text.removeprefix("\ufeff"))
    except (RecursionError, MemoryError, OverflowError) as error:  # OverflowError: a date that does not exist
        raise ValueError(_told(error)) from error
    _bounded(value)
    return value


def _told(error: Exception) -> str:
    return f"nested deeper than {DEPTH}" if isinstance(error, RecursionError) else str(error) or type(error).__name__


def _bounded(value: Any) -> Any:
    """The value, if it is not nested too deeply and has no integer beyond a double."""
    level = [value]
    for _ in range(DEPTH + 1):
        if any(isinstance(one, int) and one.bit_length() > BITS for one in level):
            raise ValueError("an integer beyond the range of a float")
        outer = [one for one in level if isinstance(one, dict | list)]
        if not outer:
            return value
        level = [inner for one in outer for inner in (one.values() if isinstance(one, dict) else one)]
    raise ValueError(f"nested deeper than {DEPTH}")
