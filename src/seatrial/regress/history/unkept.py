"""A run that is judged as its files tell it, without being written into the store.

- Only one run at a time: a verdict over several would hide which one it is about.
- What it shares with its baselines is found as an import would find it: project, kind, name, machine. Where the run is kept already,
  the store knows what the files do not say: the command that ran it said it then.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from seatrial.model.errors import UserError
from seatrial.regress.history import tables
from seatrial.regress.history.adding import Stated, completed, run_of
from seatrial.regress.history.importers.detect import detect
from seatrial.regress.history.record import Run, RunValue, Take
from seatrial.regress.history.tables import Found


def read(path: Path, stated: Stated, trusted: tuple[str, ...], take: Take) -> tuple[Run, dict[str, RunValue]]:
    """The one run at `path`, and its metrics."""
    drafts = [draft for _, reading in detect(path) for draft in reading()]
    if len(drafts) != 1:
        raise UserError(
            f"{path}: {len(drafts)} runs, and the gate judges one", "name the file of one run, or import them and give a number"
        )
    run = run_of(completed(drafts[0], stated), stated, trusted)
    _, series = tables.rows_of(drafts[0].points)
    return run, {metric: _value(run, found, take) for metric, found in series.items()}


def known(run: Run, kept: Run, stated: Stated) -> Run:
    """A run as its files tell it, with what the store knows of the same run; what a person states comes first."""
    return replace(
        run,
        id=kept.id,
        project=stated.project or kept.project,
        name=stated.name or kept.name,
        machine=stated.machine or kept.machine,
        commit=run.commit or kept.commit,
        passed=kept.passed if run.passed is None else run.passed,
        why_untrusted=kept.why_untrusted if run.passed is None else run.why_untrusted,
    )


def _value(run: Run, found: Found, take: Take) -> RunValue:
    first, last, mean, least, greatest, count, mark = found
    taken = {"first": first, "last": last, "mean": mean, "min": least, "max": greatest, "count": float(count)}
    return RunValue(run=run, value=taken[take], mark=mark, count=count)
