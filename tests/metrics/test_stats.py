from __future__ import annotations

import math

import pytest

from seatrial.metrics.stats import incomplete_beta, t_pvalue, t_two_sided


@pytest.mark.parametrize("t", [0.0, 0.1, 1.0, 2.5, 12.7062047364, 1e4])
def test_closed_forms(t: float) -> None:
    assert t_two_sided(t, 1) == pytest.approx(1 - 2 / math.pi * math.atan(t), rel=1e-9, abs=1e-12)
    assert t_two_sided(t, 2) == pytest.approx(1 - t / math.sqrt(2 + t * t), rel=1e-6, abs=1e-12)
    assert t_two_sided(-t, 5) == t_two_sided(t, 5)


@pytest.mark.parametrize(
    ("t", "freedom", "p"),
    # Quantiles of the published tables.
    [
        (12.7062047, 1, 0.05),
        (4.3026527, 2, 0.05),
        (2.7764451, 4, 0.05),
        (4.6040949, 4, 0.01),
        (2.2281389, 10, 0.05),
        (1.9839715, 100, 0.05),
        (3.3905, 100, 0.001),
    ],
)
def test_table_values(t: float, freedom: int, p: float) -> None:
    assert t_two_sided(t, freedom) == pytest.approx(p, rel=1e-4)


def test_incomplete_beta() -> None:
    assert incomplete_beta(2, 3, 0.0) == 0.0
    assert incomplete_beta(2, 3, 1.0) == 1.0
    assert incomplete_beta(1, 1, 0.3) == pytest.approx(0.3)
    assert incomplete_beta(2, 3, 0.5) == pytest.approx(0.6875)
    assert incomplete_beta(3, 2, 0.5) == pytest.approx(1 - 0.6875)


def test_pvalue_of_a_sample() -> None:
    # mean 3, standard deviation 1.5811, t = 4.2426 with 4 degrees of freedom
    assert t_pvalue([1, 2, 3, 4, 5]) == pytest.approx(0.013236, rel=1e-4)
    assert t_pvalue([-1, 0, 1]) == 1.0


def test_pvalue_without_variance() -> None:
    assert t_pvalue([0.5, 0.5, 0.5]) == 0.0
    assert t_pvalue([0.0, 0.0, 0.0]) == 1.0


def test_pvalue_needs_three_points() -> None:
    with pytest.raises(ValueError, match="at least 3 points, not 2"):
        t_pvalue([1.0, 2.0])
