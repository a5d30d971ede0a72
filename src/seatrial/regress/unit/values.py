"""What `tracker.track` takes: a value becomes JSON text at once, or an error that names metric, value and fix.

- Strict JSON: no NaN, no infinity, names are strings. What json would change in silence (a key 1 becoming "1") is an error too, and so is
  an int beyond the range of a float, which most readers take for infinity.
- A scalar of numpy or torch is taken through `.item()`; so is one inside a list or a dict.
- The text is a copy: a list that the test changes afterwards stays as it was tracked.
"""

from __future__ import annotations

import json
import math
import sys
from typing import Any

ELAPSED = "_elapsed"
LARGEST = int(sys.float_info.max)
DEPTH = 50
"""Deeper than anybody means; a list that holds itself gets here."""


class TrackError(ValueError):
    """A metric that cannot be kept; it fails the test that tracked it."""


def check_name(name: object) -> str:
    """The name of a metric, or an error."""
    if not isinstance(name, str):
        raise TrackError(f"the name of a metric is a string, not {shown(name)}: give str(name)")
    if not name:
        raise TrackError("the name of a metric is empty: give it a name")
    if name == ELAPSED:
        raise TrackError(f"{ELAPSED} is the time of the test, and is there by itself: take another name")
    return name if name.isascii() else _text(name, "", name)


def encode(name: str, value: object) -> str:
    """`value` as JSON text."""
    if type(value) is int and -LARGEST <= value <= LARGEST:
        return repr(value)
    return json.dumps(_plain(name, "", value, 0), allow_nan=False)


def shown(value: object) -> str:
    """A value and its type, short, whatever its repr does."""
    try:
        text = repr(value)
    except Exception as error:  # noqa: BLE001  # a broken repr may raise anything, and is not what the message is about
        text = f"<no repr: {type(error).__name__}>"
    return f"{text if len(text) <= 80 else text[:77] + '...'} ({type(value).__module__}.{type(value).__qualname__})".replace(
        "(builtins.", "("
    )


def _plain(name: str, inside: str, value: object, depth: int) -> Any:  # JSON has no better type
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return _text(name, inside, value)
    if isinstance(value, int):
        if not -LARGEST <= value <= LARGEST:
            raise _wrong(name, inside, value, "is beyond the range of a float", "track its logarithm, or a text")
        return int(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise _wrong(name, inside, value, "is not finite", "track None, or a text that says so, and assert on the number itself")
        return float(value)
    if depth > DEPTH:
        raise _wrong(name, inside[:40], value, f"is nested deeper than {DEPTH} levels", "track a flat value")
    if isinstance(value, list | tuple):
        return [_plain(name, f"{inside}[{index}]", part, depth + 1) for index, part in enumerate(value)]
    if isinstance(value, dict):
        return {_key(name, inside, key): _plain(name, f"{inside}[{key!r}]", part, depth + 1) for key, part in value.items()}
    return _scalar(name, inside, value, depth)


def _key(name: str, inside: str, key: object) -> str:
    if isinstance(key, str):
        return _text(name, inside, key)
    raise _wrong(name, inside, key, "is a key, and keys of JSON are strings", "make the keys strings: {str(key): value}")


def _text(name: str, inside: str, value: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise _wrong(name, inside, value, "is no text that UTF-8 can hold", "track ascii(value)") from error
    return str.__str__(value)


def _scalar(name: str, inside: str, value: object, depth: int) -> Any:
    take = getattr(value, "item", None)
    fix = "track a number, a string, a list or a dict, such as float(value) or str(value)"
    if isinstance(value, type) or not callable(take):
        raise _wrong(name, inside, value, "is nothing that JSON can hold", fix)
    try:
        scalar = take()
    except Exception as error:
        raise _wrong(name, inside, value, f"is no scalar ({type(error).__name__}: {error})", "track value.tolist()") from error
    if not isinstance(scalar, bool | int | float | str):
        raise _wrong(name, inside, value, "is nothing that JSON can hold", fix)
    return _plain(name, inside, scalar, depth + 1)


def _wrong(name: str, inside: str, value: object, why: str, fix: str) -> TrackError:
    return TrackError(f"metric {name!r}{': at ' + inside if inside else ''}: {shown(value)} {why}: {fix}")
