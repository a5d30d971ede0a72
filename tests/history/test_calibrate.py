"""Thresholds keep the rate they state, for any distribution, or there are none."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from seatrial.core.errors import UserError
from seatrial.core.series import Metrics, Series
from seatrial.history.store import Kind, Store, StoredRun, point
from seatrial.history.thresholds import calibrate, propose, t_quantile
from seatrial.metrics.checks import evaluate

NOISES: dict[str, Callable[[random.Random], float]] = {
    "normal": lambda source: source.gauss(10, 1),
    "skewed": lambda source: source.lognormvariate(0, 1),
    "heavy": lambda source: source.gauss(0, 1) / max(abs(source.gauss(0, 1)), 1e-9),
}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store(tmp_path / "history.sqlite", write=True) as opened:
        yield opened


def fill(store: Store, values: Sequence[float], *, trusted: bool = True) -> None:
    for time, value in enumerate(values):
        run = StoredRun(
            project="p", kind=Kind.METRICS, name="", time=time, machine="m", passed=True, trusted=trusted, digest=f"{trusted} {time}"
        )
        store.add(run, [point("loss", value, 1)])


@pytest.mark.parametrize("name", NOISES)
def test_the_rate_of_false_alarms_is_as_stated(name: str) -> None:
    """39 runs, 5 %: of 2,000 new runs 100 are expected to miss; 134 or more happen by chance in fewer than 1 of 1,000 cases."""
    source = random.Random(name)
    missed = 0
    for _ in range(2000):
        made, value = propose([NOISES[name](source) for _ in range(39)], false_alarms=0.05), NOISES[name](source)
        assert made.lower is not None
        assert made.upper is not None
        missed += not made.lower <= value <= made.upper
    assert missed < 134


def test_what_the_normal_distribution_would_give_is_wrong_for_skewed_values() -> None:
    source, missed = random.Random(2), 0
    for _ in range(1000):
        low, high = propose([source.lognormvariate(0, 1) for _ in range(100)]).if_normal
        missed += not low <= source.lognormvariate(0, 1) <= high
    assert missed > 15  # 1 % stated: so it is shown beside, and makes no check


def test_too_few_runs_give_no_thresholds_but_the_number_that_is_needed() -> None:
    made = propose([1.0, 2.0, 3.0, 4.0, 5.0], false_alarms=0.01)
    assert (made.lower, made.upper, made.needed) == (None, None, 199)
    assert made.checks("x") == []
    assert "199 runs are needed" in made.lines()[0]


def test_the_number_that_is_needed_is_enough_and_one_fewer_is_not() -> None:
    values = [float(number) for number in range(199)]
    assert propose(values).lower is not None
    assert propose(values[:-1]).lower is None


def test_bounds_are_rounded_outward_only() -> None:
    source = random.Random(4)
    for scale in (1e-9, 1.0, 1e12):
        values = [scale * source.gauss(3, 1) for _ in range(50)]
        made = propose(values, false_alarms=0.05)
        assert made.lower is not None
        assert made.upper is not None
        assert made.lower <= sorted(values)[0]
        assert made.upper >= sorted(values)[-1]
        assert made.upper - made.lower < 1.01 * (max(values) - min(values))


def test_equal_runs_give_bounds_that_they_meet() -> None:
    made = propose([2.0] * 199)
    assert (made.lower, made.upper, made.left_out) == (2.0, 2.0, None)


def test_leaving_one_out_is_near_the_stated_rate() -> None:
    source = random.Random(5)
    assert propose([source.gauss(0, 1) for _ in range(400)]).left_out == pytest.approx(0.005, abs=0.006)


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_a_run_that_is_not_finite_is_refused(wrong: float) -> None:
    with pytest.raises(ValueError, match="finite"):
        propose([1.0, 2.0, 3.0, wrong])


def test_students_quantile_is_that_of_tables() -> None:
    assert t_quantile(0.05, 9) == pytest.approx(2.262157, abs=1e-5)


def test_checks_are_ready_to_use_and_hold_for_the_runs_themselves(store: Store) -> None:
    source = random.Random(6)
    values = [source.gauss(1, 0.1) for _ in range(220)]
    fill(store, values)
    for take in ("last", "mean", "min", "max"):
        (found,) = calibrate(store, ["loss"], take=take)
        assert len(found.checks) == 2
        passed = [[_passes(check, value) for check in found.checks] for value in (sorted(values)[110], -9.0, 9.0)]
        assert passed == [[True, True], [False, True], [True, False]]


def _passes(check: str, value: float) -> bool:
    return evaluate(check, Metrics({"loss": Series("loss", (1,), (value,))})).passed


def test_untrusted_runs_are_used_only_when_asked_for(store: Store) -> None:
    fill(store, [1.0, 2.0, 3.0, 2.0, 1.0], trusted=False)
    with pytest.raises(UserError, match="no run"):
        calibrate(store, ["loss"])
    assert calibrate(store, ["loss"], every=True)[0].proposal is not None


def test_after_a_step_only_the_runs_since_then_count(store: Store) -> None:
    source = random.Random(7)
    fill(store, [source.gauss(0, 1) for _ in range(60)] + [source.gauss(20, 1) for _ in range(45)])
    (found,) = calibrate(store, ["loss"], false_alarms=0.05)
    assert found.proposal is not None
    assert found.proposal.lower is not None
    assert found.proposal.lower > 10
    assert "only the 45 runs since then" in found.lines()[1]


def test_values_that_drift_get_no_thresholds(store: Store) -> None:
    source = random.Random(8)
    fill(store, [source.gauss(10 * index / 100, 1) for index in range(100)])
    (found,) = calibrate(store, ["loss"], false_alarms=0.05)
    assert found.checks == ()
    assert "drift" in found.lines()[1]


@pytest.mark.parametrize("rate", [0.0, 1.0, math.nan])
def test_a_rate_that_is_none_is_an_error(store: Store, rate: float) -> None:
    with pytest.raises(UserError, match="--false-alarms"):
        calibrate(store, ["loss"], false_alarms=rate)
