"""How much the runs of a point say when runs are noisy: three models, all in closed form.

- A *side* is a set of points: under the hypothesis "c is the first bad commit", c and what builds on it are the bad side, the rest is
  the good side. A model gives the log-likelihood of all runs for one division into sides, up to a constant.
- `Marks`: exit codes. Each side fails at one unknown rate; low rates are expected of the good side, high ones of the bad side.
- `Step`: values. Each side has one unknown mean; one unknown variance. The metric moved once.
- `Means`: values. Every point has a mean of its own, and what counts is on which side of the check's limit it lies. This is for drift
  and for more than one step, where `Step` would be wrong (`misfit` says so).
- Values of which some jump to the other side (`Scatter.flips`) have no normal scatter: `Marks` counts them, and learns how many jump.
- One run never convicts when runs are known to scatter: wild values are clipped, and what a run can say is bounded.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from seatrial.metrics.stats import t_two_sided

GOOD_RATE = (0.25, 0.75)
BAD_RATE = (0.75, 0.25)
"""Beta(failures, passes) that is expected of a side before any run: 25 % and 75 %, with the weight of one run. More weight would make
passes at a rarely failing bad commit look like proof that it is good."""
DISCOUNT = 0.8
"""Log-likelihoods of `Marks` and `Step` count by this factor (a power posterior). The search stops when it is sure, so it stops more
often where luck made it too sure; simulations at weak signals (see tests) are honest with this factor and are not without it."""
CLIP = 2.5
"""Values count as at most so many deviations beyond the ends."""
WILD = 50.0
"""The odds that one run of a scattering metric can give at most: one run in 50 may be wild."""
CERTAIN = 60.0
"""Log-odds of what does not scatter; far beyond every confidence, and still a number."""
STEADY = 0.02
"""Values that scatter less than this share of the ends' difference count as not scattering: one run says all."""
FLIPS = 0.5
"""Runs flip when those that agree scatter at most by this share of what all do; normal scatter comes to 0.6 and more."""
PRIOR_DEVIATION = 0.05
"""Expected deviation, in units of the ends' difference; it has the weight of one run."""


@dataclass(frozen=True)
class Threshold:
    """The limit of a check, and on which side of it a value passes."""

    limit: float
    good_below: bool
    inclusive: bool = False
    """Whether the limit itself passes."""

    def passes(self, value: float) -> bool:
        return self.inclusive if value == self.limit else (value < self.limit) is self.good_below


@dataclass(frozen=True)
class Tally:
    """What the good and bad runs of one point gave."""

    goods: int = 0
    bads: int = 0
    values: tuple[float, ...] = ()

    @property
    def runs(self) -> int:
        return self.goods + self.bads

    @property
    def disagree(self) -> bool:
        return bool(self.goods and self.bads)


def log_student(t: float, freedom: float) -> float:
    tail = t_two_sided(t, freedom) / 2
    return math.log1p(-tail) if t > 0 else math.log(max(tail, 1e-300))


def _log_beta(a: float, b: float) -> float:
    return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)


class MarksModel:
    """Exit codes: Beta-Bernoulli with unknown failure rates.

    With F failures and P passes on a side whose rate has the prior Beta(a, b), the rate integrates out:
    p(runs) = B(a + F, b + P) / B(a, b). The two sides are independent.
    """

    name = "exit codes, both sides with a failure rate of their own (Beta-Bernoulli)"

    def __init__(self, tallies: Mapping[int, Tally], good_end: int, bad_end: int) -> None:
        self.tallies = dict(tallies)
        # An end is an end because it was seen good (bad). That run was the condition to start, so it is no sample of the rate.
        for end, seen in ((good_end, Tally(goods=1)), (bad_end, Tally(bads=1))):
            tally = tallies.get(end, Tally())
            self.tallies[end] = Tally(max(tally.goods - seen.goods, 0), max(tally.bads - seen.bads, 0))
        self.ends = (self.tallies[good_end], self.tallies[bad_end])

    def log_likelihood(self, bad: int) -> float:
        """Sum over the sides of log B(a + F, b + P)."""
        counts = [[0, 0], [0, 0]]
        for point, tally in self.tallies.items():
            side = counts[bad >> point & 1]
            side[0] += tally.bads
            side[1] += tally.goods
        sides = zip((GOOD_RATE, BAD_RATE), counts, strict=True)
        return DISCOUNT * sum(_log_beta(a + failed, b + passed) for (a, b), (failed, passed) in sides)

    def odds(self, point: int) -> float:
        tally, found = self.tallies[point], []
        for (a, b), end in zip((GOOD_RATE, BAD_RATE), self.ends, strict=True):
            failed, passed = a + end.bads, b + end.goods
            found.append(_log_beta(failed + tally.bads, passed + tally.goods) - _log_beta(failed, passed))
        return found[1] - found[0]


@dataclass(frozen=True)
class Scatter:
    """The metric's values, prepared: large is bad, 0 is the check's limit, the unit is the difference of the ends.

    `deviation` is the spread of runs of one point around the point's mean, pooled over all points:
    s² = Σ (y - mean of its point)² / freedom, freedom = Σ (runs - 1).
    """

    values: dict[int, tuple[float, ...]]
    means: tuple[float, float]
    """Of the good and the bad end."""
    deviation: float
    freedom: int
    tallies: Mapping[int, Tally]
    flips: bool = False
    """Whether runs jump to the other side rather than scatter: those that agree lie much closer together than all do."""

    @property
    def steady(self) -> bool:
        """Whether repeated runs gave (nearly) the same values."""
        return self.freedom > 0 and self.deviation <= STEADY


def measure_scatter(tallies: Mapping[int, Tally], threshold: Threshold, good_end: int, bad_end: int) -> Scatter | None:
    """Scaled and clipped values; None while an end has none.

    The scale is the difference of the ends' medians. Clipping: beyond the ends by more than CLIP robust deviations (median absolute
    deviation of runs from their point's median, times 1.4826 sqrt(n / (n - 1))). A value beyond an end is that end's kind already, so
    this takes nothing from the evidence but the leverage of wild values.
    """
    sign = 1.0 if threshold.good_below else -1.0
    raw = {point: [sign * (value - threshold.limit) for value in tally.values] for point, tally in tallies.items() if tally.values}
    if good_end not in raw or bad_end not in raw:
        return None
    low, high = (statistics.median(raw[end]) for end in (good_end, bad_end))
    largest = max(abs(value) for values in raw.values() for value in values)
    unit = max(abs(high - low), 1e-12 * largest, 1e-300)
    room = CLIP * robust_deviation(list(raw.values()))
    bottom, top = min(low, high) - room, max(low, high) + room
    # Without repeated runs nothing is known of the spread, and nothing is clipped.
    repeated = any(len(values) > 1 for values in raw.values())
    values = {point: tuple((min(max(value, bottom), top) if repeated else value) / unit for value in found) for point, found in raw.items()}
    deviation, freedom = _pooled(values.values())
    # Neither scaled nor clipped: where most runs of an end jumped, its median is of no use.
    agreed, _ = _pooled([value for value in found if (value > 0) is bad] for found in raw.values() for bad in (False, True))
    flips = any(tally.disagree for tally in tallies.values()) and agreed <= FLIPS * _pooled(raw.values())[0]
    means = (statistics.fmean(values[good_end]), statistics.fmean(values[bad_end]))
    return Scatter(values, means, deviation, freedom, tallies, flips)


def _pooled(groups: Iterable[Sequence[float]]) -> tuple[float, int]:
    """The deviation from the groups' means, and its freedom."""
    full = [group for group in groups if group]
    freedom = sum(len(group) - 1 for group in full)
    squares = sum((value - mean) ** 2 for group in full for mean in [statistics.fmean(group)] for value in group)
    return (math.sqrt(squares / freedom) if freedom else 0.0), freedom


def robust_deviation(groups: Sequence[Sequence[float]]) -> float:
    """Spread around the groups' medians that a few wild values do not change; 0 without repeated runs."""
    residuals: list[float] = []
    for group in groups:
        if len(group) > 1:
            middle, stretch = statistics.median(group), math.sqrt(len(group) / (len(group) - 1))
            found = sorted(abs(value - middle) * stretch for value in group)
            residuals += found[len(group) % 2 :]  # of an odd group the median itself is no residual
    return 1.4826 * statistics.median(residuals) if residuals else 0.0


@dataclass
class StepModel:
    """Values: y ~ N(mean of its side, s²), means flat, p(s²) ~ 1 / s², kept from 0 by PRIOR_DEVIATION.

    Means and variance integrate out. With n_s runs on side s, n = n_good + n_bad, and SS the squares around the two sides' means:
    log p = - (log n_good + log n_bad) / 2 - (n - 2) / 2 · log(PRIOR_DEVIATION² + SS) + log K + constant.
    Both sides hold an end, so the flat priors weigh every hypothesis alike. K is the share of the means' posterior that lies where the
    check wants it, the good mean below the limit (0) and the bad one above: with s² = SS / (n - 2) and Student's cumulative distribution
    T of freedom n - 2, K = T(-mean_good sqrt(n_good) / s) · T(mean_bad sqrt(n_bad) / s). Without K, many runs of one kind in the middle
    look like either side as long as the ends have few.
    """

    scatter: Scatter
    name: str = "values, one mean on each side and one variance (step)"
    _sums: dict[int, tuple[int, float, float]] = field(init=False)
    _own: MeansModel = field(init=False)

    def __post_init__(self) -> None:
        self._own = MeansModel(self.scatter)
        self._sums = {point: (len(ys), math.fsum(ys), math.fsum(y * y for y in ys)) for point, ys in self.scatter.values.items()}

    def log_likelihood(self, bad: int) -> float:
        sides = self.sides(bad)
        if not (sides[0][0] and sides[1][0]):
            return -math.inf
        freedom = max(sides[0][0] + sides[1][0] - 2, 1)
        squares = PRIOR_DEVIATION**2 + sum(max(square - total * total / count, 0.0) for count, total, square in sides)
        deviation = math.sqrt(squares / freedom)
        found = -freedom / 2 * math.log(squares)
        for sign, (count, total, _) in zip((-1, 1), sides, strict=True):
            found += log_student(sign * total / math.sqrt(count) / deviation, freedom) - math.log(count) / 2
        return DISCOUNT * found

    def sides(self, bad: int) -> tuple[tuple[int, float, float], tuple[int, float, float]]:
        """Runs, sum and sum of squares of the good and the bad side."""
        found = [[0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]
        for point, sums in self._sums.items():
            side = found[bad >> point & 1]
            for place, term in enumerate(sums):
                side[place] += term
        (n0, t0, q0), (n1, t1, q1) = found
        return (int(n0), t0, q0), (int(n1), t1, q1)

    def odds(self, point: int) -> float:
        return self._own.odds(point)

    def misfit(self, bad: int, doubt: float) -> str | None:
        """Why one mean per side is wrong for this division: with an error of at most `doubt` over all points; None if it fits.

        A point contradicts when its mean is on the other side of the limit (odds of `Means`), or lies between the two means and
        differs from both: |mean - side's mean| > t · s · sqrt(1 / n + 1 / n_side), Student's t with the freedom of s.
        """
        level = doubt / max(len(self._sums), 1)
        means = [total / count for count, total, _ in self.sides(bad)]
        counts = [count for count, _, _ in self.sides(bad)]
        for point, (count, total, _) in sorted(self._sums.items()):
            odds = self._own.odds(point)
            if (odds if not bad >> point & 1 else -odds) > -math.log(level):
                return f"point {point} is on the other side of the check's limit than one step would have it"
            mean = total / count
            spread, freedom = max(self.scatter.deviation, STEADY / 10), self.scatter.freedom
            errors = [spread * math.sqrt(1 / count + 1 / size) for size in counts]
            chances = [
                t_two_sided((mean - middle) / error, freedom) if freedom else 1.0 for middle, error in zip(means, errors, strict=True)
            ]
            if min(means) < mean < max(means) and max(chances) < level:
                return f"point {point} lies between the two sides' means"
        return None


@dataclass
class MeansModel:
    """Values: every point has its own mean, flat before its runs; bad when it is beyond the check's limit.

    With n runs of mean m (limit 0): P(bad) = T(m sqrt(n) / s), Student's cumulative distribution with the freedom of s; the odds are
    P(bad) / P(good), at most WILD to the n. Values that do not scatter decide at once. Points are independent, so the log-likelihood
    of a division is the sum of the log-odds of its bad side, up to a constant.
    """

    scatter: Scatter
    name: str = "values, every point with its own mean against the check's limit (threshold)"
    _odds: dict[int, float] = field(init=False)

    def __post_init__(self) -> None:
        self._odds = {point: self._own(point) for point in self.scatter.values}

    def log_likelihood(self, bad: int) -> float:
        """Sum of the log-odds over the bad side."""
        return math.fsum(odds for point, odds in self._odds.items() if bad >> point & 1)

    def odds(self, point: int) -> float:
        return self._odds[point]

    def _own(self, point: int) -> float:
        values = self.scatter.values[point]
        count, mean = len(values), statistics.fmean(values)
        if self.scatter.steady:
            # By the marks, since a value on the limit passes or not as the check has it.
            tally = self.scatter.tallies[point]
            agreed = CERTAIN if tally.bads else -CERTAIN
            return math.log((tally.bads + 0.5) / (tally.goods + 0.5)) if tally.disagree else agreed
        if not self.scatter.freedom:
            # The spread is unknown yet: a hint, no more. By the mark, for the same reason.
            return math.log(9.0) if self.scatter.tallies[point].bads else -math.log(9.0)
        t = mean * math.sqrt(count) / self.scatter.deviation
        tail = max(t_two_sided(t, self.scatter.freedom) / 2, 1e-300)  # of the less likely side
        return math.copysign(min(math.log1p(-tail) - math.log(tail), count * math.log(WILD)), t)


Model = MarksModel | StepModel | MeansModel
"""`log_likelihood(bad)`: of all runs, when the points in `bad` (bits) are the bad side, up to a constant. `odds(point)`: log of
P(runs of this point | it is bad) / P(… | it is good), by this point's runs and the ends alone."""
