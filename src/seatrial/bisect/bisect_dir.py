"""The directory of a bisect: its files, its lock, its journal, and what `clean` removes.

- `bisect.json` (the plan) and `runs.jsonl` (the journal, one run a line) are the truth; everything else can be made again from them.
- One writer at a time, as in a trial's run directory. A half-written last line of the journal is dropped; any other damage is an error.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from seatrial.bisect import runners
from seatrial.bisect.bisect_records import VERSION, BisectPlan, BisectRun, Mark, SkipKind
from seatrial.bisect.environment_cache import BisectEnvironments
from seatrial.bisect.runners import end_local_leftovers
from seatrial.bisect.worktrees import BESIDE
from seatrial.core.errors import UserError
from seatrial.core.files import delete, number_to_json, read_model, stored, write_json
from seatrial.core.guarded import parse_json_once
from seatrial.core.journal import append_row, read_journal
from seatrial.core.records import replace
from seatrial.core.text import number
from seatrial.trial.run_dir import locked, make, new_path

PLAN, JOURNAL, STEP = "bisect.json", "runs.jsonl", "step.json"
STORES, STEPS, PATCHES = "stores", "steps", "patches"
WORK = (STORES, STEPS + "/*/tree", STEPS + "/*/" + BESIDE)
"""What only a bisect under way needs."""


def create_bisect(root: Path, named: Path | None, plan: BisectPlan) -> Path:
    """Make a new directory, at the place that the user named or below `root`, and store the plan."""
    path = named.absolute() if named else new_path(root, "bisect")
    if (path / PLAN).exists():
        raise UserError(f"{path}: holds a bisect already", f"{resume_command(path)}, or name another directory with --out")
    if path.is_dir() and any(path.iterdir()):
        raise UserError(f"{path}: is not empty", "name a new or an empty directory with --out")
    make(path)
    write_json(path / PLAN, plan)
    return path


def resume_command(path: Path) -> str:
    """What a person types to go on, whatever the path holds."""
    return f"seatrial bisect resume {shlex.quote(str(path))}"


def load_plan(path: Path) -> BisectPlan:
    if not (path / PLAN).is_file():
        raise UserError(f"{path}: no {PLAN} there, so it is not the directory of a bisect", "name a directory that `seatrial bisect` made")
    plan = read_model(path / PLAN, BisectPlan)
    if plan.version != VERSION:
        raise UserError(f"{path / PLAN}: version {plan.version}, and this Seatrial reads {VERSION}", "use the Seatrial that wrote it")
    return plan


def clean_bisect(path: Path, tell: Callable[[str], None]) -> tuple[str, ...]:
    """End what a killed bisect left running, and remove its trees and stores; plan, journal, logs and reports stay. So does the tree of
    a job that could not be cancelled, with the stores that it is a worktree of: both may be in use."""
    load_plan(path)
    with locked(path):
        end_local_leftovers(path)
        runners.cancel_slurm_jobs(path, tell)
        BisectEnvironments().clean_up()
        kept = runners.queued(path)
        for step in sorted(kept):
            tell(f"{step}: its tree and the stores are kept, because its job may still run; cancel it, then clean again")
        work = [found for pattern in WORK for found in sorted(path.glob(pattern))]
        gone = [found for found in work if found.parent not in kept and not (kept and found == path / STORES)]
        for found in gone:
            delete(found)
    return tuple(str(found.relative_to(path)) for found in gone)


@dataclass(frozen=True)
class RunJournal:
    rows: tuple[BisectRun, ...] = ()
    notes: tuple[str, ...] = ()


def append_run(path: Path, row: BisectRun) -> None:
    value = number_to_json(row.value) if isinstance(row.value, float) else row.value
    append_row(path, replace(row, value=value).model_dump(mode="json"))


def read_runs(path: Path) -> RunJournal:
    """The rows; a journal that does not exist has none."""
    rows: list[BisectRun] = []
    notes: list[str] = []
    for line in read_journal(path) if os.path.lexists(path) else ():
        if line.torn:
            notes.append(f"{path.name}: line {line.number} was cut off by a kill; its run is done again")
        elif line.text.strip():
            rows.append(_row(path, line.number, line.text, rows[-1].number if rows else 0))
    return RunJournal(tuple(map(_settled, rows)), tuple(notes))


def _row(path: Path, count: int, line: str, before: int) -> BisectRun:
    where = f"{path}:{count}"
    try:
        data = parse_json_once(line, finite=True)
    except ValueError as error:
        fix = f"undo the edit of line {count}, or delete the line: its run is then done again"
        raise UserError(f"{where}: not a row: {error}", fix) from error
    try:
        row = stored(BisectRun, data)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"]) or "(the whole line)"
        raise UserError(f"{where}: {key}: {first['msg']}", f"undo the edit of `{key}` in line {count}, or delete the line") from error
    if row.number <= before:
        message = f"{where}: number: {row.number} comes after {before}; numbers increase from row to row"
        raise UserError(message, f"delete line {count} if it is a copy, or bring the lines back into their order")
    return row


def _settled(row: BisectRun) -> BisectRun:
    """The row, with the mark that a person may have changed, and without what contradicts it."""
    change: dict[str, Any] = {}
    if row.mark is Mark.SKIP:
        if row.skip is None:
            change = {"skip": SkipKind.HAND}
    else:
        if row.skip is not None:
            change["skip"] = None
        if row.mark is Mark.GOOD and row.failure is not None:
            change["failure"] = None
        measured_good = row.passed is True and row.failure is None
        if row.passed is False if row.mark is Mark.GOOD else measured_good:
            # The person contradicts the measurement: it must not count against the mark.
            change |= {"passed": None, "value": None}
    if not change:
        return row
    was = f", value {number(row.value)}" if "value" in change else ""
    note = f"marked {row.mark} by hand{was}"
    return replace(row, **change, reason=f"{note}; was: {row.reason}" if row.reason else note, notes=(*row.notes, note), by_hand=True)
