"""Options that the commands of `seatrial history` share."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypedDict

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
OnlyMetrics = Annotated[list[str] | None, typer.Option("--metric", help="Only these; * and ? stand for anything; repeatable.")]


class Of(TypedDict):
    """Which runs."""

    project: str | None
    name: str | None
    machine: str | None


@dataclass(frozen=True)
class Chosen:
    """Metrics in runs, as a person chose them."""

    metrics: Metrics
    store: StoreFile = None
    project: Project = None
    name: Name = None
    machine: Machine = None
    take: TakeName = "last"

    @property
    def of(self) -> Of:
        """As the functions of the history take it."""
        return Of(project=self.project, name=self.name, machine=self.machine)


def choosing(command: Callable[..., None]) -> Callable[..., None]:
    """A command whose first parameter is a `Chosen`: the options of that come first, then its own."""
    shared = inspect.signature(Chosen, eval_str=True).parameters
    own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]

    @functools.wraps(command)
    def called(**words: Any) -> None:
        command(Chosen(**{name: words.pop(name) for name in shared}), **words)

    # typer reads the signature; the annotations that `wraps` copied are those of the command
    called.__signature__ = inspect.Signature([*shared.values(), *own])  # type: ignore[attr-defined]
    called.__annotations__ = {}
    return called


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
