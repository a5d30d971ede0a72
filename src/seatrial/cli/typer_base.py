"""Typer, made quick and clear: plain values are read without pydantic, and usage errors say what is wrong, where, and the fix.

- Only what cannot be read in two ways takes the short way: a word, a whole number within its limits, a path, nothing. All else goes
  typer's way.
- With a typer that describes its parameters differently this is slower, not wrong.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import typer
from typer.core import TyperCommand

from seatrial.core.errors import UserError


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


UsageError = cast(type[Exception], typer.BadParameter.__base__)
"""The base of typer's own errors, which typer does not export."""


@contextmanager
def explained(context: Any = None) -> Iterator[None]:
    """Raise typer's errors as UserErrors; the help of a group that was called alone stays what it is. Not every error knows its command:
    it is then the one that `context`, of the whole program, invokes."""
    try:
        yield
    except UsageError as error:
        found = cast(Any, error)
        if type(error).__name__ == "NoArgsIsHelpError":
            raise
        invoked = getattr(context, "invoked_subcommand", None)
        names, root = [invoked] if found.ctx is None and invoked else list[str](), found.ctx
        while root is not None and root.parent is not None:
            names.insert(0, root.info_name)
            root = root.parent
        said = found.format_message().removesuffix(".")
        raise UserError(": ".join([*names, said]), _fix(found, ["seatrial", *names])) from None


def _fix(error: Any, command: list[str]) -> str:
    """What to type instead, and where the rest stands."""
    more = f"{' '.join(command)} --help"
    param = getattr(error, "param", None)
    if param is not None:
        name = param.metavar or param.name.upper() if param.param_type_name == "argument" else param.opts[0]
        meaning = (getattr(param, "help", None) or "").rstrip(".")
        return f"give {name}{f' ({meaning})' if meaning else ''}; {more}"
    listed = getattr(getattr(error.ctx, "command", None), "list_commands", None)
    if listed is None or hasattr(error, "option_name"):
        return more
    known = listed(error.ctx)
    close = difflib.get_close_matches(_named(error.message), known, n=1)
    return f"{' '.join(command)} {close[0]}; {more}" if close else f"commands: {', '.join(known)}"


def _named(message: str) -> str:
    return message.partition("'")[2].partition("'")[0]
