"""Thresholds for checks out of the runs in the store.

- Trusted, unpoisoned runs only, unless all are asked for. Each group that shares a baseline gets thresholds of its own.
- A series that changed is no sample of one thing: that is said, and thresholds are made of the runs after the last step only. A drift
  allows none.
- Expressions are printed only where the runs vouch for the rate; otherwise how many are needed.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from seatrial.model.errors import UserError
from seatrial.model.words import counted
from seatrial.regress.history.groups import Group, groups
from seatrial.regress.history.numbers.steps import TooFew, detect
from seatrial.regress.history.numbers.thresholds import FEWEST, Proposal, propose
from seatrial.regress.history.record import Take
from seatrial.regress.history.store import Store

FORMS: dict[Take, str] = {
    "last": "mean(data[{}], range_start=-1)",
    "mean": "mean(data[{}], range_start=0)",
    "min": "min(data[{}])",
    "max": "max(data[{}])",
    "count": "len(data[{}])",
}
"""How the check language takes that value of a series; it has no word for the first point, whatever its step."""


@dataclass(frozen=True, slots=True)
class Calibrated:
    """One group."""

    group: Group
    proposal: Proposal | None
    notes: tuple[str, ...]
    checks: tuple[str, ...]

    def lines(self) -> list[str]:
        """For a person; checks as they can be copied."""
        found = [*self.notes, *(self.proposal.lines() if self.proposal else ())]
        return [
            self.group.title,
            *(f"  {line}" for line in found),
            *self.group.told(),
            *(f"  --check {shlex.quote(check)}" for check in self.checks),
        ]


@dataclass(frozen=True, slots=True)
class Calibration:
    """All groups that were asked for."""

    groups: tuple[Calibrated, ...]

    def lines(self) -> list[str]:
        """For a person."""
        return [line for group in self.groups for line in group.lines()]


def calibrate(
    store: Store,
    metrics: Sequence[str],
    *,
    project: str | None = None,
    name: str | None = None,
    machine: str | None = None,
    take: Take = "last",
    last: int | None = None,
    false_alarms: float = 0.01,
    every: bool = False,
) -> Calibration:
    """Thresholds of all metrics that the patterns take; `every` takes runs that are not trusted, too (poisoned ones never)."""
    if not 0 < false_alarms < 1:
        raise UserError(f"--false-alarms {false_alarms}: must lie between 0 and 1", "--false-alarms 0.01")
    found = groups(store, metrics, project=project, name=name, machine=machine, take=take, trusted=not every, last=last)
    return Calibration(tuple(_calibrated(group, take, false_alarms) for group in found))


def _calibrated(group: Group, take: Take, false_alarms: float) -> Calibrated:
    start, notes = _settled(group.values)
    if start is None:
        return Calibrated(group, None, tuple(notes), ())
    values = group.values[start:]
    if len(values) < FEWEST:
        return Calibrated(group, None, (*notes, f"no thresholds: {counted(len(values), 'run')}, at least {FEWEST} are needed"), ())
    proposal = propose(values, false_alarms=false_alarms)
    form = FORMS.get(take)
    if form is None:
        notes.append(f"the check language has no expression for the {take} point")
    return Calibrated(group, proposal, tuple(notes), tuple(proposal.checks(form.format(json.dumps(group.metric)))) if form else ())


def _settled(values: Sequence[float]) -> tuple[int | None, list[str]]:
    """From which run on the values are a sample of one thing; None where they never are."""
    try:
        changes = [change for change in detect(values) if change.kind != "outlier"]
    except TooFew as error:
        return 0, [f"whether they changed is unknown: {error}"]
    if not changes:
        return 0, []
    if any(change.kind == "drift" and change.end == len(values) for change in changes):
        return None, ["no thresholds: the values drift, up to the last run; see `seatrial history trend`"]
    start = max(change.index if change.kind == "step" else change.end for change in changes)
    return start, [f"the values changed; only the {len(values) - start} runs since then are used"]
