"""What a profile is made from, and what it holds.

- `Columns`: the winning rollouts as some numbers per unit, no objects. They are read from the journal's heads in one pass: no merge is
  needed, and the campaign may be running. NaN marks a missing number.
- profile.json is a `Summary`, each line of tasks.jsonl a `Task`. A failure is never a reward of 0; an unknown figure is null, never 0;
  what excludes tasks says how many it used.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from seatrial.core.records import Record
from seatrial.rollouts.campaign_dir import CampaignDir
from seatrial.rollouts.journal.attempts import AttemptFile
from seatrial.rollouts.journal.journal_scan import Scan, Scanner
from seatrial.rollouts.manifest import Units

QUANTITIES = {
    "reward": "reward",
    "input_tokens": "input tokens",
    "output_tokens": "output tokens",
    "turns": "turns",
    "latency_s": "latency in seconds",
}
"""Numbers of each rollout, besides the metrics of its verifier, with their titles."""


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
    failed: Mapping[str, int]
    """Units that are given up, by class."""
    missing: int
    coverage: float
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
    expected: int
    ok: int
    failed: Mapping[str, int]
    missing: int
    coverage: float
    mean: Estimate
    """Mean over tasks of each task's mean reward."""
    reward: Numbers | None
    """Over rollouts: tasks with more rollouts weigh more."""
    pass_at: tuple[AtK, ...]
    best_at: tuple[AtK, ...]
    majority_at: tuple[AtK, ...]
    average_of: tuple[AverageOf, ...]
    never: int
    always: int
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
    seatrial: str
    inputs_sha256: str
    pass_at: float
    ks: tuple[int, ...]
    rules: tuple[str, ...]
    """How the figures came about, in words."""
    journal: Journal
    groups: tuple[Group, ...]
    histograms: tuple[Histogram, ...]


@dataclass(frozen=True, slots=True)
class Profile:
    """All of it."""

    summary: Summary
    tasks: tuple[Task, ...]
    """In order of the inputs."""

    @property
    def overall(self) -> Group:
        return self.summary.groups[0]


MOST_METRICS = 64
"""Names beyond these are counted, not kept: a verifier that invents a name per row must not fill the memory."""
_MOST_NAMES = 256
_NAN = float("nan")


class Columns:
    """Per unit: its reward, answer, numbers, and how it ended. A `journal.scan.Winners`."""

    def __init__(self, units: int) -> None:
        self._units = units
        self.state = bytearray()
        """OWED, OK or FAILED, as the scanner says in the end."""
        self.reward = self._empty()
        self.answer = array("q", bytes(8 * units))
        """Equal for equal answers; 0 for none. A 64-bit hash: within the rollouts of a task two answers do not meet by chance."""
        self.input_tokens = self._empty()
        self.output_tokens = self._empty()
        self.turns = self._empty()
        self.latency_s = self._empty()
        self.metrics: dict[str, array[float]] = {}
        self.metrics_left_out = 0
        self.finish = bytearray(units)
        self.finishes = [""]
        """What the numbers in `finish` stand for; 0 for what says nothing."""
        self.kind = bytearray(units)
        self.kinds = [""]
        """Classes of failures, in the same way."""

        self._quantities = [(getattr(self, name), name) for name in QUANTITIES]
        self._ordered: dict[int, list[float]] = {}

    def _empty(self) -> array[float]:
        return array("d", [_NAN]) * self._units

    def put(self, unit: int, head: Mapping[str, Any], file: AttemptFile, offset: int, length: int) -> None:
        """The record that is the best of its unit so far; where it lies is of no interest here."""
        del file, offset, length
        get = head.get
        if head["outcome"] != "ok":
            self.kind[unit] = _code(self.kinds, get("kind", "unknown"))
            return
        self.kind[unit] = 0
        for column, name in self._quantities:
            if (value := get(name)) is not None:
                column[unit] = value
        if (answer := get("answer")) is not None:
            self.answer[unit] = hash(answer) or 1
        if (finish := get("finish")) is not None:
            self.finish[unit] = _code(self.finishes, finish)
        for name, value in (get("metrics") or {}).items():
            if name not in self.metrics:
                if len(self.metrics) == MOST_METRICS:
                    self.metrics_left_out += 1
                    continue
                self.metrics[name] = self._empty()
            self.metrics[name][unit] = value

    def ordered(self, column: array[float]) -> list[float]:
        """All values of a column, sorted; the overall figures and the histograms share the work."""
        if id(column) not in self._ordered:
            self._ordered[id(column)] = sorted([value for value in column if value == value])
        return self._ordered[id(column)]


def read_columns(place: CampaignDir, units: Units) -> tuple[Columns, Scan]:
    """All winners of the journal, and what the scan says of the rest."""
    columns = Columns(units.total)
    scan = Scanner(place, units, columns).update()
    columns.state = scan.settled
    return columns, scan


def _code(names: list[str], name: str) -> int:
    """The number of a name. There are few; all that come too late for a number share the last one."""
    try:
        return names.index(name)
    except ValueError:
        if len(names) == _MOST_NAMES - 1:
            names.append("others")
        if len(names) == _MOST_NAMES:
            return _MOST_NAMES - 1
        if not isinstance(name, str):
            raise TypeError(f"{name!r} is no text") from None
        names.append(name)
        return len(names) - 1
