"""GPU hours: the share of a test, the budget of a suite, what the summary says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from pytest_seatrial.guards import Share, excess, share
from tests.pytest_seatrial.tracker.guarded import project, pytest_in

pytestmark = pytest.mark.slow

TESTS = """
import pytest

def test_free(): pass

@pytest.mark.gpu_hours(2)
def test_two(): pass

@pytest.mark.gpu_hours(gpus=8, minutes=30)
def test_four(): pass

@pytest.mark.gpu_hours(100)
@pytest.mark.hf_gated
def test_gated(): pass

@pytest.mark.gpu_hours(100)
@pytest.mark.skip(reason="mine")
def test_never(): pass
"""
BUDGET = "[groups.hf_gated]\n[tests]\ngpu_hours = {}\n"


@pytest.mark.parametrize(
    ("args", "kwargs", "needed", "hours", "gpus"),
    [
        ([0.5], {}, 0, 0.5, 1),
        ([0.5], {}, 4, 0.5, 4),
        ([0.5], {"gpus": 8}, 4, 0.5, 8),
        ([], {"gpus": 8, "minutes": 30}, 0, 4.0, 8),
        ([], {"minutes": 30}, 2, 1.0, 2),
        ([0], {}, 0, 0.0, 1),
    ],
)
def test_a_share_comes_from_hours_or_minutes(args: list[Any], kwargs: dict[str, Any], needed: int, hours: float, gpus: int) -> None:
    assert share("t", args, kwargs, needed) == Share("t", hours, gpus)


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ([], {}, "give hours, or minutes="),
        ([], {"gpus": 2}, "give hours, or minutes="),
        ([1, 2], {}, "one of them"),
        ([1], {"minutes": 3}, "one of them"),
        ([True], {}, r"hours: must be a number, not below 0 \(got True\)"),
        (["1"], {}, r"hours: must be a number"),
        ([float("inf")], {}, r"hours: must be a number"),
        ([-1], {}, r"hours: must be a number"),
        ([], {"minutes": float("nan")}, r"minutes: must be a number"),
        ([1], {"gpus": 0}, r"gpus: must be a whole number of at least 1 \(got 0\)"),
        ([1], {"gpus": 1.5}, r"gpus: must be a whole number"),
        ([], {"minute": 3}, r"unknown argument 'minute'; did you mean minutes\?"),
    ],
)
def test_wrong_arguments_are_named(args: list[Any], kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        share("t", args, kwargs, 0)


def test_a_sum_that_is_the_budget_but_for_rounding_holds() -> None:
    tests = [share(str(number), [], {"minutes": 6}, 0) for number in range(10)]
    assert excess(tests, 1.0, "x") is None
    assert excess(tests, 0.999, "x") is not None


def test_the_largest_are_listed_first() -> None:
    why = excess([Share(f"t{number}", float(number), 1) for number in range(8)], 1, "here")
    assert why is not None
    assert why.splitlines()[0] == "seatrial: the tests plan 28 GPU hours, the budget is 1 (here); the largest:"
    assert why.splitlines()[1:7] == ["  7 t7", "  6 t6", "  5 t5", "  4 t4", "  3 t3", "  … and 3 more"]


@pytest.mark.parametrize("workers", ["-n0", "-n2"])
def test_a_plan_above_the_budget_runs_nothing(tmp_path: Path, workers: str) -> None:
    ran = pytest_in(project(tmp_path, BUDGET.format(5), TESTS), workers)
    assert ran.code == 4, ran.text
    assert ran.text.count("ERROR: seatrial: the tests plan 6 GPU hours, the budget is 5") == 1
    assert f"({tmp_path}/seatrial.toml: tests.gpu_hours); the largest:\n  4 test_it.py::test_four\n  2 test_it.py::test_two\n" in ran.text
    assert not ran.tests("PASSED")


@pytest.mark.parametrize("workers", ["-n0", "-n2"])
def test_only_tests_that_will_run_are_planned(tmp_path: Path, workers: str) -> None:
    folder = project(tmp_path, BUDGET.format(6), TESTS)
    ran = pytest_in(folder, workers)
    assert ran.code == 0, ran.text
    assert "GPU hours: 6 planned of 6, under 0.001 measured" in ran.text
    assert pytest_in(folder, workers, "--hf-gated").code == 4
    few = pytest_in(folder, workers, "-k", "free or two", "--seatrial-gpu-hours=2")
    assert "GPU hours: 2 planned of 2" in few.text


def test_the_option_wins_over_the_file(tmp_path: Path) -> None:
    folder = project(tmp_path, BUDGET.format(1), TESTS)
    assert pytest_in(folder, "--seatrial-gpu-hours=6").code == 0
    assert "the budget is 0 (--seatrial-gpu-hours)" in pytest_in(folder, "--seatrial-gpu-hours=0").text


@pytest.mark.parametrize("value", ["nan", "-1", "many", "inf"])
def test_a_budget_that_is_no_number_is_an_error(tmp_path: Path, value: str) -> None:
    ran = pytest_in(project(tmp_path), f"--seatrial-gpu-hours={value}")
    assert ran.code == 4
    assert f"must be a number of hours, not below 0 (got '{value}')" in ran.text


@pytest.mark.parametrize("workers", ["-n0", "-n2"])
def test_measured_hours_are_elapsed_time_on_every_gpu(tmp_path: Path, workers: str) -> None:
    tests = "import time, pytest\n@pytest.mark.gpu_hours(0.5, gpus=3600000)\ndef test_it(): time.sleep(0.05)\n"
    ran = pytest_in(project(tmp_path, "", tests), workers)
    measured = re.search(r"GPU hours: 0\.5 planned, (\S+) measured", ran.text)
    assert measured, ran.text
    assert float(measured[1]) >= 50


def test_a_suite_without_gpu_hours_says_nothing_of_them(tmp_path: Path) -> None:
    assert "GPU hours" not in pytest_in(project(tmp_path)).text
