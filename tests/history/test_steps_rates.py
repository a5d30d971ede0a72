"""The detector keeps its word: false alarms on noise, and steps of 1.5 deviations found. Seeds are fixed."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from seatrial.history.change_points import find_changes

NOISES: dict[str, Callable[[random.Random], float]] = {
    "normal": lambda source: source.gauss(0, 1),
    "skewed": lambda source: source.expovariate(1),
    "heavy": lambda source: source.gauss(0, 1) / max(sum(source.gauss(0, 1) ** 2 for _ in range(3)), 1e-9) ** 0.5,
}


@pytest.mark.parametrize("name", NOISES)
@pytest.mark.parametrize("count", [12, 60])
def test_noise_alarms_at_most_as_stated(name: str, count: int) -> None:
    """5 % stated; of 300 series at most 27 may alarm, which an honest 5 % exceeds in about 1 of 1,000 cases."""
    source = random.Random(f"{name} {count}")
    told = [find_changes([NOISES[name](source) for _ in range(count)], alarm=0.05) for _ in range(300)]
    assert sum(any(change.kind != "outlier" for change in found) for found in told) <= 27


def test_most_steps_of_one_and_a_half_deviations_are_found_in_place() -> None:
    source, hits, said = random.Random(5), 0, 0
    for _ in range(100):
        values = [source.gauss(1.5 * (index >= 40), 1) for index in range(80)]
        steps = [change.index for change in find_changes(values) if change.kind == "step"]
        hits += any(abs(step - 40) <= 3 for step in steps)
        said += len(steps)
    assert hits >= 85
    assert hits / said >= 0.85


def test_drifts_are_rarely_called_steps() -> None:
    source, wrong, named = random.Random(6), 0, 0
    for _ in range(60):
        found = find_changes([source.gauss(4.5 * index / 150, 1) for index in range(150)])
        wrong += any(change.kind == "step" for change in found)
        named += any(change.kind == "drift" for change in found)
    assert wrong <= 5
    assert named >= 55


def test_one_point_in_twenty_wild_makes_no_step() -> None:
    source, wrong = random.Random(7), 0
    for _ in range(60):
        values = [source.gauss(0, 1) + (source.random() < 0.05) * source.choice((-1, 1)) * source.uniform(6, 20) for _ in range(150)]
        wrong += any(change.kind == "step" for change in find_changes(values))
    assert wrong <= 3


def test_a_long_series_is_done_in_one_pass() -> None:
    source = random.Random(8)
    values = [source.gauss(3 * (index // 1000 % 2), 1) for index in range(6000)]
    steps = [change.index for change in find_changes(values) if change.kind == "step"]
    assert len(steps) == 5
    assert all(min(step % 1000, 1000 - step % 1000) <= 3 for step in steps)
