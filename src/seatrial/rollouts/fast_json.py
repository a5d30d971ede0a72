"""JSON of servers and of what they drive, read at the speed of orjson and as strictly as `seatrial.core.guarded` reads.

Not beside the guarded readers: those also run where only the standard library is.
"""

from __future__ import annotations

import json
import math
from typing import Any

import orjson

from seatrial.core.guarded import DEPTH, BadValue, has_every_key, parse_json_once

_DIGITS = bytes(ord("0") if chr(code) in "0123456789" else ord(" ") for code in range(256))
_LONG = b"0" * 19
"""Digits that may not fit into 64 bits. To look for them in a text translated by _DIGITS takes an eighth of a regular expression."""


def parse_json_fast(text: str | bytes) -> Any:
    """JSON as data, which can be written again without a loss. A BadValue for NaN, numbers beyond a double, integers beyond 64 bits (orjson
    would round them), lone surrogates, what is nested too deeply, and a key that stands twice in one object."""
    data = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise BadValue(error.msg, error.lineno, error.colno) from error
    if _LONG in data.translate(_DIGITS):
        _require_64_bits(data)
    if not has_every_key(value, data):
        parse_json_once(data)
    return value


def _require_64_bits(data: bytes) -> None:
    def small(digits: str) -> int:
        number = int(digits)
        if not -(1 << 63) <= number < 1 << 64:
            raise BadValue(f"{digits[:24]} does not fit into 64 bits: write it as a text")
        return number

    try:
        json.loads(data, parse_int=small)
    except RecursionError as error:
        raise BadValue(f"nested deeper than {DEPTH}") from error


def unstorable(value: Any) -> str | None:
    """What of a value JSON cannot say."""
    if isinstance(value, float):
        return None if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return next(filter(None, map(unstorable, value.values())), None)
    if isinstance(value, list):
        return next(filter(None, map(unstorable, value)), None)
    return None if value is None or isinstance(value, str | bool | int) else f"a {type(value).__name__}"
