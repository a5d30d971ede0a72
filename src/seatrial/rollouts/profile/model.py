"""What a profile holds: profile.json is a `Summary`, each line of tasks.jsonl a `Task`.

- A failure is never a reward of 0: rewards are those of rollouts that worked, `n` says how many, `failed` and `missing` the others.
- A figure that cannot be known is null, never 0: the spread of one rollout, pass@8 of four rollouts, the vote where nobody answers.
- Whatever excludes tasks says how many it used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from seatrial.model.record import Record


@dataclass(frozen=True, slots=True)
class Numbers:
    """One quantity over rollouts that worked and have it."""

    n: int
    mean: float
    std: float | None
    """Of the sample (n - 1); None for one rollout."""
    min: float
    median: float
    p95: float
    max: float
    total: float


@dataclass(frozen=True, slots=True)
class Task:
    """One row of the inputs and all its rollouts. The tuples of figures at k are in the order of `Summary.ks`."""

    index: int
    id: str
    dataset: str
    agent: str | None
    tags: tuple[str, ...]
    source: str
    expected: int
    n: int
    """Rollouts that worked."""
    failed: Mapping[str, int]
    """Units that are given up, by class."""
    missing: int
    """Units that are still owed."""
    coverage: float
    """n / expected."""
    reward: Numbers | None
    correct: int
    """Rollouts with a reward of `Summary.pass_at` and more."""
    pass_rate: float | None
    pass_low: float | None
    """Wilson's interval of 95 %."""
    pass_high: float | None
    pass_at: tuple[float | None, ...]
    best_at: tuple[float | None, ...]
    majority_at: tuple[float | None, ...]
    input_tokens: Numbers | None
    output_tokens: Numbers | None
    turns: Numbers | None
    latency_s: Numbers | None
    finish: Mapping[str, int]
    truncated: float | None
    """Share of rollouts that ended at a limit of length, of those that say how they ended."""
    metrics: Mapping[str, Numbers]


class Estimate(Record):
    """A mean over tasks, each counting once."""

    value: float | None
    low: float | None
    """Interval of 95 % over tasks; None where tasks do not differ, or there is one."""
    high: float | None
    tasks: int
    """How many it used."""


class AtK(Estimate):
    """A figure of k rollouts per task; tasks with fewer are left out, not counted as wrong."""

    k: int


class AverageOf(AtK):
    """Mean reward of the first k rollouts: pass@1[avg-of-k]. Run i is made of the i-th rollout of each task."""

    std_dev_across_runs: float | None
    std_err_across_runs: float | None


class Group(Record):
    """Tasks that belong together."""

    by: Literal["overall", "dataset", "agent", "tag", "dataset x agent"]
    name: str
    tasks: int
    measured: int
    """Tasks with a rollout that worked."""
    expected: int
    """Units."""
    ok: int
    failed: Mapping[str, int]
    missing: int
    coverage: float
    """ok / expected."""
    mean: Estimate
    """Mean over tasks of each task's mean reward."""
    reward: Numbers | None
    """Over rollouts: tasks with more rollouts weigh more."""
    pass_at: tuple[AtK, ...]
    best_at: tuple[AtK, ...]
    majority_at: tuple[AtK, ...]
    average_of: tuple[AverageOf, ...]
    never: int
    """Tasks with a pass rate of 0."""
    always: int
    """Tasks with a pass rate of 1."""
    input_tokens: Numbers | None
    output_tokens: Numbers | None
    turns: Numbers | None
    latency_s: Numbers | None
    finish: Mapping[str, int]
    truncated: float | None
    metrics: Mapping[str, Numbers]


class Bar(Record):
    """One bar of a histogram."""

    label: str
    count: int


class Histogram(Record):
    """A distribution over all tasks, or all rollouts that worked."""

    name: str
    of: Literal["tasks", "rollouts"]
    bars: tuple[Bar, ...]


class Journal(Record):
    """What was found while reading, besides what counts."""

    torn: int
    """Lines that are no record: their units are owed."""
    tails: int
    """Last lines without an end; of a running attempt they may still be in the writing."""
    foreign: int
    """Records of another campaign or shard."""
    duplicates: int
    """Further records of units that are settled: the first rollout counts."""
    conflicts: int
    """Units with rollouts of different rewards."""


class Summary(Record):
    """profile.json."""

    version: Literal[1] = 1
    campaign: str
    made: str
    """UTC."""
    seatrial: str
    inputs_sha256: str
    pass_at: float
    ks: tuple[int, ...]
    rules: tuple[str, ...]
    """How the figures came about, in words."""
    journal: Journal
    groups: tuple[Group, ...]
    """The first is over all tasks."""
    histograms: tuple[Histogram, ...]


@dataclass(frozen=True, slots=True)
class Profile:
    """All of it."""

    summary: Summary
    tasks: tuple[Task, ...]
    """In order of the inputs."""

    @property
    def overall(self) -> Group:
        """Over all tasks."""
        return self.summary.groups[0]
