"""Outside data gives a value or a BadValue: never another exception, never a hang."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import pytest

from seatrial.core.guarded import BadValue, parse_float, parse_json, parse_json_once, parse_literal, parse_toml, parse_whole


@pytest.mark.parametrize(
    ("parse", "text", "what"),
    [
        (parse_json, "[" * 3000 + "]" * 3000, "nested deeper than 100"),
        (parse_json, "[" * 101 + "]" * 101, "nested deeper than 100"),
        (parse_json, "\0", "Expecting value"),
        (parse_json_once, '{"a": 1, "a": 2}', "the key 'a' stands twice"),
        (parse_literal, "{'loss': " + "-" * 3000 + "1}", "nested deeper than 100"),
        (parse_literal, "not " * 5000 + "1", "not a Python literal"),
        (parse_literal, "{[1]: 2}", "unhashable"),
        (parse_literal, "1" * 5000, "Exceeds the limit"),
        (parse_literal, "__import__('os')", "not a Python literal"),
        (parse_toml, "a = " + "[" * 3000, "nested deeper than 100"),
        (parse_toml, "a = " + "1" * 5000, "Exceeds the limit"),
        (parse_toml, "a." * 20_000 + "a = 1", "a key of 100 parts"),
        (parse_toml, "a = 2020-13-40", "Expected newline"),
        (parse_float, "1.2.3", "not a number"),
        (parse_float, "1_000", "not a number"),
        (parse_whole, "9" * 25, "not a whole number"),
    ],
)
def test_a_bad_value_says_what_is_wrong(parse: Callable[[str], Any], text: str, what: str) -> None:
    with pytest.raises(BadValue, match=what):
        parse(text)


def test_odd_values_that_can_be_read() -> None:
    assert parse_json("9" * 5000) == parse_json("1e999") == parse_float("1e999") == math.inf
    assert math.isnan(parse_json("NaN"))
    assert parse_json('{"\\ud800": "\\ud83d\\ude00"}') == {"\N{REPLACEMENT CHARACTER}": "😀"}
    assert parse_json('\ufeff{"a": [1, 2.5, null]}') == {"a": [1, 2.5, None]}
    assert parse_literal("{'loss': 0.5, 'b': -1e-06, 'c': None}") == {"loss": 0.5, "b": -1e-06, "c": None}
    assert parse_toml('[a.b]\nc = "d"') == {"a": {"b": {"c": "d"}}}


def test_doubled_keys_cost_linear_time() -> None:
    text = "{" + ",".join(f'"k{i}":1' for i in range(60_000)) + ',"k5":2}'
    twice: list[str] = []
    began = time.process_time()
    assert parse_json(text, twice=twice.append)["k5"] == 2
    assert twice == ["k5"]
    assert time.process_time() - began < 5
