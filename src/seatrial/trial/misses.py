"""One missed check beside the same one on the unchanged side: is it the same miss, or a worse one?

- Worse is: no finite number where the baseline measured one, steps without a point that the baseline has, or a distance
  to the threshold that is more than `ROOM` times the baseline's. The band scales from the baseline, never from the change.
- A number without a threshold that can be read is only shown: a person must compare.
"""

from __future__ import annotations

import math
import re

from seatrial.model.record import CheckResult
from seatrial.report.text import ranges

ROOM = 1.5
"""How much larger than the baseline's a miss may be and still be called the same: two runs are seldom equal to the bit."""
_BOUND = re.compile(r"(<=|<|>=|>|==) *(-?\d[\d.]*(?:e[+-]?\d+)?)")


def worse(old: CheckResult, now: CheckResult) -> str:
    """In what the miss is worse than that of the baseline; empty when it is not, or when that cannot be told."""
    lost = sorted(set(now.missing) - set(old.missing))
    if lost:
        return f"{now.name}: no finite point at step {ranges(lost)}, where the baseline has one"
    before, after = _finite(old.value), _finite(now.value)
    if before is None:
        return ""
    both = both_values(old, now)
    if after is None:
        return both
    misses = _distance(before, old.threshold), _distance(after, now.threshold)
    return both if misses[0] is not None and misses[1] is not None and misses[1] > ROOM * misses[0] else ""


def measured_alike(old: CheckResult, now: CheckResult) -> bool:
    """Whether two misses of which none is worse measured the same, or numbers whose distance to the threshold is known."""
    before, after = _finite(old.value), _finite(now.value)
    if before is None or after is None:
        return old.value == now.value
    return before == after or (_distance(before, old.threshold) is not None and _distance(after, now.threshold) is not None)


def both_values(old: CheckResult, now: CheckResult) -> str:
    """What a check measured on both sides."""
    return f"{now.name}: measured {now.value!r}, on the baseline {old.value!r}"


def _finite(value: float | str | None) -> float | None:
    """The number that a check measured; None for what is not finite, or no number."""
    return value if isinstance(value, float) and math.isfinite(value) else None


def _distance(value: float, threshold: str) -> float | None:
    """How far the value is on the wrong side of its threshold; None when that cannot be read."""
    bound = _BOUND.fullmatch(threshold.strip())
    if bound is None:
        return None
    over = value - float(bound[2])
    return abs(over) if bound[1] == "==" else over if bound[1].startswith("<") else -over
