"""Bands: from the reference alone, two-sided, with floors."""

from __future__ import annotations

import math
import random

import pytest

from seatrial.history.thresholds import band, factor, outside, spread

REFERENCE = [10.0, 10.2, 9.8, 10.1, 9.9, 10.3, 9.7]


def test_the_middle_is_the_median_and_both_sides_are_as_wide() -> None:
    made = band(REFERENCE, sigmas=3, relative=0, absolute=0)
    assert made.middle == 10.0
    assert made.high - made.middle == pytest.approx(made.middle - made.low)
    assert made.why == "sigmas"


def test_one_wild_run_hardly_widens_the_band() -> None:
    calm, wild = band(REFERENCE), band([*REFERENCE, 1e9])
    assert wild.high - wild.low < 2.5 * (calm.high - calm.low)


def test_the_limits_are_inside_and_the_next_floats_are_not() -> None:
    made = band(REFERENCE)
    assert made.side(made.low) == made.side(made.high) == "inside"
    assert made.side(math.nextafter(made.high, math.inf)) == "above"
    assert made.side(math.nextafter(made.low, -math.inf)) == "below"


def test_equal_runs_have_a_band_as_wide_as_the_floors() -> None:
    made = band([100.0] * 5)
    assert [made.low, made.high] == pytest.approx([99.9999, 100.0001], rel=1e-12)
    assert made.why == "relative"
    assert band([0.0] * 5).side(0.0) == "inside"
    assert band([0.0] * 5).side(1e-9) == "above"
    assert band([0.0] * 5, absolute=1e-6).side(1e-9) == "inside"


def test_mostly_equal_runs_still_have_a_spread() -> None:
    assert spread([1.0] * 8 + [2.0, 3.0]) > 0


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_a_reference_that_is_not_finite_is_refused(wrong: float) -> None:
    with pytest.raises(ValueError, match="reference holds"):
        band([*REFERENCE, wrong])


def test_four_runs_are_no_reference() -> None:
    with pytest.raises(ValueError, match="at least 5"):
        band(REFERENCE[:4])


@pytest.mark.parametrize("name", ["sigmas", "relative", "absolute"])
@pytest.mark.parametrize("width", [-1.0, math.nan, math.inf])
def test_a_width_that_lets_everything_pass_is_refused(name: str, width: float) -> None:
    with pytest.raises(ValueError, match=name):
        band(REFERENCE, **{name: width})


def test_a_value_that_is_not_finite_lies_nowhere() -> None:
    with pytest.raises(ValueError, match="no band"):
        band(REFERENCE).side(math.nan)


def test_a_negative_middle_has_a_relative_floor_too() -> None:
    made = band([-100.0] * 5, relative=0.01)
    assert made.low < made.middle < made.high


@pytest.mark.parametrize("count", range(5, 26))
def test_the_stated_rate_holds_for_normal_values(count: int) -> None:
    """4,000 new values against as many references; an honest 2 % makes 80, and more than 117 in about 1 of 20,000 cases."""
    source = random.Random(f"bands {count}")
    made = [band([source.gauss(5, 2) for _ in range(count)], sigmas=0, rate=0.02) for _ in range(4000)]
    missed = sum(one.side(source.gauss(5, 2)) != "inside" for one in made)
    assert made[0].rate == pytest.approx(0.02)
    assert 40 <= missed <= 117


def test_few_runs_make_a_wide_band_and_many_the_one_that_was_asked_for() -> None:
    assert factor(5, 0.01) > factor(7, 0.01) > 4 > factor(20, 0.01)
    assert outside(20, 4.0) < 0.003
    assert band([1.0, 2.0, 3.0, 4.0, 5.0]).rate == pytest.approx(0.01)


def test_heavy_tails_lie_outside_more_often_than_stated() -> None:
    """The limit that the docs tell: so few runs cannot show their tails."""
    source = random.Random("tails")

    def draw() -> float:
        return source.gauss(0, 1) / math.sqrt(max(sum(source.gauss(0, 1) ** 2 for _ in range(3)), 1e-9))

    made = [band([draw() for _ in range(20)]) for _ in range(3000)]
    missed = sum(one.side(draw()) != "inside" for one in made)
    assert missed > 3000 * made[0].rate
    assert missed < 3000 * 0.06


@pytest.mark.parametrize("rate", [0.0, 1.0, math.nan])
def test_a_rate_that_is_none_is_refused(rate: float) -> None:
    with pytest.raises(ValueError, match="rate"):
        band(REFERENCE, rate=rate)
