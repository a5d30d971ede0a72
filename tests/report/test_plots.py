"""Thinning keeps extremes and never hides a non-finite point."""

from __future__ import annotations

import math
import random

from seatrial.core.series import Series
from seatrial.report.html import POINTS, Gap, plots


def series(values: list[float], tag: str = "t") -> Series:
    return Series(tag, tuple(range(1, len(values) + 1)), tuple(values))


def test_short_series_is_kept_whole_with_breaks() -> None:
    (plot,) = plots([series([1.0, math.nan, 2.0, math.inf, -math.inf, -math.inf])])
    assert plot.values == (1.0, None, 2.0, None, None, None)
    assert plot.gaps == (Gap(2, 2, "NaN", 1), Gap(4, 4, "Infinity", 1), Gap(5, 6, "-Infinity", 2))
    assert [str(gap) for gap in plot.gaps[1:]] == ["Infinity at step 4", "-Infinity at 2 steps from 5 to 6"]


def test_long_series_keeps_extremes_ends_and_order() -> None:
    values = [random.Random(7).random() for _ in range(50_000)]
    values[31_234], values[31_235] = 99.0, -99.0
    (plot,) = plots([series(values)])
    assert len(plot.steps) <= POINTS + 2
    assert {31_235, 31_236, 1, 50_000} <= set(plot.steps)
    assert list(plot.steps) == sorted(set(plot.steps))
    assert (max(plot.finite()), min(plot.finite()), plot.points) == (99.0, -99.0, 50_000)


def test_long_series_keeps_every_gap() -> None:
    values = [float(index % 7) for index in range(30_000)]
    lost = {5, 100, 101, 102, 103, 29_999}
    for index in lost:
        values[index] = math.nan
    (plot,) = plots([series(values)])
    assert sum(gap.count for gap in plot.gaps) == len(lost)
    assert [(gap.first, gap.last) for gap in plot.gaps] == [(6, 6), (101, 104), (30_000, 30_000)]
    broken = {step for step, value in zip(plot.steps, plot.values, strict=True) if value is None}
    assert broken == {6, 101, 104, 30_000}


def test_wholly_non_finite_long_series() -> None:
    (plot,) = plots([series([math.nan] * 5000)])
    assert plot.finite() == []
    assert plot.gaps == (Gap(1, 5000, "NaN", 5000),)
    assert plot.steps == (1, 5000)


def test_order_damaged_first_then_what_readers_look_at() -> None:
    tags = ["z", "train/grad_norm", "a", "train/kl", "val/loss", "train/loss", "train/reward_std", "critic/rewards/mean", "train/reward"]
    made = plots([series([1.0], tag) for tag in tags] + [series([math.nan], "perf/x"), series([], "none")])
    assert [plot.tag for plot in made] == [
        "perf/x",
        "critic/rewards/mean",
        "train/reward",
        "train/loss",
        "val/loss",
        "train/kl",
        "train/grad_norm",
        "train/reward_std",
        "a",
        "z",
    ]
    assert [plot.important for plot in made] == [True] * 7 + [False] * 3
