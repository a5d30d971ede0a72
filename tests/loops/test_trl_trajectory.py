"""Comparing trajectories, and runs that could not have shown anything."""

from __future__ import annotations

import math

import pytest

from seatrial.core.series import Metrics, Series
from seatrial.loops.trl.trl_metrics import ABSOLUTE, COMPARED, RELATIVE, same_trajectory, vacuous, within_tolerance


def metrics(values: dict[str, dict[int, float]]) -> Metrics:
    return Metrics(series={tag: Series(tag, tuple(table), tuple(table.values())) for tag, table in values.items()})


FULL = {1: 0.5, 2: 0.25, 3: 1 / 3, 4: 0.1}
EQUAL = {"full/train/loss": FULL, "resumed/train/loss": {3: 1 / 3, 4: 0.1}}


def test_equal_runs_are_equal_after_the_resume() -> None:
    found = same_trajectory(metrics(EQUAL), "full/", "resumed/", 2)
    assert (found.passed, found.steps, found.value) == (True, (3, 4), "1 of 1 metrics x 2 steps equal")


@pytest.mark.parametrize(
    "changed",
    [
        {3: math.nextafter(1 / 3, 1), 4: 0.1},
        {3: 1 / 3, 4: math.nextafter(0.1, 0)},
        {3: 1 / 3},
        {4: 0.1},
        {2: 0.25, 3: 1 / 3, 4: 0.1},
        {3: 1 / 3, 4: 0.1, 5: 0.2},
        {3: 1 / 3, 4: math.nan},
        {},
    ],
)
def test_one_unit_in_the_last_place_or_one_step_is_seen(changed: dict[int, float]) -> None:
    found = same_trajectory(metrics(EQUAL | {"resumed/train/loss": changed}), "full/", "resumed/", 2)
    assert not found.passed
    assert found.message == "train/loss"


def test_minus_zero_is_not_zero() -> None:
    values = {"full/train/loss": {3: 0.0}, "resumed/train/loss": {3: -0.0}}
    assert not same_trajectory(metrics(values), "full/", "resumed/", 2).passed


def test_a_metric_that_only_one_run_has_is_seen() -> None:
    for extra in ("full/train/kl", "resumed/train/kl"):
        found = same_trajectory(metrics(EQUAL | {extra: {3: 1.0}}), "full/", "resumed/", 2)
        assert (found.passed, found.message) == (False, "train/kl")


def test_the_clock_is_not_compared() -> None:
    clock = ("step_time", "train_runtime", "train_steps_per_second")
    times = {f"{run}/train/{name}": {3: value} for run, value in (("full", 1.0), ("resumed", 2.0)) for name in clock}
    assert same_trajectory(metrics(EQUAL | times), "full/", "resumed/", 2).passed


@pytest.mark.parametrize("after", [None, 4, 9])
def test_nothing_compared_is_nothing_proven(after: int | None) -> None:
    assert not same_trajectory(metrics(EQUAL), "full/", "resumed/", after).passed
    assert not same_trajectory(Metrics(), "full/", "resumed/", 2).passed


def ranks(**changes: dict[int, float]) -> Metrics:
    values = {f"{run}/train/{name}": {1: 1.0, 2: 2.0} for run in ("one", "two") for name in COMPARED}
    return metrics(values | {f"two/train/{name}": table for name, table in changes.items()})


def test_ranks_agree_within_the_tolerance() -> None:
    edge = ABSOLUTE + RELATIVE
    assert within_tolerance(ranks(), "one/", "two/").passed
    assert within_tolerance(ranks(loss={1: 1.0 + 0.99 * edge, 2: 2.0}), "one/", "two/").passed
    found = within_tolerance(ranks(loss={1: 1.0 + 1.01 * edge, 2: 2.0}), "one/", "two/")
    assert not found.passed
    assert "loss at step 1" in found.message
    assert "(loss, step 1)" in str(found.value)


@pytest.mark.parametrize("table", [{1: 1.0}, {1: 1.0, 3: 2.0}, {1: 1.0, 2: math.nan}, {1: math.inf, 2: 2.0}, {}])
def test_missing_steps_and_what_is_not_finite_are_no_agreement(table: dict[int, float]) -> None:
    assert not within_tolerance(ranks(grad_norm=table), "one/", "two/").passed


def test_a_missing_metric_is_no_agreement() -> None:
    whole = ranks()
    for name in COMPARED:
        series = {tag: value for tag, value in whole.series.items() if tag != f"one/train/{name}"}
        assert not within_tolerance(Metrics(series=series), "one/", "two/").passed
    assert not within_tolerance(Metrics(), "one/", "two/").passed


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"train/frac_reward_zero_std": {1: 1.0, 2: 1.0}}, "every group of completions earned the same reward at every step, so"),
        ({"train/reward_std": {1: 0.0, 2: 0.0}}, "the reward never varied, so"),
        ({"train/learning_rate": {1: 0.0}}, "the learning rate was 0 at every step, so"),
        ({"moe/train/reward_std": {1: 0.0}}, "the reward never varied in moe/train"),
        ({"learn/1/learning_rate": {1: 0.0}}, "the learning rate was 0 at every step in learn/1"),
    ],
)
def test_a_run_that_could_not_have_shown_anything(values: dict[str, dict[int, float]], why: str) -> None:
    found = vacuous(metrics(values))
    assert found is not None
    assert found.reason.startswith("vacuous: ")
    assert why in found.reason


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"train/reward_std": {1: 0.0, 2: 0.1}},
        {"train/frac_reward_zero_std": {1: 1.0, 2: 0.9}},
        {"train/learning_rate": {1: 0.0, 2: 1e-9}},
        {"control/1/learning_rate": {1: 0.0}},
        {"eval/reward_std": {1: 0.0}, "train/reward_std": {1: 0.1}},
        {"full/eval/frac_reward_zero_std": {1: 1.0}},
        {"train/reward_std": {}},
        {"train/grad_norm": {1: 0.0}},
    ],
)
def test_what_is_no_vacuity(values: dict[str, dict[int, float]]) -> None:
    assert vacuous(metrics(values)) is None
