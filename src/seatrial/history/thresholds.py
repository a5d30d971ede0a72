"""Thresholds and tolerance bands from good runs, with the false alarm rate that so many runs can vouch for."""

from __future__ import annotations

import functools
import json
import math
import shlex
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Unpack

from seatrial.core.errors import UserError
from seatrial.core.text import counted
from seatrial.history.change_points import TooFew, find_changes
from seatrial.history.store import BaselineGroup, RunFilter, Store, Take, groups
from seatrial.metrics.stats import t_two_sided

FEWEST_FOR_THRESHOLDS = 3


@dataclass(frozen=True, slots=True)
class Proposal:
    """Bounds, both inside, or none."""

    count: int
    false_alarms: float
    lower: float | None
    upper: float | None
    rate: float
    """Vouched for: of the bounds, or, without them, the least that so many runs could vouch for."""
    needed: int
    """Runs that the asked rate takes."""
    if_normal: tuple[float, float]
    left_out: float | None
    """Share of runs that bounds made of the others miss; None without bounds for one run fewer."""

    def lines(self) -> list[str]:
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
    if len(values) < FEWEST_FOR_THRESHOLDS:
        raise ValueError(f"thresholds need at least {FEWEST_FOR_THRESHOLDS} runs, not {len(values)}")
    count, needed = len(values), math.ceil(2 / false_alarms - 1 - 1e-9)
    rank = _rank(count, false_alarms)
    ordered = sorted(values)
    lower, upper = (_outward(ordered[rank - 1], ordered, -1), _outward(ordered[-rank], ordered, 1)) if rank else (None, None)
    # The prediction interval of one more normal value.
    mean = statistics.fmean(values)
    half = t_quantile(false_alarms, count - 1) * statistics.stdev(values) * math.sqrt(1 + 1 / count)
    return Proposal(
        count=count,
        false_alarms=false_alarms,
        lower=lower,
        upper=upper,
        rate=2 * max(rank, 1) / (count + 1),
        needed=needed,
        if_normal=(mean - half, mean + half),
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


FORMS: dict[Take, str] = {
    "last": "mean(data[{}], range_start=-1)",
    "mean": "mean(data[{}], range_start=0)",
    "min": "min(data[{}])",
    "max": "max(data[{}])",
    "count": "len(data[{}])",
}
"""How the check language takes that value of a series; it has no word for the first point, whatever its step."""


@dataclass(frozen=True, slots=True)
class Calibrated:
    group: BaselineGroup
    proposal: Proposal | None
    notes: tuple[str, ...]
    checks: tuple[str, ...]

    def lines(self) -> list[str]:
        found = [*self.notes, *(self.proposal.lines() if self.proposal else ())]
        return [
            self.group.title,
            *(f"  {line}" for line in found),
            *self.group.told(),
            *(f"  --check {shlex.quote(check)}" for check in self.checks),
        ]


def calibrate(
    store: Store,
    metrics: Sequence[str],
    *,
    take: Take = "last",
    last: int | None = None,
    false_alarms: float = 0.01,
    every: bool = False,
    **of: Unpack[RunFilter],
) -> tuple[Calibrated, ...]:
    """Thresholds of all metrics that the patterns take; `every` takes runs that are not trusted, too (poisoned ones never)."""
    if not 0 < false_alarms < 1:
        raise UserError(f"--false-alarms {false_alarms}: must lie between 0 and 1", "--false-alarms 0.01")
    found = groups(store, metrics, take=take, trusted=not every, last=last, **of)
    return tuple(_calibrated(group, take, false_alarms) for group in found)


def _calibrated(group: BaselineGroup, take: Take, false_alarms: float) -> Calibrated:
    start, notes = _settled(group.values)
    if start is None:
        return Calibrated(group, None, tuple(notes), ())
    values = group.values[start:]
    if len(values) < FEWEST_FOR_THRESHOLDS:
        return Calibrated(
            group, None, (*notes, f"no thresholds: {counted(len(values), 'run')}, at least {FEWEST_FOR_THRESHOLDS} are needed"), ()
        )
    proposal = propose(values, false_alarms=false_alarms)
    form = FORMS.get(take)
    if form is None:
        notes.append(f"the check language has no expression for the {take} point")
    return Calibrated(group, proposal, tuple(notes), tuple(proposal.checks(form.format(json.dumps(group.metric)))) if form else ())


def _settled(values: Sequence[float]) -> tuple[int | None, list[str]]:
    """From which run on the values are a sample of one thing; None where they never are."""
    try:
        changes = [change for change in find_changes(values) if change.kind != "outlier"]
    except TooFew as error:
        return 0, [f"whether they changed is unknown: {error}"]
    if not changes:
        return 0, []
    if any(change.kind == "drift" and change.end == len(values) for change in changes):
        return None, ["no thresholds: the values drift, up to the last run; see `seatrial history trend`"]
    start = max(change.index if change.kind == "step" else change.end for change in changes)
    return start, [f"the values changed; only the {len(values) - start} runs since then are used"]


FEWEST_FOR_BAND = 5
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
    rate: float
    """At most this share of good values lies outside, if they are normal."""

    def side(self, value: float) -> Literal["inside", "above", "below"]:
        """Where a value lies; one that is not finite lies nowhere."""
        if not math.isfinite(value):
            raise ValueError(f"{value} lies in no band")
        return "above" if value > self.high else "below" if value < self.low else "inside"


def band(
    reference: Sequence[float], *, sigmas: float = SIGMAS, relative: float = RELATIVE, absolute: float = ABSOLUTE, rate: float = RATE
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
    if len(reference) < FEWEST_FOR_BAND:
        raise ValueError(f"a band needs at least {FEWEST_FOR_BAND} runs, not {len(reference)}")
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
    """The deviation of normal values, from the mean distance to the median without the farthest fifth of the runs (at least one). Of few
    values it tells more than the median distance does, and stands as many wild runs as it leaves out. Where most values are equal: the mean
    distance of all."""
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
