"""Thresholds for a check from N good runs, with the rate of false alarms that N runs can vouch for.

- By order statistics: of N runs and one more of the same kind, the one more is the largest with probability 1 / (N + 1), whatever the
  distribution. So bounds at the k-th smallest and k-th largest value miss at most 2 k / (N + 1) of good runs, skewed or not.
- A rate below 2 / (N + 1) cannot be vouched for: then there are no bounds, and the number of runs that are needed is said.
- What Student's t gives for normal values is shown beside, as that: N runs too few for the above cannot show that values are normal.
- The leave-one-out check: how many of the N runs the bounds made of the others would have missed.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from seatrial.metrics.stats import t_two_sided

FEWEST = 3


@dataclass(frozen=True, slots=True)
class Proposal:
    """Bounds, both inside, or none."""

    count: int
    false_alarms: float
    """As asked for."""
    lower: float | None
    upper: float | None
    rate: float
    """Vouched for: of the bounds, or, without them, the least that so many runs could vouch for."""
    needed: int
    """Runs that the asked rate takes."""
    if_normal: tuple[float, float]
    left_out: float | None
    """Share of runs that bounds made of the others miss; None without bounds for one run fewer."""

    @property
    def supported(self) -> bool:
        """Whether there are bounds."""
        return self.lower is not None

    def lines(self) -> list[str]:
        """For a person."""
        low, high = self.if_normal
        normal = f"if values were normal: [{low:.6g}, {high:.6g}]"
        if self.lower is None or self.upper is None:
            least = f"{self.count} runs vouch for a false-alarm rate of {self.rate:.3g} at best, not for {self.false_alarms:.3g}"
            return [f"no thresholds: {least}; {self.needed} runs are needed", f"{normal} (an assumption that so few runs cannot show)"]
        found = [
            f"[{self.lower:.6g}, {self.upper:.6g}] from {self.count} runs: at most {self.rate:.3g} false alarms, whatever the distribution"
        ]
        if self.left_out is not None:
            found.append(f"leaving one out: {self.left_out:.3g} of the runs missed")
        return [*found, normal]

    def checks(self, value: str) -> list[str]:
        """Check expressions on a value, itself an expression as `max(data["x"])`; none without bounds."""
        if self.lower is None or self.upper is None:
            return []
        return [f"{value} >= {self.lower!r}", f"{value} <= {self.upper!r}"]


def propose(values: Sequence[float], *, false_alarms: float = 0.01) -> Proposal:
    """Bounds that miss at most `false_alarms` of good runs, if so many runs can vouch for that."""
    if not 0 < false_alarms < 1:
        raise ValueError(f"the false-alarm rate must lie between 0 and 1, not {false_alarms}")
    wrong = [value for value in values if not math.isfinite(value)]
    if wrong:
        raise ValueError(f"a run has {wrong[0]}: thresholds are made of finite values only")
    if len(values) < FEWEST:
        raise ValueError(f"thresholds need at least {FEWEST} runs, not {len(values)}")
    count, needed = len(values), math.ceil(2 / false_alarms - 1 - 1e-9)
    rank = _rank(count, false_alarms)
    ordered = sorted(values)
    lower, upper = (_outward(ordered[rank - 1], ordered, -1), _outward(ordered[-rank], ordered, 1)) if rank else (None, None)
    return Proposal(
        count=count,
        false_alarms=false_alarms,
        lower=lower,
        upper=upper,
        rate=2 * max(rank, 1) / (count + 1),
        needed=needed,
        if_normal=_if_normal(values, false_alarms),
        left_out=_left_out(ordered, false_alarms),
    )


def _rank(count: int, false_alarms: float) -> int:
    """The k of the bounds; 0 where even the extremes miss too often."""
    return math.floor(false_alarms * (count + 1) / 2 + 1e-9)


def _outward(bound: float, ordered: Sequence[float], sign: int) -> float:
    """Rounded outward to a thousandth of the range, which can only lower the rate."""
    span = ordered[-1] - ordered[0]
    if span == 0:
        return bound
    digits = 3 - math.floor(math.log10(span))
    rounded = round(bound, digits)
    if (rounded - bound) * sign >= 0:
        return rounded
    moved = round(rounded + sign * 10.0**-digits, digits)
    return moved if (moved - bound) * sign >= 0 else bound


def _left_out(ordered: Sequence[float], false_alarms: float) -> float | None:
    """Each run against the bounds of the others."""
    rank, count = _rank(len(ordered) - 1, false_alarms), len(ordered)
    if not rank:
        return None
    missed = 0
    for place, value in enumerate(ordered):
        low = ordered[rank - 1 if place >= rank else rank]
        high = ordered[count - rank if place < count - rank else count - rank - 1]
        missed += value < low or value > high
    return missed / count


def _if_normal(values: Sequence[float], false_alarms: float) -> tuple[float, float]:
    """The prediction interval of one more normal value."""
    count, mean = len(values), statistics.fmean(values)
    half = t_quantile(false_alarms, count - 1) * statistics.stdev(values) * math.sqrt(1 + 1 / count)
    return mean - half, mean + half


@functools.cache
def t_quantile(outside: float, freedom: float) -> float:
    """The t that |T| exceeds with probability `outside`, by bisection."""
    low, high = 0.0, 1.0
    while t_two_sided(high, freedom) > outside:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if t_two_sided(middle, freedom) > outside else (low, middle)
    return high
