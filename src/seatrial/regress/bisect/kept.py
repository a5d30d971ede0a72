"""What git said of the histories, kept beside the plan: a report is a function of its directory, wherever the repositories are by then.

- `history.json` has the points of the searched history, `history-N.json` those inside a submodule (N as in a row of the journal), and
  `moves-N.json` the submodules that the commit found in history N moves.
- A bisect under way asks git, and writes down what it says. A report reads; it asks git only where nothing was kept (a directory of an
  older Seatrial), or where what was kept is of another commit (a journal that was edited by hand).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Self

from pydantic import model_validator

from seatrial.evidence.redact import Redactor
from seatrial.files import read_model, write_text
from seatrial.model.record import Record
from seatrial.regress.bisect.record import VERSION, History, Point
from seatrial.regress.bisect.reports.report import cleared_history

HISTORY = "history.json"


class Kept(Record):
    """One answer of git."""

    version: int = VERSION
    key: str = ""
    """What was asked about."""
    points: tuple[Point, ...] = ()
    moves: tuple[tuple[str, str | None, str], ...] = ()
    """Path, commit before (None: it is new) and commit after."""
    why: str = ""
    """Why there are no points."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        """Parents stand before their children, each point stands once."""
        for index, point in enumerate(self.points):
            if not all(0 <= parent < index for parent in point.parents):
                raise ValueError(f"points.{index}: a parent does not stand before it")
        if len({point.id for point in self.points}) < len(self.points):
            raise ValueError("points: one stands twice")
        return self


def recall(file: Path, key: str, ask: Callable[[], Kept], redactor: Redactor, *, frozen: bool) -> Kept:
    """What git says, kept in `file`; a frozen sitting takes it from there, and writes nothing."""
    if frozen and file.is_file():
        kept = read_model(file, Kept)
        if kept.key == key:
            return kept
    said = ask().model_copy(update={"key": key})
    if not frozen:
        points = cleared_history(History(said.points), redactor).points
        # On one line: a history may have tens of thousands of points.
        write_text(file, said.model_copy(update={"points": points, "why": redactor.text(said.why)}).model_dump_json() + "\n")
    return said
