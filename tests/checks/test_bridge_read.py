"""Readers of facts: whatever is not exactly what a fact should hold is nothing."""

from __future__ import annotations

from typing import Any

import pytest

from seatrial.checks import bridge_rungs


@pytest.mark.parametrize("value", [None, "NaN", "1", True, [], float("nan"), float("inf"), float("-inf")])
def test_what_is_no_finite_number_is_nothing(value: Any) -> None:
    assert bridge_rungs.number_of(value) is None
    assert bridge_rungs.count_of({"key": value}, "key") == 0


def test_numbers_and_counts() -> None:
    assert (bridge_rungs.number_of(2), bridge_rungs.number_of(-1.5), bridge_rungs.number_of(0)) == (2.0, -1.5, 0.0)
    assert (
        bridge_rungs.count_of({"a": 3}, "a"),
        bridge_rungs.count_of({"a": -3}, "a"),
        bridge_rungs.count_of({"a": 3.0}, "a"),
        bridge_rungs.count_of({}, "a"),
    ) == (3, 0, 0, 0)


@pytest.mark.parametrize("found", [None, [], {}, {"count": 0}, {"first": []}, {"count": True, "first": []}, {"count": 0, "first": ["a"]}])
def test_what_is_no_list_of_a_fact_has_no_length(found: Any) -> None:
    assert bridge_rungs.length_of(found) is None


def test_lists_of_a_fact() -> None:
    assert bridge_rungs.length_of({"count": 9, "first": ["a"]}) == 9
    assert bridge_rungs.first_of({"count": 9, "first": ["a"]}) == ["a"]
    assert bridge_rungs.first_of({"first": "a"}) == bridge_rungs.first_of(None) == []
    assert bridge_rungs.figures_of({"a": {"b": 1}, "c": 1}, "a") == {"b": 1}
    assert bridge_rungs.figures_of({"c": 1}, "c") == {}


def test_a_fact_that_is_missing_or_doubled_is_empty() -> None:
    rows = [{"fact": "saved", "dtype": "float32"}, {"fact": "saved", "dtype": "bfloat16"}]
    assert (
        bridge_rungs.only_fact(rows, "saved")
        == bridge_rungs.only_fact(rows, "loaded")
        == bridge_rungs.only_fact(rows, "saved", "float16")
        == {}
    )
    assert bridge_rungs.only_fact(rows, "saved", "float32") == rows[0]
