"""Two revisions beside each other, metric by metric.

- A side is the runs of one commit; with several, the median of their values. A metric that is not finite in one of them is shown so.
- The difference is told also in units of the spread of the baselines of that metric, where there are enough of them.
- Metrics of one side only are listed. Nothing in common is told, and is no success.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from seatrial.model.errors import UserError
from seatrial.model.words import counted
from seatrial.regress.history.record import Run, RunValue, Take
from seatrial.regress.history.show import columns, number
from seatrial.regress.history.store import Store

LAST, ENOUGH = 20, 5
"""So many baselines give the spread, and so many are needed."""
_MAD = 1.4826
"""The median distance from the median, times this, is the standard deviation of a normal distribution."""

Identity = tuple[str, str, str, str, str]
"""Project, kind, name, machine, metric."""


@dataclass(frozen=True, slots=True)
class Row:
    """One metric of both sides."""

    identity: Identity
    before: float | None
    after: float | None
    mark: str
    """Why one of them is no number, or empty."""
    spread: float | None
    """Of the baselines; None where there are too few."""

    @property
    def sigmas(self) -> float | None:
        """The difference in units of the spread."""
        if self.before is None or self.after is None or not self.spread:
            return None
        return (self.after - self.before) / self.spread


@dataclass(frozen=True, slots=True)
class Comparison:
    """What was found."""

    before: str
    after: str
    runs: tuple[int, int]
    rows: list[Row]
    only_before: list[Identity]
    only_after: list[Identity]

    def lines(self) -> list[str]:
        """For a person."""
        lines = [f"{self.before[:12]} ({counted(self.runs[0], 'run')}) and {self.after[:12]} ({counted(self.runs[1], 'run')})"]
        table = [("before", "after", "difference", "sigmas", "metric", "of")]
        for row in self.rows:
            table.append((*_cells(row), row.identity[4], " ".join(row.identity[:4])))
        lines += columns(table) if self.rows else ["no metric is on both sides"]
        for side, names in ((self.before, self.only_before), (self.after, self.only_after)):
            lines += [f"only {side[:12]}: {name[4]} ({' '.join(name[:4])})" for name in names]
        return lines


def _cells(row: Row) -> tuple[str, str, str, str]:
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


def resolve(store: Store, revision: str, repo: Path | None) -> str:
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


def compare(
    store: Store, before: str, after: str, *, patterns: Sequence[str] = (), project: str | None = None, take: Take = "last"
) -> Comparison:
    """Compare two commits (see `resolve`)."""
    left, right = _side(store, before, patterns, project, take), _side(store, after, patterns, project, take)
    rows = []
    for identity in sorted(left.keys() & right.keys()):
        (first, mark), (second, other) = _one(left[identity]), _one(right[identity])
        rows.append(Row(identity, first, second, mark or other, _spread(store, identity, take)))
    return Comparison(
        before,
        after,
        (len(_runs(store, before, project)), len(_runs(store, after, project))),
        rows,
        sorted(left.keys() - right.keys()),
        sorted(right.keys() - left.keys()),
    )


def _runs(store: Store, commit: str, project: str | None) -> list[Run]:
    return store.runs(commit=commit, project=project)


def _side(store: Store, commit: str, patterns: Sequence[str], project: str | None, take: Take) -> dict[Identity, list[RunValue]]:
    wanted = {name for pattern in patterns for name in store.metrics(project, pattern)} if patterns else None
    found: dict[Identity, list[RunValue]] = {}
    for run in _runs(store, commit, project):
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
