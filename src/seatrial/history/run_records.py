"""What the history holds: runs, their points, and one value of one metric in one run.

- Stdlib only: the pytest plugin and `seatrial history show` pay for nothing else.
- What shares a baseline: project, kind, name, metric and machine. Anything else may differ between two runs of a baseline.
- A value that is no finite number is kept, with its mark instead of a value; it is never dropped, and never a number.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal

Take = Literal["last", "mean", "min", "max", "first", "count"]
TAKES: tuple[Take, ...] = ("last", "mean", "min", "max", "first", "count")
"""How the points of a metric become its one value in a run."""
UNKNOWN = "unknown machine"


class Kind(StrEnum):
    """What a run was."""

    TEST = "test"
    TRIAL = "trial"
    CAMPAIGN = "campaign"
    BENCHMARK = "benchmark"
    METRICS = "metrics"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRun:
    """One run of one thing."""

    id: int | None = None
    """Its number in the store."""
    project: str
    kind: Kind
    name: str
    """What was run, within the project and kind: empty for a whole test session, the loop and its levels for a trial."""
    commit: str | None = None
    branch: str | None = None
    dirty: bool = False
    time: float
    """When it started, in seconds since 1970."""
    machine: str = ""
    passed: bool | None = None
    """None where the run had no outcome."""
    trusted: bool = False
    """It may serve as a baseline: passed, clean, and on a trusted branch."""
    why_untrusted: str = ""
    source: str = ""
    """The file or directory it was imported from."""
    digest: str
    """Of what was imported; a store holds it once."""
    poisoned: str = ""
    """Why a person took it out of the baselines, or empty."""

    @property
    def order(self) -> tuple[float, float]:
        """What sorts runs: time, then number; one that is not kept would get the next number."""
        return self.time, math.inf if self.id is None else self.id

    @property
    def baseline(self) -> bool:
        """It may serve as a baseline, and nobody took it out."""
        return self.trusted and not self.poisoned


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One value of a metric at a step, or without one."""

    metric: str
    step: int | None = None
    value: float | None
    mark: str = ""
    """Empty for a finite number; `nan`, `inf`, `-inf`, `null`, or `text` for what is no number at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunValue:
    """One metric in one run, taken as one value."""

    run: StoredRun
    value: float | None
    """None where the points allow none, as the mean of points with a NaN."""
    mark: str
    """Empty when every point is finite, otherwise the first mark among them: a finite last point does not hide a NaN before it."""
    count: int
    """How many points there are."""


def point(metric: str, value: Any, step: int | None = None) -> Point:
    """A point from any JSON value; what is no finite number gets its mark."""
    if type(value) is float and math.isfinite(value):  # nearly all are
        return Point(metric=metric, step=step, value=value)
    if isinstance(value, str):
        value = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}.get(value, value)
    if value is None:
        return Point(metric=metric, step=step, value=None, mark="null")
    if isinstance(value, bool | int | float):
        try:
            number = float(value)
        except OverflowError:
            return Point(metric=metric, step=step, value=None, mark="inf" if value > 0 else "-inf")
        if math.isfinite(number):
            return Point(metric=metric, step=step, value=number)
        return Point(metric=metric, step=step, value=None, mark="nan" if math.isnan(number) else "inf" if number > 0 else "-inf")
    return Point(metric=metric, step=step, value=None, mark="text")
