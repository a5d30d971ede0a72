"""Commands whose parameters are read without pydantic, which typer would import for a single word.

- Only what cannot be read in two ways is read here: a word where a word is wanted, a whole number within its limits, a path, nothing.
  All else goes typer's way, and so does every error.
- A typer that describes its parameters otherwise is slower with this, not wrong.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from typer.core import TyperCommand


class Plain:
    """For a class of typer's commands or groups: plain values of its parameters take the short way, also that of `--help`."""

    def get_params(self, ctx: Any) -> list[Any]:
        """The parameters, each with the short way before its own."""
        found: list[Any] = super().get_params(ctx)  # type: ignore[misc]  # of the command that this is mixed into
        for param in found:
            if not isinstance(param.process_value, functools.partial):
                param.process_value = functools.partial(_value, param, param.process_value)
        return found


class Light(Plain, TyperCommand):
    """A command whose plain values take the short way."""


def _value(param: Any, typed: Callable[[Any, Any], Any], context: Any, value: Any) -> Any:
    """The value of a parameter; `typed` is typer's own reading."""
    read = _plain(param, value)
    if read is _UNKNOWN:
        return typed(context, value)
    return read if param.callback is None else param.callback(context, param, read)


_UNKNOWN = object()


def _plain(param: Any, value: Any) -> Any:
    """The value if it is plain, otherwise _UNKNOWN."""
    described = getattr(param, "type_descriptor", None)
    wanted = getattr(described, "annotation", None)
    if described is None:
        return _UNKNOWN
    many = param.multiple or param.nargs != 1
    if value is None or (many and not value):
        return _UNKNOWN if param.required else () if many else None
    if many:
        plain = wanted in (str, list[str]) and isinstance(value, list | tuple) and all(type(one) is str for one in value)
        return list(value) if plain else _UNKNOWN
    if wanted is str and type(value) is str:
        return value
    if wanted is Path and type(value) is str:
        return Path(value)
    if wanted is int and (type(value) is int or (isinstance(value, str) and value.isascii() and value.isdigit())):
        number, limits = int(value), described.parameter_info
        inside = (limits.min is None or number >= limits.min) and (limits.max is None or number <= limits.max)
        return number if inside else _UNKNOWN
    return _UNKNOWN
