"""JSON of servers and of what they drive, read at the speed of orjson and as strictly as `seatrial.model.guarded` reads."""

from __future__ import annotations

from typing import Any

import orjson

from seatrial.model.guarded import DEPTH, BadValue, require_flat


def parse_json_fast(text: str | bytes) -> Any:
    """JSON as data, which can be written again; a BadValue for NaN, lone surrogates and what is nested too deeply. Integers beyond 64 bits
    are floats."""
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise BadValue(error.msg, error.lineno, error.colno) from error
    nested = text.count(b"[") + text.count(b"{") if isinstance(text, bytes) else text.count("[") + text.count("{")
    if nested > DEPTH:
        require_flat(value)
    return value
