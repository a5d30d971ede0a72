"""Options that the commands of `seatrial history` share."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from seatrial.regress.history.record import Take
    from seatrial.regress.history.store import Store

StoreFile = Annotated[
    Path | None, typer.Option("--store", metavar="FILE", help="Default: $SEATRIAL_HISTORY, [history] store, then the user's own.")
]
Project = Annotated[str | None, typer.Option("--project", help="Only of this project.")]
Name = Annotated[str | None, typer.Option("--name", help="Only runs of this name.")]
Machine = Annotated[str | None, typer.Option("--machine", help="Only runs on this kind of machine.")]
TakeName = Annotated[str, typer.Option("--take", help="Of the points of a run: last, first, mean, min, max or count.")]
Metrics = Annotated[list[str], typer.Argument(metavar="METRIC...", help="Names; * and ? stand for anything.")]


def opened(asked: Path | None, *, write: bool = False) -> Store:
    """The store that the options and the configuration name; it must be there."""
    from seatrial.model.errors import UserError
    from seatrial.regress.history.place import place, settings
    from seatrial.regress.history.store import Store

    path = place(asked, settings(Path.cwd()))
    if not path.is_file():
        raise UserError(f"{path}: no history there yet", "import runs first: seatrial history import PATH")
    return Store(path, write=write)


def taken(word: str) -> Take:
    """The word of `--take`, checked."""
    from seatrial.model.errors import UserError
    from seatrial.regress.history.record import TAKES

    for known in TAKES:
        if word == known:
            return known
    raise UserError(f"--take {word}: no such value", f"one of {', '.join(TAKES)}")
