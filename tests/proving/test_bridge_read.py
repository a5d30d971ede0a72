"""Readers of facts: whatever is not exactly what a fact should hold is nothing."""

from __future__ import annotations

from typing import Any

import pytest

from seatrial.proving.bridge.judges import read


@pytest.mark.parametrize("value", [None, "NaN", "1", True, [], float("nan"), float("inf"), float("-inf")])
def test_what_is_no_finite_number_is_nothing(value: Any) -> None:
    assert read.number(value) is None
    assert read.count({"key": value}, "key") == 0


def test_numbers_and_counts() -> None:
    assert (read.number(2), read.number(-1.5), read.number(0)) == (2.0, -1.5, 0.0)
    assert (read.count({"a": 3}, "a"), read.count({"a": -3}, "a"), read.count({"a": 3.0}, "a"), read.count({}, "a")) == (3, 0, 0, 0)


@pytest.mark.parametrize("found", [None, [], {}, {"count": 0}, {"first": []}, {"count": True, "first": []}, {"count": 0, "first": ["a"]}])
def test_what_is_no_list_of_a_fact_has_no_length(found: Any) -> None:
    assert read.length(found) is None


def test_lists_of_a_fact() -> None:
    assert read.length({"count": 9, "first": ["a"]}) == 9
    assert read.first({"count": 9, "first": ["a"]}) == ["a"]
    assert read.first({"first": "a"}) == read.first(None) == []
    assert read.figures({"a": {"b": 1}, "c": 1}, "a") == {"b": 1}
    assert read.figures({"c": 1}, "c") == {}


def test_a_fact_that_is_missing_or_doubled_is_empty() -> None:
    rows = [{"fact": "saved", "dtype": "float32"}, {"fact": "saved", "dtype": "bfloat16"}]
    assert read.only(rows, "saved") == read.only(rows, "loaded") == read.only(rows, "saved", "float16") == {}
    assert read.only(rows, "saved", "float32") == rows[0]
