"""Where a series changed: steps, drifts and outliers, each under its own name.

- `detect` raises a false step or drift on pure noise in at most `alarm` of all series (measured: bench/history_steps.py), and a false
  outlier in at most `alarm` of series of normal noise.
- A step has at least SEGMENT points on both sides; fewer wild points in a row are outliers, also at the end of the series, where one
  more run tells. A slow drift is one drift, not a ladder of steps.
- Below FEWEST points it cannot tell, and says so (`TooFew`): no change found would be a claim. NaN and infinite values are refused.
- The noise may have heavy tails, be different in parts of the series, or be correlated from run to run: the price of a change grows.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from seatrial.regress.history.numbers.partition import BOUND, cuts
from seatrial.regress.history.numbers.pieces import WILD, Part, Sums, join, settle, trimmed
from seatrial.regress.history.numbers.spread import GAP, scales, squeezed

FEWEST = 8
SEGMENT = 4
LEAN = 4.0
"""What a line must save beyond the price of a cut (in squared deviations): a step is the commoner cause."""
SMALL, SKEWED = 2.0, 0.15
"""Thresholds grow by 1 + SMALL / n, since the deviation is estimated too; prices by 1 + SKEWED |skewness|. By simulation."""
_NORMAL = statistics.NormalDist()


class TooFew(ValueError):
    """The series is too short to tell."""


@dataclass(frozen=True, slots=True)
class Change:
    """One change of a series."""

    index: int
    """The first point after a step, the outlier itself, or where a drift begins."""
    kind: Literal["step", "drift", "outlier"]
    before: float
    """The level before a step, at the start of a drift, or around an outlier."""
    after: float
    """The level after a step, at the end of a drift, or the outlier's value."""
    sigmas: float
    """The difference in deviations of single values, with its sign."""
    confidence: float
    """1 - the probability that noise alone shows such a change anywhere in a series of this length."""
    end: int
    """The first point that is no longer part of it: of a drift its end, otherwise the next point."""


def detect(values: Sequence[float], *, alarm: float = 0.01) -> list[Change]:
    """All changes, in order."""
    if not 0 < alarm < 1:
        raise ValueError(f"the alarm rate must lie between 0 and 1, not {alarm}")
    for index, value in enumerate(values):
        if not math.isfinite(value):
            raise ValueError(f"value {index} is {value}: only finite values have steps")
    if len(values) < FEWEST:
        raise TooFew(f"{len(values)} values cannot tell a change from noise: at least {FEWEST} are needed")
    if min(values) == max(values):
        return []
    cost = threshold(len(values), alarm) ** 2
    deviations = scales(values)
    near = squeezed(values, GAP * max(deviations))
    for _ in range(2):
        deviations = _widened(near, deviations, _bounds(near, deviations, cost))
    bounds = _bounds(near, deviations, cost)
    price = cost * _dearer(_residuals(near, deviations, bounds))
    sums = Sums(*trimmed(near, deviations, bounds))
    parts, steps = settle(sums, join(sums, bounds, price, LEAN), SEGMENT, price)
    parts = [replace(part, level=part.level + _shift(values, near, part)) for part in parts]
    found = _steps(parts, steps, deviations) + _drifts(parts, deviations) + _outliers(values, parts, deviations, alarm)
    return sorted(found, key=lambda change: (change.index, change.kind))


def _shift(values: Sequence[float], near: Sequence[float], part: Part) -> float:
    """From squeezed values back to the real ones."""
    return statistics.median_low(
        value - squeezed for value, squeezed in zip(values[part.start : part.end], near[part.start : part.end], strict=True)
    )


def threshold(count: int, alarm: float) -> float:
    """Deviations that the largest contrast of two neighbouring stretches of noise exceeds with probability `alarm`.

    P(max > c) is about 2 c φ(c) log(n) for n normal values; the deviation is estimated from n values, which costs the rest (measured).
    """
    low, high = 1.0, 40.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _exceeded(middle, count) > alarm else (low, middle)
    return high * (1 + SMALL / count)


def _exceeded(height: float, count: int) -> float:
    """The probability that the largest contrast of noise exceeds so many deviations."""
    return min(1.0, 2 * height * _NORMAL.pdf(height) * math.log(count))


def _confidence(contrast: float, count: int) -> float:
    """1 - the probability of such a contrast in noise."""
    height = contrast / (1 + SMALL / count)
    return 1 - _exceeded(height, count) if height > 1 else 0.0


def _bounds(values: Sequence[float], deviations: Sequence[float], price: float) -> list[int]:
    """Cuts with both ends; segments of fewer than SEGMENT points go to the neighbour that is nearer."""
    bounds = [0, *cuts(values, deviations, price), len(values)]
    while len(bounds) > 2:
        lengths = [high - low for low, high in itertools.pairwise(bounds)]
        short = min(range(len(lengths)), key=lengths.__getitem__)
        if lengths[short] >= SEGMENT:
            break
        levels = [statistics.median(values[low:high]) for low, high in itertools.pairwise(bounds)]
        left = abs(levels[short] - levels[short - 1]) if short else math.inf
        right = abs(levels[short] - levels[short + 1]) if short + 1 < len(levels) else math.inf
        del bounds[short if left <= right else short + 1]
    return bounds


def _residuals(values: Sequence[float], deviations: Sequence[float], bounds: Sequence[int]) -> list[float]:
    """Distances from the segments' medians, in deviations, at most BOUND; 0 for wild points."""
    found = []
    for low, high in itertools.pairwise(bounds):
        middle = statistics.median(values[low:high])
        for value, scale in zip(values[low:high], deviations[low:high], strict=True):
            away = (value - middle) / scale
            found.append(min(max(away, -BOUND), BOUND) if abs(away) <= WILD else 0.0)
    return found


def _widened(values: Sequence[float], deviations: Sequence[float], bounds: Sequence[int]) -> list[float]:
    """Deviations as the residuals have them: with heavy tails the middle half says too little."""
    residuals = _residuals(values, deviations, bounds)
    freedom = max(sum(residual != 0 for residual in residuals) - len(bounds) + 1, 1)
    factor = math.sqrt(sum(residual * residual for residual in residuals) / freedom)
    return [scale * factor for scale in deviations] if factor > 0 else list(deviations)


def _dearer(residuals: Sequence[float]) -> float:
    """By how much the price of a change grows because the noise is not normal and independent.

    Where neighbours are alike (r, more than chance), means scatter (1 + r) / (1 - r) times as much. Skewed noise has its extremes on
    one side, where they do not cancel; the factor for it was found by simulation.
    """
    squares = sum(residual * residual for residual in residuals)
    if squares == 0:
        return 1.0
    skewness = sum(residual**3 for residual in residuals) * math.sqrt(len(residuals)) / squares**1.5
    alike = min(sum(before * after for before, after in itertools.pairwise(residuals)) / squares, 0.9)
    memory = (1 + alike) / (1 - alike) if alike > 2 / math.sqrt(len(residuals)) else 1.0
    return float(memory * (1 + SKEWED * abs(skewness)))


def _steps(parts: Sequence[Part], steps: Collection[int], deviations: Sequence[float]) -> list[Change]:
    """Between two parts that do not meet."""
    found = []
    for left, right in itertools.pairwise(parts):
        if right.start in steps:
            before, after = left.last, right.level
            sigmas = (after - before) / math.sqrt((deviations[right.start - 1] ** 2 + deviations[right.start] ** 2) / 2)
            # A line knows its end less well than a level does: four times the variance.
            shares = [(4 if part.slope else 1) / (part.end - part.start) for part in (left, right)]
            contrast = abs(sigmas) / math.sqrt(sum(shares))
            found.append(Change(right.start, "step", before, after, sigmas, _confidence(contrast, len(deviations)), right.start + 1))
    return found


def _drifts(parts: Sequence[Part], deviations: Sequence[float]) -> list[Change]:
    """Parts on a line."""
    found = []
    for part in parts:
        if part.slope:
            scale = math.sqrt(statistics.fmean(deviation**2 for deviation in deviations[part.start : part.end]))
            sigmas = (part.last - part.level) / scale
            contrast = abs(sigmas) * math.sqrt((part.end - part.start) / 12)
            found.append(Change(part.start, "drift", part.level, part.last, sigmas, _confidence(contrast, len(deviations)), part.end))
    return found


def _outliers(values: Sequence[float], parts: Sequence[Part], deviations: Sequence[float], alarm: float) -> list[Change]:
    """Single points too far from the fit for normal noise."""
    limit = _NORMAL.inv_cdf(1 - alarm / (2 * len(values))) * (1 + SMALL / len(values))
    found = []
    for part in parts:
        for index in range(part.start, part.end):
            fitted = part.at(index)
            sigmas = (values[index] - fitted) / deviations[index]
            if abs(sigmas) > limit:
                chance = min(1.0, 2 * len(values) * _NORMAL.cdf(-abs(sigmas)))
                found.append(Change(index, "outlier", fitted, values[index], sigmas, 1 - chance, index + 1))
    return found
