"""The values of a metric, kept apart by what shares a baseline: project, kind, name and machine.

- A value that is no finite number is not used, and told with the numbers of its runs.
- A pattern that takes no metric, and a metric without any run, is an error: silence would read as no change.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from seatrial.model.errors import UserError
from seatrial.regress.history.among import none_has, require
from seatrial.regress.history.record import Run, RunValue, Take
from seatrial.regress.history.store import Store


@dataclass(frozen=True, slots=True)
class Group:
    """One metric of runs that share a baseline, by time."""

    metric: str
    runs: tuple[Run, ...]
    values: tuple[float, ...]
    left_out: tuple[RunValue, ...]
    """Runs whose value is no finite number."""

    @property
    def title(self) -> str:
        """The metric and what the runs share."""
        run = self.runs[0] if self.runs else self.left_out[0].run
        return " · ".join(filter(None, (self.metric, run.project, run.kind.value, run.name, run.machine)))

    def told(self) -> list[str]:
        """What was left out."""
        marks = [f"run {value.run.id}: {value.mark or value.value}" for value in self.left_out]
        shown = ", ".join(marks[:5]) + (f", … ({len(marks)} in all)" if len(marks) > 5 else "")
        return [f"  not used, no finite number: {shown}"] if marks else []


def groups(
    store: Store,
    patterns: Sequence[str],
    *,
    project: str | None,
    name: str | None,
    machine: str | None,
    take: Take,
    trusted: bool = False,
    poisoned: bool = False,
    last: int | None = None,
) -> Iterator[Group]:
    """The groups of all metrics that the patterns take; runs that are poisoned only where asked for."""
    require(store, project=project, name=name, machine=machine)
    for pattern in patterns:
        metrics = store.metrics(project, pattern)
        if not metrics:
            raise UserError(f"no metric matches {pattern!r} in {store.path}", "seatrial history show '*' lists metrics")
        found = 0
        for metric in metrics:
            split: dict[tuple[str, str, str, str], list[RunValue]] = {}
            for value in store.values(metric, project=project, name=name, machine=machine, take=take, trusted=trusted):
                if poisoned or not value.run.poisoned:
                    split.setdefault((value.run.project, value.run.kind, value.run.name, value.run.machine), []).append(value)
            for values in split.values():
                found += 1
                yield _group(metric, values[-last:] if last else values)
        if not found:
            raise UserError(
                none_has(repr(pattern), project=project, name=name, machine=machine), "without --name and --machine, or with --every"
            )


def _group(metric: str, values: Sequence[RunValue]) -> Group:
    """Finite values apart from the rest."""
    runs, numbers, left_out = [], [], []
    for value in values:
        if value.mark or value.value is None or not math.isfinite(value.value):
            left_out.append(value)
        else:
            runs.append(value.run)
            numbers.append(value.value)
    return Group(metric, tuple(runs), tuple(numbers), tuple(left_out))
