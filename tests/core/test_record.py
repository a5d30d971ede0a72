"""The stored types: unknown keys are refused, nothing can be changed, series keep what is not finite."""

from __future__ import annotations

import math

import pytest
from pydantic import ValidationError

from seatrial.core.records import CheckResult, RepoState
from seatrial.core.series import Damage, Metrics, Series


def test_an_unknown_key_is_refused() -> None:
    with pytest.raises(ValidationError, match="boundry"):
        CheckResult.model_validate({"name": "a", "passed": True, "boundry": "metrics"})


def test_a_record_cannot_be_changed() -> None:
    check = CheckResult(name="a", passed=False)
    with pytest.raises(ValidationError):
        check.passed = True


def test_a_record_survives_its_own_json() -> None:
    repo = RepoState(name="größe", path="/a b", commit="0" * 40, branch=None, dirty=("x y.py",))
    assert RepoState.model_validate_json(repo.model_dump_json()) == repo


def test_a_series_names_the_steps_that_are_not_finite() -> None:
    series = Series("a", (1, 2, 3, 4), (1.0, math.nan, -math.inf, 0.0))
    assert series.non_finite() == (2, 3)
    assert (series.get(4), series.get(5), len(series)) == (0.0, None, 4)


def test_the_last_step_is_that_of_any_series() -> None:
    assert Metrics().last_step() is None
    assert Metrics(series={"a": Series("a", (1, 7), (0.0, 0.0)), "b": Series("b", (), ())}).last_step() == 7


def test_damage_says_where_and_how_much() -> None:
    assert str(Damage("f", "line 3", 2, "torn")) == "f: line 3: torn (2 lost)"
    assert "unknown number of" in str(Damage("f", "line 3", 0, "torn"))
