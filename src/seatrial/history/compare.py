"""Two revisions side by side, and changes over all runs, metric by metric."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Unpack

from seatrial.core.errors import UserError
from seatrial.core.text import counted
from seatrial.history.change_points import Change, TooFew, find_changes
from seatrial.history.formats import columns, number
from seatrial.history.store import BaselineGroup, RunFilter, RunValue, Store, StoredRun, Take, groups

LAST, ENOUGH = 20, 5
"""So many baselines give the spread, and so many are needed."""
_MAD = 1.4826
"""The median distance from the median, times this, is the standard deviation of a normal distribution."""

Identity = tuple[str, str, str, str, str]
"""Project, kind, name, machine, metric."""


@dataclass(frozen=True, slots=True)
class MetricRow:
    identity: Identity
    before: float | None
    after: float | None
    mark: str
    spread: float | None
    """Of the baselines; None where there are too few."""

    @property
    def sigmas(self) -> float | None:
        if self.before is None or self.after is None or not self.spread:
            return None
        return (self.after - self.before) / self.spread


@dataclass(frozen=True, slots=True)
class Comparison:
    before: str
    after: str
    runs: tuple[int, int]
    rows: list[MetricRow]
    only_before: list[Identity]
    only_after: list[Identity]

    def lines(self) -> list[str]:
        lines = [f"{self.before[:12]} ({counted(self.runs[0], 'run')}) and {self.after[:12]} ({counted(self.runs[1], 'run')})"]
        table = [("before", "after", "difference", "sigmas", "metric", "of")]
        for row in self.rows:
            table.append((*_cells(row), row.identity[4], " ".join(row.identity[:4])))
        lines += columns(table) if self.rows else ["no metric is on both sides"]
        for side, names in ((self.before, self.only_before), (self.after, self.only_after)):
            lines += [f"only {side[:12]}: {name[4]} ({' '.join(name[:4])})" for name in names]
        return lines


def _cells(row: MetricRow) -> tuple[str, str, str, str]:
    before, after = (number(value, row.mark if value is None else "") for value in (row.before, row.after))
    if row.before is None or row.after is None:
        return before, after, "-", "-"
    difference = row.after - row.before
    share = f" ({100 * difference / abs(row.before):+.2f} %)" if row.before else ""
    if row.spread is None:
        sigmas = "too few baselines"
    else:
        sigmas = f"{row.sigmas:+.1f}" if row.sigmas is not None else "0" if not difference else "no spread"
    return before, after, f"{difference:+.7g}{share}", sigmas


def resolve_revision(store: Store, revision: str, repo: Path | None) -> str:
    """The commit that a revision names: by git where `repo` is a checkout, else as the beginning of a commit in the store."""
    if repo is not None:
        from seatrial.evidence.git import commit_of, top_level

        try:
            found = commit_of(top_level(repo), revision)
        except UserError:
            found = None
        if found is not None and store.runs(commit=found, limit=1):
            return found
        if found is not None and not re.fullmatch(r"[0-9a-f]{4,64}", revision):
            raise UserError(f"{revision} is {found[:12]}, and the history has no run of it", "seatrial history runs lists what it has")
    if not re.fullmatch(r"[0-9a-f]{4,64}", revision):
        raise UserError(
            f"{revision!r}: git does not know it here, and it is no beginning of a commit", "name a commit of `seatrial history runs`"
        )
    commits = sorted({run.commit for run in store.runs(commit=revision) if run.commit})
    if not commits:
        raise UserError(f"{revision}: the history has no run of it", "seatrial history runs lists what it has")
    if len(commits) > 1:
        raise UserError(f"{revision}: {len(commits)} commits begin so: {', '.join(one[:12] for one in commits[:5])}", "write more of it")
    return commits[0]


def compare_revisions(
    store: Store, before: str, after: str, *, patterns: Sequence[str] = (), project: str | None = None, take: Take = "last"
) -> Comparison:
    """Compare two commits (see `resolve_revision`)."""
    left, right = _side(store, before, patterns, project, take), _side(store, after, patterns, project, take)
    rows = []
    for identity in sorted(left.keys() & right.keys()):
        (first, mark), (second, other) = _one(left[identity]), _one(right[identity])
        rows.append(MetricRow(identity, first, second, mark or other, _spread(store, identity, take)))
    return Comparison(
        before,
        after,
        (len(store.runs(commit=before, project=project)), len(store.runs(commit=after, project=project))),
        rows,
        sorted(left.keys() - right.keys()),
        sorted(right.keys() - left.keys()),
    )


def _side(store: Store, commit: str, patterns: Sequence[str], project: str | None, take: Take) -> dict[Identity, list[RunValue]]:
    wanted = {name for pattern in patterns for name in store.metrics(project, pattern)} if patterns else None
    found: dict[Identity, list[RunValue]] = {}
    for run in store.runs(commit=commit, project=project):
        for metric, value in store.of_run(run.id or 0, take=take).items():
            if wanted is None or metric in wanted:
                found.setdefault((run.project, str(run.kind), run.name, run.machine, metric), []).append(value)
    return found


def _one(values: list[RunValue]) -> tuple[float | None, str]:
    """The median, or None with the mark: one run with a NaN is not hidden by the others."""
    mark = next((one.mark for one in values if one.mark), "")
    numbers = [one.value for one in values if one.value is not None]
    return (None, mark) if mark or not numbers else (statistics.median(numbers), "")


def _spread(store: Store, identity: Identity, take: Take) -> float | None:
    project, kind, name, machine, metric = identity
    found = store.values(metric, project=project, name=name, machine=machine, take=take, trusted=True, limit=LAST)
    values = [one.value for one in found if str(one.run.kind) == kind and one.value is not None and not one.mark]
    if len(values) < ENOUGH:
        return None
    middle = statistics.median(values)
    return _MAD * statistics.median(abs(value - middle) for value in values)


@dataclass(frozen=True, slots=True)
class TrendSeries:
    group: BaselineGroup
    changes: tuple[Change, ...]
    cannot_tell: str

    def lines(self) -> list[str]:
        head = f"{self.group.title}: {counted(len(self.group.values), 'run')}"
        if self.cannot_tell:
            return [f"{head}, cannot tell: {self.cannot_tell}", *self.group.told()]
        found = [f"  {_line(change, self.group.runs)}" for change in self.changes]
        counts = [(kind, sum(change.kind == kind for change in self.changes)) for kind in ("step", "drift", "outlier")]
        told = ", ".join(counted(count, kind) for kind, count in counts if count) or "no change"
        return [f"{head}, {told}", *found, *self.group.told()]


@dataclass(frozen=True, slots=True)
class Trend:
    series: tuple[TrendSeries, ...]
    alarm: float

    def lines(self) -> list[str]:
        return [line for series in self.series for line in series.lines()] + [f"a false step or drift per series: at most {self.alarm:g}"]


def trend(
    store: Store, metrics: Sequence[str], *, take: Take = "last", alarm: float = 0.01, every: bool = False, **of: Unpack[RunFilter]
) -> Trend:
    """Changes of all metrics that the patterns take; `every` takes poisoned runs too."""
    if not 0 < alarm < 1:
        raise UserError(f"--alarm {alarm}: must lie between 0 and 1", "--alarm 0.01")
    found = []
    for group in groups(store, metrics, take=take, poisoned=every, **of):
        try:
            found.append(TrendSeries(group, tuple(find_changes(group.values, alarm=alarm)), ""))
        except TooFew as error:
            found.append(TrendSeries(group, (), str(error)))
    return Trend(tuple(found), alarm)


def _line(change: Change, runs: Sequence[StoredRun]) -> str:
    moved = f"{change.before:.6g} -> {change.after:.6g} ({change.sigmas:+.1f} sigma, confidence {change.confidence:.4f})"
    first, last = runs[change.index], runs[change.end - 1]
    if change.kind == "step":
        return f"step    {moved} between {_run(runs[change.index - 1])} and {_run(first)}"
    if change.kind == "drift":
        return f"drift   {moved} from {_run(first)} to {_run(last)}"
    return f"outlier {moved} in {_run(first)}"


def _run(run: StoredRun) -> str:
    return f"run {run.id}" + (f" ({run.commit[:10]})" if run.commit else "")
