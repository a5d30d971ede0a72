"""Metric series made ready to plot.

- Long series are thinned to the minimum and maximum of each bucket, so no spike disappears.
- A non-finite point is never hidden: it is a gap in the line and part of a `Gap` with its steps, kind and count.
- Order: damaged series first, then reward, loss, kl and grad_norm, then the rest by name.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from seatrial.files import number_to_json
from seatrial.model.series import Series

POINTS = 2000
_FIRST = ("reward", "loss", "kl", "grad_norm")


@dataclass(frozen=True, slots=True)
class Gap:
    """Consecutive points that are not finite in the same way."""

    first: int
    last: int
    kind: str
    """`NaN`, `Infinity` or `-Infinity`."""
    count: int

    def __str__(self) -> str:
        return (
            f"{self.kind} at step {self.first}"
            if self.count == 1
            else f"{self.kind} at {self.count} steps from {self.first} to {self.last}"
        )


@dataclass(frozen=True, slots=True)
class Plot:
    """One metric, thinned; `values` holds None where the line must break."""

    tag: str
    steps: tuple[int, ...]
    values: tuple[float | None, ...]
    gaps: tuple[Gap, ...]
    points: int
    """How many points the series has; more than `steps` when it was thinned."""
    important: bool
    """One of the metrics that a reader looks at first, or one with non-finite points."""

    def finite(self) -> list[float]:
        """The finite values that are plotted; their minimum and maximum are those of the whole series."""
        return [value for value in self.values if value is not None]


def plots(series: Iterable[Series]) -> tuple[Plot, ...]:
    """One plot per series that has points, in reading order."""
    made = [_plot(one) for one in series if len(one)]
    return tuple(sorted(made, key=lambda plot: (not plot.gaps, _rank(plot.tag), plot.tag)))


def _plot(series: Series) -> Plot:
    gaps, breaks = _gaps(series)
    kept = range(len(series)) if len(series) <= POINTS else sorted(_extremes(series) | breaks)
    values = tuple(value if math.isfinite(value := series.values[index]) else None for index in kept)
    steps = tuple(series.steps[index] for index in kept)
    return Plot(series.tag, steps, values, gaps, len(series), bool(gaps) or _rank(series.tag)[0] == 0)


def _gaps(series: Series) -> tuple[tuple[Gap, ...], set[int]]:
    """Runs of non-finite points, and the indices of their first and last points."""
    gaps: list[Gap] = []
    breaks: set[int] = set()
    previous = -2
    for index, (step, value) in enumerate(zip(series.steps, series.values, strict=True)):
        if math.isfinite(value):
            continue
        kind = str(number_to_json(value))
        if previous == index - 1 and gaps[-1].kind == kind:
            breaks.discard(previous if gaps[-1].count > 1 else -1)
            gaps[-1] = Gap(gaps[-1].first, step, kind, gaps[-1].count + 1)
        else:
            gaps.append(Gap(step, step, kind, 1))
        breaks.add(index)
        previous = index
    return tuple(gaps), breaks


def _extremes(series: Series) -> set[int]:
    """Indices of the first and last finite points, and of the smallest and largest of each bucket."""
    finite = [index for index, value in enumerate(series.values) if math.isfinite(value)]
    size = max(1, math.ceil(len(finite) * 2 / POINTS))
    kept = {finite[0], finite[-1]} if finite else set()
    for start in range(0, len(finite), size):
        bucket = finite[start : start + size]
        kept |= {min(bucket, key=series.values.__getitem__), max(bucket, key=series.values.__getitem__)}
    return kept


def _rank(tag: str) -> tuple[int, int]:
    """(0, n) for a metric named like the n-th of the first ones, (1, n) for one that contains it, (2, 0) for others."""
    name = tag.lower().removesuffix("/mean").rsplit("/", 1)[-1]
    for place, word in enumerate(_FIRST):
        if name in (word, word + "s"):
            return 0, place
    for place, word in enumerate(_FIRST):
        if word in name:
            return 1, place
    return 2, 0
