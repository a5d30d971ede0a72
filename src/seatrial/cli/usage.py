"""What typer says of a wrong command line, as an error of ours: what is wrong, where, and the fix."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import typer

UsageError = cast(type[Exception], typer.BadParameter.__base__)
"""The base of typer's own errors, which typer does not export."""


@contextmanager
def explained(context: Any = None) -> Iterator[None]:
    """Raise typer's errors as UserErrors; the help of a group that was called alone stays what it is. Not every error knows its command:
    it is then the one that `context`, of the whole program, invokes."""
    from seatrial.model.errors import UserError

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
    """What typer quotes as unknown."""
    return message.partition("'")[2].partition("'")[0]
