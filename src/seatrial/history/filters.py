"""Which runs: the filters --project, --name, --machine, --kind and --branch, and groups that share a baseline."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from seatrial.core.errors import UserError
from seatrial.history.run_records import RunValue, StoredRun, Take
from seatrial.history.store import Store

_SHOWN = 5


def require(
    store: Store,
    *,
    project: str | None = None,
    name: str | None = None,
    machine: str | None = None,
    kind: str | None = None,
    branch: str | None = None,
) -> None:
    """Raise a UserError unless a run is of all that is given; it names the first option that leaves none, and what the runs have."""
    before: dict[str, str] = {}
    given: dict[str, str | None] = {**_given(project, name, machine), "kind": kind, "branch": branch}
    for option, word in given.items():
        if word is None:
            continue
        there = store.distinct(option, before)
        if word not in there:
            where = f"those of {_told(before)}" if before else "all"
            fix = f"--{option} takes one of: {_listed(there)}" if there else "import runs first: seatrial history import PATH"
            raise UserError(f"--{option} {word}: no run of this {option} among {where} in {store.path}", fix)
        before[option] = word


def require_of(run: StoredRun, *, project: str | None = None, name: str | None = None, machine: str | None = None) -> None:
    """Raise a UserError unless this run is of all that is given."""
    for option, word in _given(project, name, machine).items():
        own = getattr(run, option)
        if own != word:
            raise UserError(f"--{option} {word}: run {run.id} is of {option} {own!r}", f"leave --{option} out, or name another run")


def options(*, project: str | None = None, name: str | None = None, machine: str | None = None) -> str:
    """What is given, as a person writes it; empty where nothing is."""
    return _told(_given(project, name, machine))


def none_has(what: str, *, project: str | None = None, name: str | None = None, machine: str | None = None) -> str:
    """The sentence for metrics that no run has among those that are chosen."""
    given = options(project=project, name=name, machine=machine)
    return f"no run has {what}" + (f" among those of {given}" if given else "")


def _told(given: dict[str, str]) -> str:
    return " ".join(f"--{option} {word}" for option, word in given.items())


def _given(project: str | None, name: str | None, machine: str | None) -> dict[str, str]:
    """Options and their words, in the order in which they are asked for; an empty word is one, too."""
    words = {"project": project, "name": name, "machine": machine}
    return {option: word for option, word in words.items() if word is not None}


def _listed(words: list[str]) -> str:
    return ", ".join(map(repr, words[:_SHOWN])) + (f", … ({len(words)} in all)" if len(words) > _SHOWN else "")


@dataclass(frozen=True, slots=True)
class BaselineGroup:
    """One metric of runs that share a baseline, by time."""

    metric: str
    runs: tuple[StoredRun, ...]
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
) -> Iterator[BaselineGroup]:
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


def _group(metric: str, values: Sequence[RunValue]) -> BaselineGroup:
    """Finite values apart from the rest."""
    runs, numbers, left_out = [], [], []
    for value in values:
        if value.mark or value.value is None or not math.isfinite(value.value):
            left_out.append(value)
        else:
            runs.append(value.run)
            numbers.append(value.value)
    return BaselineGroup(metric, tuple(runs), tuple(numbers), tuple(left_out))
