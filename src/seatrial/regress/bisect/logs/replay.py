"""Marks from an earlier bisect: a log of `git bisect`, or a journal of ours, as they are or edited by hand.

- A journal's rows keep everything. The ends that it verified need not be run again, if the plan beside it asks the same question.
- A log of git says good and bad, but not how the bad end fails: its marks count, and both ends are run once. So they are where a
  journal answers another question, or nobody knows which.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from seatrial.files import read_model
from seatrial.model.errors import UserError
from seatrial.model.guarded import read_file
from seatrial.regress.bisect.logs import gitlog, journal
from seatrial.regress.bisect.place import PLAN
from seatrial.regress.bisect.record import History, Mark, Plan, Run

QUESTION = ("command", "extra", "trial", "check", "metrics", "failure", "any_failure", "nightly", "variables", "edits", "patches")
"""What of a plan says what is measured, and how it is judged."""


@dataclass(frozen=True, slots=True)
class Marks:
    """What was read, before it is known which history it belongs to."""

    path: Path
    log: gitlog.Replayed | None = None
    journal: tuple[Run, ...] = ()
    notes: tuple[str, ...] = ()

    def end(self, mark: Mark) -> str | None:
        """The commit that the bisect began with on this side."""
        if self.log is not None:
            return next((marked.commit for marked in self.log.marks if marked.mark is mark), None)
        return next((row.commit for row in self.journal if row.stage == "ends" and row.history == 0 and row.mark is mark), None)

    def rows(self, history: History, plan: Plan) -> tuple[Run, ...]:
        """The rows of a new journal."""
        rows: Sequence[Run] = self.journal if self.log is None else gitlog.as_rows(self.log, history)
        if not self._same_question(plan):
            on_line = [row for row in rows if row.history == 0 and row.stage != "conviction"]
            rows = [row.model_copy(update={"stage": "replay"}) for row in on_line]
        strange = next((row for row in rows if row.history == 0 and row.stage != "conviction" and row.point not in history.by_id), None)
        if strange is not None:
            message = f"{self.path}: {strange.commit[:12]} is not between the ends"
            raise UserError(message, "delete its line, or name the ends that the log was made with: --good REV --bad REV")
        return tuple(row.model_copy(update={"number": number, "directory": ""}) for number, row in enumerate(rows, start=1))

    def _same_question(self, plan: Plan) -> bool:
        """Whether the marks were made by the same command, judged in the same way."""
        beside = self.path.with_name(PLAN)
        if self.log is not None or not beside.is_file():
            return False
        old = read_model(beside, Plan)
        return all(getattr(old, name) == getattr(plan, name) for name in QUESTION)


def read_marks(path: Path, repo: Path) -> Marks:
    """Read either format; the first character tells them apart."""
    try:
        # Not as text: a carriage return in a subject must not begin a line.
        text = read_file(path).decode("utf-8", "backslashreplace")
    except OSError as error:
        raise UserError(f"{path}: cannot read: {error.strerror or error}", "name a `git bisect log`, or a runs.jsonl") from error
    if text.lstrip().startswith("{"):
        found = journal.read(path)
        return Marks(path, journal=found.rows, notes=found.notes)
    log = gitlog.parse(text, repo, path)
    return Marks(path, log=log, notes=log.notes)
