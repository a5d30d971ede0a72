"""The band in which a value must lie: two-sided, and made from the reference alone.

- Middle: the median. Half-width: the largest of a number of robust deviations, `relative` of the middle, and `absolute`. The value
  under test has no say, so it cannot widen its own band; one wild run in the reference hardly can, nor can one run of five in general.
- The number of deviations is `sigmas`, or more where the reference is small: as many as Student's t asks for, given how uncertain
  middle and spread of so few runs are, so that at most `rate` of good values lie outside. That holds for normal values (N from 5 on,
  by simulation); values with heavy tails or skew lie outside more often, which so few runs cannot tell: bench/history_steps.py.
- A reference without spread has a band as wide as the floors. A reference with a NaN or infinite value is refused, not trimmed.
- The limits themselves are inside.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from seatrial.metrics.stats import t_two_sided
from seatrial.regress.history.numbers.thresholds import t_quantile

FEWEST = 5
SIGMAS, RELATIVE, ABSOLUTE, RATE = 4.0, 1e-6, 0.0, 0.01
"""Defaults."""
SMALL: dict[int, tuple[float, float]] = {
    **{5: (2.276, 2.94), 6: (1.927, 3.90), 7: (1.879, 4.94), 8: (1.737, 5.78), 9: (1.712, 7.05), 10: (1.951, 6.27)},
    **{11: (1.905, 7.18), 12: (1.814, 7.90), 13: (1.787, 9.10), 14: (1.729, 9.90), 15: (1.917, 9.50), 16: (1.851, 10.3)},
    **{17: (1.825, 11.3), 18: (1.778, 12.0), 19: (1.756, 13.0), 20: (1.873, 12.2)},
}
"""Per number of runs: what makes `spread` the deviation of normal values, and the freedom of t that it is worth (200,000 simulations)."""


@dataclass(frozen=True, slots=True)
class Band:
    """From `low` to `high`, both inside."""

    low: float
    high: float
    middle: float
    spread: float
    """Robust deviation of the reference."""
    count: int
    why: Literal["sigmas", "relative", "absolute"]
    """What made it so wide."""
    rate: float
    """At most this share of good values lies outside, if they are normal."""

    def side(self, value: float) -> Literal["inside", "above", "below"]:
        """Where a value lies; one that is not finite lies nowhere."""
        if not math.isfinite(value):
            raise ValueError(f"{value} lies in no band")
        return "above" if value > self.high else "below" if value < self.low else "inside"

    def distance(self, value: float) -> float:
        """Half-widths from the middle, with sign: beyond 1 is outside."""
        half = self.high - self.middle
        return (value - self.middle) / half if half > 0 else math.copysign(math.inf, value - self.middle) if value != self.middle else 0.0


def band(
    reference: Sequence[float],
    *,
    sigmas: float = SIGMAS,
    relative: float = RELATIVE,
    absolute: float = ABSOLUTE,
    rate: float = RATE,
) -> Band:
    """The band of a reference of at least FEWEST finite values."""
    for name, width in (("sigmas", sigmas), ("relative", relative), ("absolute", absolute)):
        if not (math.isfinite(width) and width >= 0):
            raise ValueError(f"{name} must be a number of at least 0, not {width}")
    if not 0 < rate < 1:
        raise ValueError(f"rate must lie between 0 and 1, not {rate}")
    wrong = [value for value in reference if not math.isfinite(value)]
    if wrong:
        raise ValueError(f"the reference holds {wrong[0]}: a band is made of finite values only")
    if len(reference) < FEWEST:
        raise ValueError(f"a band needs at least {FEWEST} runs, not {len(reference)}")
    middle, found = statistics.median(reference), spread(reference)
    deviations = max(sigmas, factor(len(reference), rate))
    widths: dict[Literal["sigmas", "relative", "absolute"], float] = {
        "sigmas": deviations * found,
        "relative": relative * abs(middle),
        "absolute": absolute,
    }
    why = max(widths, key=lambda name: widths[name])
    stated = outside(len(reference), deviations)
    return Band(middle - widths[why], middle + widths[why], middle, found, len(reference), why, stated)


def spread(values: Sequence[float]) -> float:
    """The deviation of normal values, from the mean distance to the median without the farthest fifth of the runs (at least one).

    Of few values it tells more than the median distance does, and stands as many wild runs as it leaves out. Where most values are
    equal: the mean distance of all.
    """
    middle = statistics.median(values)
    away = sorted(abs(value - middle) for value in values)
    kept = away[: len(away) - max(1, len(away) // 5)]
    return _worth(len(values))[0] * statistics.fmean(kept) or 1.2533 * statistics.fmean(away)


@functools.cache
def factor(count: int, rate: float) -> float:
    """How many spreads from the median of `count` normal runs one more run lies at most, but for the share `rate`."""
    return t_quantile(rate, _worth(count)[1]) * _median_too(count)


@functools.cache
def outside(count: int, deviations: float) -> float:
    """The share of good values beyond so many spreads of `count` normal runs."""
    return t_two_sided(deviations / _median_too(count), _worth(count)[1])


def _worth(count: int) -> tuple[float, float]:
    """As SMALL; beyond it both err a little towards wider bands."""
    return SMALL.get(count, (1.85, 0.6 * count))


def _median_too(count: int) -> float:
    """What the median's own error adds: its variance is pi/2 times that of the mean."""
    return math.sqrt(1 + math.pi / 2 / count)
