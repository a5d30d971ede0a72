"""Steps, drifts and outliers, each under its own name; and what must not be called a step."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from seatrial.history.change_points import Change, TooFew, cuts, find_changes


def noise(seed: int, count: int, level: float = 0.0, scale: float = 1.0) -> list[float]:
    source = random.Random(seed)
    return [source.gauss(level, scale) for _ in range(count)]


def kinds(found: list[Change]) -> list[str]:
    return [change.kind for change in found]


def brute(values: list[float], price: float) -> float:
    """The least cost over all partitions, levels on a fine grid."""
    grid = [level / 20 for level in range(-80, 160)]
    best = [-price]
    for end in range(1, len(values) + 1):
        best.append(
            min(
                best[start] + price + min(sum(min((value - level) ** 2, 9.0) for value in values[start:end]) for level in grid)
                for start in range(end)
            )
        )
    return best[-1]


def cost(values: list[float], found: list[int], price: float) -> float:
    grid = [level / 20 for level in range(-80, 160)]
    bounds = [0, *found, len(values)]
    parts = [values[low:high] for low, high in itertools.pairwise(bounds)]
    return sum(min(sum(min((value - level) ** 2, 9.0) for value in part) for level in grid) for part in parts) + price * len(found)


@pytest.mark.parametrize("seed", range(6))
def test_the_partition_is_the_best_there_is(seed: int) -> None:
    values = noise(seed, 7) + noise(seed + 50, 7, level=3.0)
    assert cost(values, cuts(values, [1.0] * 14, 6.0), 6.0) == pytest.approx(brute(values, 6.0), abs=0.1)


def test_a_step_is_found_where_it_is_with_both_levels() -> None:
    (step,) = [change for change in find_changes(noise(1, 40, 10.0) + noise(2, 40, 13.0)) if change.kind == "step"]
    assert abs(step.index - 40) <= 2
    assert step.before == pytest.approx(10, abs=0.6)
    assert step.after == pytest.approx(13, abs=0.6)
    assert step.sigmas == pytest.approx(3, abs=0.8)
    assert step.confidence > 0.999


def test_a_step_down_has_a_negative_size() -> None:
    (step,) = find_changes([5.0] * 10 + [4.0] * 10)
    assert (step.kind, step.index, step.before, step.after) == ("step", 10, 5.0, 4.0)
    assert step.sigmas < 0


def test_a_slow_drift_is_one_drift_and_no_ladder() -> None:
    values = [value + 5 * index / 150 for index, value in enumerate(noise(3, 150))]
    assert kinds([change for change in find_changes(values) if change.kind != "outlier"]) == ["drift"]


def test_a_drift_that_begins_late_begins_there() -> None:
    values = noise(4, 80) + [value + 8 * index / 120 for index, value in enumerate(noise(5, 120))]
    (drift,) = [change for change in find_changes(values) if change.kind != "outlier"]
    assert drift.kind == "drift"
    assert 50 < drift.index < 110
    assert drift.end == 200


@pytest.mark.parametrize("place", [0, 1, 30, 58, 59])
def test_a_single_wild_point_is_an_outlier_wherever_it_stands(place: int) -> None:
    values = noise(6, 60)
    values[place] = 1e6
    assert [(change.kind, change.index) for change in find_changes(values)] == [("outlier", place)]


@pytest.mark.parametrize("wild", [1, 2, 3])
def test_the_last_few_points_alone_are_no_step_yet(wild: int) -> None:
    assert "step" not in kinds(find_changes(noise(7, 50) + noise(8, wild, level=30.0)))


def test_four_points_behind_a_large_step_are_enough() -> None:
    steps = [change.index for change in find_changes(noise(7, 50) + noise(8, 4, level=30.0)) if change.kind == "step"]
    assert steps == [50]


def test_a_constant_series_has_no_change() -> None:
    assert find_changes([3.0] * 50) == []
    assert find_changes([0.0] * 50) == []


def test_steps_without_any_noise_are_exact() -> None:
    found = find_changes([100.0] * 20 + [101.0] * 20 + [1e12] * 20)
    assert [(change.kind, change.index, change.after) for change in found] == [("step", 20, 101.0), ("step", 40, 1e12)]


def test_a_value_a_billion_deviations_off_hides_no_step() -> None:
    values = noise(9, 40) + noise(10, 40, level=4.0)
    values[10] = 1e12
    found = find_changes(values)
    assert ("outlier", 10) in [(change.kind, change.index) for change in found]
    assert any(change.kind == "step" and abs(change.index - 40) <= 2 for change in found)


def test_rare_ones_among_zeros_are_noise() -> None:
    source = random.Random(11)
    assert "step" not in kinds(find_changes([float(source.random() < 0.15) for _ in range(200)]))


def test_parts_that_scatter_more_have_no_steps_of_their_own() -> None:
    false = sum(
        "step" in kinds(find_changes(noise(seed, 60) + noise(seed + 1000, 60, scale=4.0) + noise(seed + 2000, 60))) for seed in range(60)
    )
    assert false <= 3


@pytest.mark.parametrize("count", [0, 1, 7])
def test_too_few_values_cannot_tell_and_say_so(count: int) -> None:
    with pytest.raises(TooFew, match="at least 8"):
        find_changes([1.0] * count)


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_refused(wrong: float) -> None:
    with pytest.raises(ValueError, match="value 3 is"):
        find_changes([1.0, 2.0, 3.0, wrong, *[1.0] * 10])


@pytest.mark.parametrize("alarm", [0.0, 1.0, -1.0, math.nan])
def test_an_alarm_rate_that_is_none_is_refused(alarm: float) -> None:
    with pytest.raises(ValueError, match="alarm rate"):
        find_changes([1.0] * 10, alarm=alarm)


def test_the_scale_and_the_sign_of_a_series_do_not_matter() -> None:
    values = noise(12, 40) + noise(13, 40, level=2.5) + noise(14, 40)
    found = [(change.kind, change.index) for change in find_changes(values)]
    assert "step" in [kind for kind, _ in found]
    for factor in (1e-12, -1.0, 1e9):
        assert [(change.kind, change.index) for change in find_changes([factor * value for value in values])] == found
