"""Where metrics changed over the runs: each change with the runs and commits between which it lies.

- Runs that do not share a baseline are series of their own. Poisoned runs are left out unless asked for.
- A series that is too short is told as that, never as unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from seatrial.model.errors import UserError
from seatrial.model.words import counted
from seatrial.regress.history.groups import Group, groups
from seatrial.regress.history.numbers.steps import Change, TooFew, detect
from seatrial.regress.history.record import Run, Take
from seatrial.regress.history.store import Store


@dataclass(frozen=True, slots=True)
class Series:
    """One group with its changes."""

    group: Group
    changes: tuple[Change, ...]
    cannot_tell: str
    """Why nothing can be said, or empty."""

    def lines(self) -> list[str]:
        """For a person."""
        head = f"{self.group.title}: {counted(len(self.group.values), 'run')}"
        if self.cannot_tell:
            return [f"{head}, cannot tell: {self.cannot_tell}", *self.group.told()]
        found = [f"  {_line(change, self.group.runs)}" for change in self.changes]
        return [f"{head}, {_counted(self.changes)}", *found, *self.group.told()]


@dataclass(frozen=True, slots=True)
class Trend:
    """All series that were asked for."""

    series: tuple[Series, ...]
    alarm: float

    def lines(self) -> list[str]:
        """For a person; the alarm rate is said once."""
        return [line for series in self.series for line in series.lines()] + [f"a false step or drift per series: at most {self.alarm:g}"]


def trend(
    store: Store,
    metrics: Sequence[str],
    *,
    project: str | None = None,
    name: str | None = None,
    machine: str | None = None,
    take: Take = "last",
    alarm: float = 0.01,
    every: bool = False,
) -> Trend:
    """Changes of all metrics that the patterns take; `every` takes poisoned runs too."""
    if not 0 < alarm < 1:
        raise UserError(f"--alarm {alarm}: must lie between 0 and 1", "--alarm 0.01")
    found = [
        _series(group, alarm) for group in groups(store, metrics, project=project, name=name, machine=machine, take=take, poisoned=every)
    ]
    return Trend(tuple(found), alarm)


def _series(group: Group, alarm: float) -> Series:
    try:
        return Series(group, tuple(detect(group.values, alarm=alarm)), "")
    except TooFew as error:
        return Series(group, (), str(error))


def _counted(changes: Sequence[Change]) -> str:
    """`2 steps, 1 drift`, or `no change`."""
    counts = [(kind, sum(change.kind == kind for change in changes)) for kind in ("step", "drift", "outlier")]
    return ", ".join(f"{count} {kind}{'s' if count > 1 else ''}" for kind, count in counts if count) or "no change"


def _line(change: Change, runs: Sequence[Run]) -> str:
    """One change with its runs."""
    moved = f"{change.before:.6g} -> {change.after:.6g} ({change.sigmas:+.1f} sigma, confidence {change.confidence:.4f})"
    first, last = runs[change.index], runs[change.end - 1]
    if change.kind == "step":
        return f"step    {moved} between {_run(runs[change.index - 1])} and {_run(first)}"
    if change.kind == "drift":
        return f"drift   {moved} from {_run(first)} to {_run(last)}"
    return f"outlier {moved} in {_run(first)}"


def _run(run: Run) -> str:
    return f"run {run.id}" + (f" ({run.commit[:10]})" if run.commit else "")
