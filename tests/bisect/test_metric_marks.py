"""Marks of runs by a check on the metrics that they left."""

from __future__ import annotations

from pathlib import Path

import pytest

from seatrial.bisect.bisect_records import Mark, SkipKind
from seatrial.bisect.judge_run import threshold
from seatrial.bisect.noise_models import Threshold
from seatrial.core.errors import UserError
from seatrial.metrics.checks import CheckSyntaxError
from tests.bisect.ended import ASSERTION, CHECK, LIMIT, TESTS, Runs


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    return Runs(tmp_path)


def test_a_check_measures(runs: Runs) -> None:
    runs.metrics([3.0, 2.0, 1.5])
    missed = runs.see(0, check=CHECK)
    assert (missed.mark, missed.value, missed.passed) == (Mark.BAD, 1.5, False)
    assert missed.failure is not None
    runs.metrics([3.0, 2.0, 7.0])
    assert runs.see(0, end=missed.failure, check=CHECK).mark is Mark.BAD
    runs.metrics([3.0, 2.0, 0.5])
    passed = runs.see(0, end=missed.failure, check=CHECK)
    assert (passed.mark, passed.value, passed.passed) == (Mark.GOOD, 0.5, True)
    with pytest.raises(CheckSyntaxError):
        runs.see(0, check="loss < 1")
    with pytest.raises(UserError, match="commit"):
        runs.see(0, check=CHECK, metrics="{commit}/x")


def test_a_metric_that_is_missing_is_a_skip_unless_the_bad_end_misses_it_too(runs: Runs) -> None:
    runs.metrics([3.0, 2.0, 1.5])
    end = runs.failure(0, check=CHECK)
    for losses in ([3.0], [3.0, 2.0, float("nan")]):
        runs.metrics(losses)
        first = runs.see(0, check=CHECK)
        assert first.mark is Mark.BAD  # at an end: its reason is the message
        assert "loss" in first.reason
        for any_failure in (True, False):
            assert runs.see(0, end=end, check=CHECK, any_failure=any_failure).skip is SkipKind.METRIC
        assert runs.see(0, end=first.failure, check=CHECK).mark is Mark.BAD
        runs.metrics([3.0, 2.0, 1.5])
        assert runs.see(0, end=first.failure, check=CHECK).skip is SkipKind.OTHER_FAILURE
    assert runs.see(0, LIMIT, end, check=CHECK).skip is SkipKind.ENVIRONMENT
    runs.metrics([3.0])
    lost = runs.see(0, LIMIT, end, check=CHECK)
    assert (lost.skip, lost.transient) == (SkipKind.ENVIRONMENT, True)


def test_metrics_that_the_run_did_not_write_do_not_count(runs: Runs) -> None:
    runs.metrics([3.0, 2.0, 0.5], place="tree", age=60)
    for place in (".", "metrics.jsonl", "{tree}/metrics.jsonl"):
        seen = runs.see(0, check=CHECK, metrics=place)
        assert seen.mark is Mark.BAD
        assert "older" in seen.reason
    runs.metrics([3.0, 2.0, 0.5], place="tree")
    assert runs.see(0, check=CHECK, metrics="metrics.jsonl").mark is Mark.GOOD
    assert "seatrial-fresh" not in runs.see(0, check=CHECK, metrics="{output}").reason


def test_damaged_metrics_do_not_pass(runs: Runs) -> None:
    runs.metrics([3.0, 2.0, 1.5])
    end = runs.failure(0, check=CHECK)
    runs.metrics([3.0, 2.0, 0.5])
    with (runs.root / "output" / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"step": 4, "lo')
    assert runs.see(0, end=end, check=CHECK).skip is SkipKind.METRIC


def test_metrics_of_a_run_that_failed_count_only_if_the_bad_end_fails_so_too(runs: Runs) -> None:
    runs.metrics([3.0, 2.0, 1.5])
    clean, failing = runs.failure(0, check=CHECK), runs.failure(1, TESTS, check=CHECK)
    assert failing.kind == "check"
    assert runs.see(1, TESTS, failing, check=CHECK).mark is Mark.BAD
    assert runs.see(0, "", failing, check=CHECK).mark is Mark.BAD
    assert runs.see(1, TESTS, clean, check=CHECK).skip is SkipKind.OTHER_FAILURE
    assert runs.see(1, ASSERTION, failing, check=CHECK).skip is SkipKind.OTHER_FAILURE
    assert runs.see(1, LIMIT, failing, check=CHECK).skip is SkipKind.ENVIRONMENT
    runs.metrics([3.0, 2.0, 0.5])
    assert runs.see(1, TESTS, failing, check=CHECK).mark is Mark.GOOD
    assert runs.see(1, ASSERTION, failing, check=CHECK).skip is SkipKind.OTHER_FAILURE
    assert runs.see(1, ASSERTION, clean, check=CHECK).skip is SkipKind.OTHER_FAILURE
    (runs.root / "output" / "metrics.jsonl").unlink()
    crashed = runs.failure(1, ASSERTION, check=CHECK)
    assert crashed.kind == "exit"
    assert runs.see(1, ASSERTION, crashed, check=CHECK).mark is Mark.BAD
    assert runs.see(1, TESTS, failing, check=CHECK).skip is SkipKind.METRIC


@pytest.mark.parametrize(
    ("check", "wanted"),
    [
        (CHECK, Threshold(1.0, good_below=True)),
        ('mean(data["a"]) >= -2', Threshold(-2.0, good_below=False, inclusive=True)),
        ('0.5 < max(data["a"])', Threshold(0.5, good_below=False)),
        ('3 >= data["a"]["1"] / data["b"]["1"]', Threshold(3.0, good_below=True, inclusive=True)),
        ('0.5 < max(data["a"]) < 2', None),
        ('data["a"]["1"] == 1', None),
        ('data["a"]["1"] < data["b"]["1"]', None),
        ('not data["a"]["1"] < 1', None),
        ('data["a"]["1"] < 1 and data["b"]["1"] < 1', None),
        ('all_finite(data["a"])', None),
    ],
)
def test_threshold(check: str, wanted: Threshold | None) -> None:
    assert threshold(check) == wanted
