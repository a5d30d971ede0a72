"""Where a series changed: steps, drifts and outliers. Pure functions on numbers.

- `scales` estimates the scatter from differences of neighbours; `cuts` partitions the series at the least cost; `settle` fits each part.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Literal

BOUND = 3.0
"""Deviations at which the loss of a point stops growing."""

Piece = tuple[float, float, float, float, float, int]
"""From, to, then a, b, c of a x² + b x + c, and where the segment began."""


def cuts(values: Sequence[float], scales: Sequence[float], price: float) -> list[int]:
    """First indices of the segments but the first, in order."""
    lowest, highest = min(values), max(values)
    pieces: list[Piece] = [(lowest, highest, 0.0, 0.0, 0.0, 0)]
    began: list[int] = []
    best = 0.0
    for index, (value, scale) in enumerate(zip(values, scales, strict=True)):
        if index:
            pieces = _capped(pieces, best + price, index)
        pieces = _added(pieces, value, scale)
        best, start = _least(pieces)
        began.append(start)
    found, end = [], len(values)
    while end and began[end - 1]:
        end = began[end - 1]
        found.append(end)
    return found[::-1]


def _least(pieces: list[Piece]) -> tuple[float, int]:
    """The least value of the function, and where the last segment began there."""
    best, start = math.inf, 0
    for low, high, a, b, c, began in pieces:
        if a > 0:
            at = -b / (2 * a)
            at = low if at < low else high if at > high else at
            found = (a * at + b) * at + c
        else:
            found = c
        if found < best:
            best, start = found, began
    return best, start


def _capped(pieces: list[Piece], cap: float, index: int) -> list[Piece]:
    """The lower of the function and a new segment's cost, which does not depend on its level."""
    found: list[Piece] = []

    def new(low: float, high: float) -> None:
        if found and found[-1][5] == index:
            low = found.pop()[0]
        found.append((low, high, 0.0, 0.0, cap, index))

    for piece in pieces:
        low, high, a, b, c, _ = piece
        if a <= 0:
            if c > cap:
                new(low, high)
            else:
                found.append(piece)
            continue
        inside = b * b - 4 * a * (c - cap)
        if inside <= 0:
            new(low, high)
            continue
        root = math.sqrt(inside)
        left, right = (-b - root) / (2 * a), (-b + root) / (2 * a)
        if left <= low and right >= high:
            found.append(piece)
            continue
        if right <= low or left >= high:
            new(low, high)
            continue
        if left > low:
            new(low, left)
        found.append((max(left, low), min(right, high), *piece[2:]))
        if right < high:
            new(right, high)
    return found


def _added(pieces: list[Piece], value: float, scale: float) -> list[Piece]:
    """The function plus the loss of one more point."""
    weight = 1 / (scale * scale)
    near, far = value - BOUND * scale, value + BOUND * scale
    a, b, c, most = weight, -2 * weight * value, weight * value * value, BOUND * BOUND
    found: list[Piece] = []
    for piece in pieces:
        low, high, pa, pb, pc, began = piece
        if high <= near or low >= far:
            found.append((low, high, pa, pb, pc + most, began))
            continue
        if low < near:
            found.append((low, near, pa, pb, pc + most, began))
            low = near
        if high > far:
            found.append((low, far, pa + a, pb + b, pc + c, began))
            found.append((far, high, pa, pb, pc + most, began))
        else:
            found.append((low, high, pa + a, pb + b, pc + c, began))
    return found


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
        return self.level + self.slope * (index - self.start)

    @property
    def last(self) -> float:
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
        w, _, _, y, _, yy = self.over(start, end)
        return Part(start, end, y / w, 0.0, max(yy - y * y / w, 0.0)) if w > 0 else Part(start, end, 0.0, 0.0, 0.0)

    def line(self, start: int, end: int) -> Part:
        w, x, xx, y, xy, yy = self.over(start, end, start)
        spread, shared = (xx - x * x / w, xy - x * y / w) if w > 0 else (0.0, 0.0)
        if spread <= 0:
            return self.level(start, end)
        slope = shared / spread
        return Part(start, end, y / w - slope * x / w, slope, max(yy - y * y / w - slope * shared, 0.0))

    def like(self, part: Part, start: int, end: int) -> Part:
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
    """Boundaries beside a line, moved to where they fit best; and those at which the two sides do not meet, which are steps. Cuts were made
    for levels, so where a drift begins they are off. A step is there only if letting the sides part saves its price."""
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


FLOOR = 1e-9
"""Least deviation, relative to the largest value: below it floats themselves scatter."""
BLOCK = 24
"""Points per part whose scatter is looked at by itself."""
CHANCE = 1.9
"""Variance of the logarithm of a part's deviation, times its points, when all scatter alike (normal noise, by simulation)."""
FEW = 3
"""So many differences that are not 0 are a step and an outlier, no spread."""
GAP = 100.0
"""Deviations beyond which it does not matter how far two values lie apart."""
_QUANTILES = ((0.5, 0.6745), (0.75, 1.1503), (0.9, 1.6449))


def deviation(differences: Sequence[float]) -> float:
    """The deviation of the values from their differences: by the median; where most are 0, by a higher quantile; 0 if nearly all are."""
    ordered = sorted(abs(step) for step in differences)
    if sum(step > 0 for step in ordered) <= FEW:
        return 0.0
    for quantile, normal in _QUANTILES:
        found = ordered[min(int(quantile * len(ordered)), len(ordered) - 1)]
        if found > 0:
            return found / normal / math.sqrt(2)
    return 0.0


def scales(values: Sequence[float]) -> list[float]:
    differences = [after - before for before, after in itertools.pairwise(values)]
    floor = max(FLOOR * max(abs(value) for value in values), 1e-300)
    common = max(deviation(differences), floor)
    parts = len(differences) // BLOCK
    if parts < 3:
        return [common] * len(values)
    bounds = [len(differences) * part // parts for part in range(parts + 1)]
    own = [math.log(max(deviation(differences[low:high]), floor)) for low, high in itertools.pairwise(bounds)]
    seen = statistics.variance(own)
    chance = CHANCE * parts / len(differences)
    share = max(0.0, 1 - 2 * chance / seen) if seen > 0 else 0.0
    if share == 0.0:
        return [common] * len(values)
    centres = [(low + high) / 2 for low, high in itertools.pairwise(bounds)]
    middle = math.log(common)
    return [math.exp((1 - share) * middle + share * found) for found in _between(centres, own, len(values))]


def _between(centres: Sequence[float], own: Sequence[float], count: int) -> list[float]:
    """Linear between the centres of the parts, flat beyond the outer ones."""
    found, part = [], 0
    for index in range(count):
        while part < len(centres) - 2 and index > centres[part + 1]:
            part += 1
        share = min(max((index - centres[part]) / (centres[part + 1] - centres[part]), 0.0), 1.0)
        found.append(own[part] + share * (own[part + 1] - own[part]))
    return found


def squeezed(values: Sequence[float], gap: float) -> list[float]:
    """Order and small distances as they are, 0 in the middle, neighbours in size at most `gap` apart. A value that is a billion deviations
    off would leave no digits for the others in sums of squares."""
    ordered = sorted(set(values))
    places, at = {ordered[0]: 0.0}, 0.0
    for before, after in itertools.pairwise(ordered):
        at += min(after - before, gap)
        places[after] = at
    middle = places[statistics.median_low(values)]
    return [places[value] - middle for value in values]


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


def find_changes(values: Sequence[float], *, alarm: float = 0.01) -> list[Change]:
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
    """Deviations that the largest contrast of two neighbouring stretches of noise exceeds with probability `alarm`. P(max > c) is about 2 c
    φ(c) log(n) for n normal values; the deviation is estimated from n values, which costs the rest (measured)."""
    low, high = 1.0, 40.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _exceeded(middle, count) > alarm else (low, middle)
    return high * (1 + SMALL / count)


def _exceeded(height: float, count: int) -> float:
    """The probability that the largest contrast of noise exceeds so many deviations."""
    return min(1.0, 2 * height * _NORMAL.pdf(height) * math.log(count))


def _confidence(contrast: float, count: int) -> float:
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
    """By how much the price of a change grows because the noise is not normal and independent. Where neighbours are alike (r, more than
    chance), means scatter (1 + r) / (1 - r) times as much. Skewed noise has its extremes on one side, where they do not cancel; the factor
    for it was found by simulation."""
    squares = sum(residual * residual for residual in residuals)
    if squares == 0:
        return 1.0
    skewness = sum(residual**3 for residual in residuals) * math.sqrt(len(residuals)) / squares**1.5
    alike = min(sum(before * after for before, after in itertools.pairwise(residuals)) / squares, 0.9)
    memory = (1 + alike) / (1 - alike) if alike > 2 / math.sqrt(len(residuals)) else 1.0
    return float(memory * (1 + SKEWED * abs(skewness)))


def _steps(parts: Sequence[Part], steps: Collection[int], deviations: Sequence[float]) -> list[Change]:
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
