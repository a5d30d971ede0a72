"""What lies between the cuts of a series: levels or slopes, whichever explains it for less.

- A drift cut into levels is a ladder of steps. Here neighbouring segments may be joined to one level or to one line; a line costs what
  a cut costs, so a ladder of several steps is dearer than the line through it, and a clear step is cheaper than the line across it.
- Values are pulled in to BOUND deviations around their segment's level first, and wild ones left out, so that none moves a line.
- Exact over the given cuts, by dynamic programming with running sums: the time is quadratic in the number of segments, at most REACH.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from seatrial.regress.history.numbers.partition import BOUND

REACH = 60
"""Segments that one piece joins at most."""
KNEES = 8
"""Places at which a level may become a line, per stretch; `settle` finds the exact one."""
BEND = 2.5
"""A level that becomes a line must save so many times what a line must: two steps in the same direction look much like it."""
WILD = 5.0
"""Points farther from their segment's median than so many deviations say nothing of levels and lines."""


@dataclass(frozen=True, slots=True)
class Part:
    """Points [start, end) on one level, or on one line when the slope is not 0."""

    start: int
    end: int
    level: float
    """Fitted at `start`."""
    slope: float
    cost: float

    def at(self, index: int) -> float:
        """Fitted there."""
        return self.level + self.slope * (index - self.start)

    @property
    def last(self) -> float:
        """Fitted at the last point."""
        return self.at(self.end - 1)


class Sums:
    """Weighted running sums, for the squares around a level or a line of any stretch. Values should have 0 in their middle."""

    def __init__(self, values: Sequence[float], weights: Sequence[float]) -> None:
        terms = [(w, w * x, w * x * x, w * y, w * x * y, w * y * y) for x, (w, y) in enumerate(zip(weights, values, strict=True))]
        self.totals = [list(itertools.accumulate(column, initial=0.0)) for column in zip(*terms, strict=True)]

    def over(self, start: int, end: int, origin: int = 0) -> tuple[float, float, float, float, float, float]:
        """Sums of w, x, x², y, xy, y² over [start, end), with x counted from `origin`."""
        w, x, xx, y, xy, yy = (total[end] - total[start] for total in self.totals)
        return w, x - origin * w, xx - 2 * origin * x + origin * origin * w, y, xy - origin * y, yy

    def level(self, start: int, end: int) -> Part:
        """The best level."""
        w, _, _, y, _, yy = self.over(start, end)
        return Part(start, end, y / w, 0.0, max(yy - y * y / w, 0.0)) if w > 0 else Part(start, end, 0.0, 0.0, 0.0)

    def line(self, start: int, end: int) -> Part:
        """The best line."""
        w, x, xx, y, xy, yy = self.over(start, end, start)
        spread, shared = (xx - x * x / w, xy - x * y / w) if w > 0 else (0.0, 0.0)
        if spread <= 0:
            return self.level(start, end)
        slope = shared / spread
        return Part(start, end, y / w - slope * x / w, slope, max(yy - y * y / w - slope * shared, 0.0))

    def like(self, part: Part, start: int, end: int) -> Part:
        """The best part of the same sort over another stretch."""
        return self.line(start, end) if part.slope else self.level(start, end)

    def bent(self, left: Part, right: Part, knee: int) -> tuple[Part, Part]:
        """The best two parts of these sorts that meet at `knee`."""
        sides = [self.over(left.start, knee, knee), self.over(knee, right.end, knee)]
        weight, total = sides[0][0] + sides[1][0], sides[0][3] + sides[1][3]
        for (_, x, xx, _, xy, _), part in zip(sides, (left, right), strict=True):
            if part.slope and xx > 0:
                weight -= x * x / xx
                total -= x * xy / xx
        height = total / weight if weight > 0 else 0.0
        slopes = [
            (xy - height * x) / xx if part.slope and xx > 0 else 0.0
            for (_, x, xx, _, xy, _), part in zip(sides, (left, right), strict=True)
        ]
        costs = [
            yy - 2 * height * y - 2 * slope * xy + height * height * w + 2 * height * slope * x + slope * slope * xx
            for (w, x, xx, y, xy, yy), slope in zip(sides, slopes, strict=True)
        ]
        before = Part(left.start, knee, height + slopes[0] * (left.start - knee), slopes[0], max(costs[0], 0.0))
        return before, Part(knee, right.end, height, slopes[1], max(costs[1], 0.0))


def settle(sums: Sums, parts: Sequence[Part], least: int, price: float) -> tuple[list[Part], set[int]]:
    """Boundaries beside a line, moved to where they fit best; and those at which the two sides do not meet, which are steps.

    Cuts were made for levels, so where a drift begins they are off. A step is there only if letting the sides part saves its price.
    """
    found, steps = list(parts), set()
    for place in range(len(found) - 1):
        left, right = found[place], found[place + 1]
        if not (left.slope or right.slope):
            steps.add(right.start)
            continue
        knees = range(left.start + least, right.end - least + 1)
        apart = min(((sums.like(left, left.start, at), sums.like(right, at, right.end)) for at in knees), key=_cost)
        meeting = min((sums.bent(left, right, at) for at in knees), key=_cost)
        if _cost(meeting) - _cost(apart) > price:
            steps.add(apart[1].start)
            found[place : place + 2] = apart
        else:
            found[place : place + 2] = meeting
    return found, steps


def _cost(pair: tuple[Part, Part]) -> float:
    return pair[0].cost + pair[1].cost


def trimmed(values: Sequence[float], scales: Sequence[float], bounds: Sequence[int]) -> tuple[list[float], list[float]]:
    """Values pulled in to BOUND deviations around the median of their segment, and their weights: 0 beyond WILD deviations."""
    found: list[float] = []
    weights: list[float] = []
    for low, high in itertools.pairwise(bounds):
        middle = statistics.median(values[low:high])
        for value, scale in zip(values[low:high], scales[low:high], strict=True):
            found.append(min(max(value, middle - BOUND * scale), middle + BOUND * scale))
            weights.append(1 / (scale * scale) if abs(value - middle) <= WILD * scale else 0.0)
    return found, weights


def join(sums: Sums, bounds: Sequence[int], price: float, lean: float) -> list[Part]:
    """The cheapest pieces over the segments; `lean` is what a line must save beyond the price of a cut."""
    levels = [sums.level(low, high).level for low, high in itertools.pairwise(bounds)]
    best: list[float] = [-price] + [math.inf] * (len(bounds) - 1)
    chosen: list[tuple[int, tuple[Part, ...]]] = [(0, ())] * len(bounds)
    for right in range(1, len(bounds)):
        up = down = True
        for left in range(right - 1, max(-1, right - REACH - 1), -1):
            if left < right - 1:
                up, down = up and levels[left] <= levels[left + 1], down and levels[left] >= levels[left + 1]
            start, end = bounds[left], bounds[right]
            offers: list[tuple[tuple[Part, ...], float]] = [((sums.level(start, end),), 0.0), ((sums.line(start, end),), price + lean)]
            if right - left > 2 and (up or down):
                offers += [(pair, price + BEND * lean) for pair in _bends(sums, start, end)]
            for parts, extra in offers:
                cost = best[left] + price + extra + sum(part.cost for part in parts)
                if cost < best[right]:
                    best[right], chosen[right] = cost, (left, parts)
    found: list[Part] = []
    right = len(bounds) - 1
    while right:
        right, parts = chosen[right]
        found[:0] = parts
    return found


def _bends(sums: Sums, start: int, end: int) -> list[tuple[Part, Part]]:
    """A level that becomes a line, and a line that becomes a level, with the best of KNEES places for it."""
    level, line = Part(start, end, 0.0, 0.0, 0.0), Part(start, end, 0.0, 1.0, 0.0)
    places = sorted({start + (end - start) * number // (KNEES + 1) for number in range(1, KNEES + 1)} - {start, end})
    return [min((sums.bent(before, after, at) for at in places), key=_cost) for before, after in ((level, line), (line, level))]
