"""Figures over tasks that belong together: all of them, those of a dataset, an agent, a tag, a dataset with an agent.

The headline of a group is the mean over its tasks, each counting once, whatever its number of rollouts. Beside it stand the figures
over rollouts, where a task with more rollouts weighs more.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from seatrial.rollouts.profile import formulas
from seatrial.rollouts.profile.columns import Columns
from seatrial.rollouts.profile.model import AtK, AverageOf, Estimate, Group, Numbers, Task
from seatrial.rollouts.profile.tasks import numbers, rewards_of, truncated

By = Literal["overall", "dataset", "agent", "tag", "dataset x agent"]
NO_AGENT = "(none)"


class Sources(NamedTuple):
    """What groups are made from."""

    columns: Columns
    units_of: Callable[[int], range]
    ks: tuple[int, ...]


def make_groups(tasks: Sequence[Task], sources: Sources) -> tuple[Group, ...]:
    """The group of all first, then the others by their kind and name."""
    overall = _group("overall", "all tasks", tasks, sources)
    made = [overall]
    for by, name, members in _divisions(tasks):
        # One dataset is all of them: nothing is to be counted again.
        same = len(members) == len(tasks)
        made.append(overall.model_copy(update={"by": by, "name": name}) if same else _group(by, name, members, sources))
    return tuple(made)


def _divisions(tasks: Sequence[Task]) -> Iterator[tuple[By, str, Sequence[Task]]]:
    agents = any(task.agent for task in tasks)
    yield from _divided("dataset", tasks, lambda task: (task.dataset,))
    if agents:
        yield from _divided("agent", tasks, lambda task: (task.agent or NO_AGENT,))
    yield from _divided("tag", tasks, lambda task: tuple(dict.fromkeys(task.tags)))
    if agents and len({task.dataset for task in tasks}) > 1 and len({task.agent for task in tasks}) > 1:
        yield from _divided("dataset x agent", tasks, lambda task: (f"{task.dataset} x {task.agent or NO_AGENT}",))


def _divided(by: By, tasks: Sequence[Task], names: Callable[[Task], tuple[str, ...]]) -> Iterator[tuple[By, str, Sequence[Task]]]:
    found: dict[str, list[Task]] = {}
    for task in tasks:
        for name in names(task):
            found.setdefault(name, []).append(task)
    for name in sorted(found):
        yield by, name, found[name]


def _group(by: By, name: str, tasks: Sequence[Task], sources: Sources) -> Group:
    columns = sources.columns
    ranges = [sources.units_of(task.index) for task in tasks]
    finish = _added(task.finish for task in tasks)

    def over(column: array[float]) -> Numbers | None:
        return numbers(columns.ordered(column) if by == "overall" else _pooled(column, ranges))

    reward = over(columns.reward)
    # No mean of such rewards lies beyond: an interval that does says less than is known.
    within = reward is not None and reward.min >= 0 and reward.max <= 1
    expected, ok = sum(task.expected for task in tasks), sum(task.n for task in tasks)
    return Group(
        by=by,
        name=name,
        tasks=len(tasks),
        measured=sum(task.n > 0 for task in tasks),
        expected=expected,
        ok=ok,
        failed=_added(task.failed for task in tasks),
        missing=sum(task.missing for task in tasks),
        coverage=ok / expected if expected else 0.0,
        mean=_estimate([task.reward.mean for task in tasks if task.reward], within),
        reward=reward,
        pass_at=_at_k(tasks, sources.ks, lambda task: task.pass_at, within=True),
        best_at=_at_k(tasks, sources.ks, lambda task: task.best_at, within),
        majority_at=_at_k(_voting(tasks, sources), sources.ks, lambda task: task.majority_at, within),
        average_of=_averages(columns, ranges, sources.ks, within),
        never=sum(task.pass_rate == 0 for task in tasks),
        always=sum(task.pass_rate == 1 for task in tasks),
        input_tokens=over(columns.input_tokens),
        output_tokens=over(columns.output_tokens),
        turns=over(columns.turns),
        latency_s=over(columns.latency_s),
        finish=finish,
        truncated=truncated(finish),
        metrics={key: found for key, column in columns.metrics.items() if (found := numbers(_pooled(column, ranges)))},
    )


def _pooled(column: array[float], ranges: Sequence[range]) -> list[float]:
    """What a column holds for these units, without the units that have nothing."""
    return [value for units in ranges for value in column[units.start : units.stop] if value == value]


def _added(counts: Iterator[Mapping[str, int]]) -> dict[str, int]:
    """Counts added up, the most frequent first."""
    added: Counter[str] = Counter()
    for one in counts:
        added.update(one)
    return dict(sorted(added.items(), key=lambda item: (-item[1], item[0])))


def _estimate(values: Sequence[float], within: bool) -> Estimate:
    """The mean with its interval; `within`: no value can lie beyond 0 and 1."""
    low, high = formulas.interval(values) or (None, None)
    if within and low is not None and high is not None:
        low, high = max(0.0, low), min(1.0, high)
    return Estimate(value=formulas.mean(values) if values else None, low=low, high=high, tasks=len(values))


def _at_k(tasks: Sequence[Task], ks: Sequence[int], figures: Callable[[Task], tuple[float | None, ...]], within: bool) -> tuple[AtK, ...]:
    made = []
    for place, k in enumerate(ks):
        values = [value for task in tasks if (value := figures(task)[place]) is not None]
        made.append(AtK(k=k, **dict(_estimate(values, within))))
    return tuple(made)


def _voting(tasks: Sequence[Task], sources: Sources) -> list[Task]:
    """Tasks of datasets whose verifier gives answers: where none ever does, a vote says nothing."""
    answers = sources.columns.answer
    votes: dict[str, bool] = {}
    for task in tasks:
        if not votes.get(task.dataset):
            units = sources.units_of(task.index)
            votes[task.dataset] = any(answers[units.start : units.stop])
    return [task for task in tasks if votes[task.dataset]]


def _averages(columns: Columns, ranges: Sequence[range], ks: Sequence[int], within: bool) -> tuple[AverageOf, ...]:
    rewards = [rewards_of(columns, units) for units in ranges]
    made = []
    for k in ks:
        rewards = [row for row in rewards if len(row) >= k]
        firsts = [row[:k] for row in rewards]
        runs = [formulas.mean(run) for run in zip(*firsts, strict=True)]
        spread = formulas.std(runs)
        found = _estimate([formulas.mean(row) for row in firsts], within)
        error = None if spread is None else spread / math.sqrt(k)
        made.append(AverageOf(k=k, std_dev_across_runs=spread, std_err_across_runs=error, **dict(found)))
    return tuple(made)
