"""The one-sample Student t-test in plain Python: is the mean of a few seeds' differences zero?

The distribution is computed by the regularised incomplete beta function (continued fraction, Lentz's method),
accurate to about 1e-12, so that no scientific library is needed for it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

_TINY = 1e-300
_MAX_TERMS = 10_000


def t_pvalue(values: Sequence[float]) -> float:
    """Two-sided p-value of the hypothesis that the values' mean is 0. Needs at least 3 values.

    Without any variance the answer is certain: 0 if the mean is not 0, otherwise 1.
    """
    if len(values) < 3:
        raise ValueError(f"a t-test needs at least 3 points, not {len(values)}")
    mean, deviation = statistics.mean(values), statistics.stdev(values)
    if deviation == 0:
        return 0.0 if mean else 1.0
    return t_two_sided(mean / deviation * math.sqrt(len(values)), len(values) - 1)


def t_two_sided(t: float, freedom: float) -> float:
    """The probability that |T| is at least |t|, for Student's distribution with `freedom` degrees of freedom."""
    return incomplete_beta(freedom / 2, 0.5, freedom / (freedom + t * t))


def incomplete_beta(a: float, b: float, x: float) -> float:
    """The regularised incomplete beta function I_x(a, b) for 0 <= x <= 1."""
    if x <= 0 or x >= 1:
        return 0.0 if x <= 0 else 1.0
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x))
    # The fraction converges fast on this side of the mean only; beyond it, use the symmetry.
    if x < (a + 1) / (a + b + 2):
        return front * _fraction(a, b, x) / a
    return 1 - front * _fraction(b, a, 1 - x) / b


def _fraction(a: float, b: float, x: float) -> float:
    """The continued fraction of the incomplete beta function."""

    def away_from_zero(value: float) -> float:
        return value if abs(value) > _TINY else _TINY

    c, d = 1.0, 1 / away_from_zero(1 - (a + b) * x / (a + 1))
    result = d
    for m in range(1, _MAX_TERMS):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        change = 1.0
        for term in (even, odd):
            d = 1 / away_from_zero(1 + term * d)
            c = away_from_zero(1 + term / c)
            change = c * d
            result *= change
        if abs(change - 1) < 1e-15:
            return result
    raise ArithmeticError(f"the incomplete beta function does not converge for a={a}, b={b}, x={x}")
