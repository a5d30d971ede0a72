from __future__ import annotations

import json
from pathlib import Path

import pytest

from seatrial.core.errors import UserError
from seatrial.metrics.checks import CheckSyntaxError, parse

EXPRESSIONS: list[dict[str, str]] = json.loads((Path(__file__).parent.parent / "data" / "metrics" / "check_expressions.json").read_text())


def test_every_expression_in_use_is_accepted() -> None:
    # These are no expressions before a shell has expanded them.
    unexpanded = {entry["expr"] for entry in EXPRESSIONS if "${" in entry["expr"]}
    assert len(EXPRESSIONS) == 518
    assert len(unexpanded) == 3
    for expr in {entry["expr"] for entry in EXPRESSIONS} - unexpanded:
        parse(expr)
    for expr in unexpanded:
        with pytest.raises(CheckSyntaxError, match="a shell variable was not expanded"):
            parse(expr)


@pytest.mark.parametrize(
    "expr",
    [
        '__import__("os").getpid() > 0',
        "().__class__ == 1",
        'data.pop("a") < 1',
        'data["a"].values() == 1',
        'data["a"]["1"].real < 1',
        'open("/etc/passwd") == data["a"]["1"]',
        '(lambda: data["a"]["1"])() < 1',
        'eval("1") < data["a"]["1"]',
        'max(*data["a"]) < 1',
        'mean(data["a"], **data["b"]) < 1',
        'mean(data["a"], range_start=data["b"]["1"]) < 1',
        'data["a"]["1"] if 1 else 2 < 3',
        '[data["a"]["1"]] == 1',
        '{"a": 1} == data["a"]["1"]',
        'f"{data}" == data["a"]',
        '(x := data["a"]["1"]) < 1',
        'data["a"]["1"] ** 9 < 1',
        'data["a"]["1"] // 2 < 1',
        'data["a"]["1"] % 2 < 1',
        'data["a"]["1"] @ 2 < 1',
        'data["a"]["1"] << 9 < 1',
        '~data["a"]["1"] < 1',
        'data["a"]["1"] is None',
        'data["a"]["1"] == None',
        "data['a'][b'1'] < 1",
        'data["a"][1:2] < 1',
        'data["a"]["1"]["2"] < 1',
        'data[data["a"]] < 1',
        "data < 1",
        "data[0] < 1",
        'other["a"]["1"] < 1',
        'data["a"]["1"] < nan',
        'data["a"]["1"] < 1e999',
        'data["a"]["1"] < 1j',
        'data["a"]["1"] < "3"',
        '"3" in data',
        '3 in data["a"]',
        '"3" in ["3"]',
        '"3" in data["a"] in data["b"]',
        '"3" in data["a"]["1"]',
        'all(v < 2 for v in data["a"].values())',
        '[v for v in data["a"]] == 1',
        'max({k: v for k, v in data["a"].items()}) < 2',
        "max(1, 2) < 3",
        'max(data["a"]["1"]) < 3',
        "max() < 3",
        'max(data["a"], 3) < 3',
        'abs(data["a"]["1"], 2) < 3',
        'abs() < data["a"]["1"]',
        'ratio_above(data["a"]) < 1',
        'mean(data["a"], 1.5) < 1',
        'mean(data["a"], True) < 1',
        'mean(data["a"], 1, 2, 3) < 1',
        'mean(data["a"], 1, 2, 0.1, 5) < 1',
        'mean(data["a"], ignore_top_p=-0.1) < 1',
        'mean(data["a"], 1, range_start=1) < 1',
        'mean(data["a"], range_start=1, range_start=2) < 1',
        'median(data["a"], ignore_top_p=0.1) < 1',
        'avg(data["a"]) < 1',
        'all_finite(data["a"]) == 1',
        '-all_finite(data["a"])',
        'mean(data["a"])',
        'data["a"]["1"]',
        'data["a"]',
        'mean(data["a"]) < 1 and data["a"]["1"]',
        'not data["a"]["1"]',
        '(data["a"]["1"] < 1) < 2',
        '(data["a"]["1"] < 1) + 1 < 2',
        '(data["a"]["1"] > 99, "oops")',
        "1 < 2",
        'mean(data["a"]) < 1 or 1 < 2',
        "True",
        'max(data["a"]) = 1',
        'max(data["a"] < 1',
        'max(data["a"]) < 1; import os',
        "",
        "  ",
        "\0",
        "-" * 1500 + '1 < data["a"]["1"]',
        "(" * 300 + 'data["a"]["1"]' + ")" * 300 + " < 1",
        "not " * 100 + 'data["a"]["1"] < 1',
        'data["a"]["1"]' + " + 1" * 100 + " < 1",
        'data["a"]["1"] < 1 or ' * 100 + 'data["a"]["1"] < 1',
        'data["a"]["1"] < 1' + "0" * 1900,
        'data["a"]["1"] < 1' + "0" * 5000,
    ],
)
def test_everything_else_is_refused(expr: str) -> None:
    with pytest.raises(CheckSyntaxError):
        parse(expr)


@pytest.mark.parametrize(
    ("expr", "lines"),
    [
        ('mean(data["a"])', ["no comparison: write what the value must be, for example `… < 1.05`", '  mean(data["a"])', "  ^"]),
        ('data["a"][1] < 2', ['a step is written as text in quotes, for example "30"', '  data["a"][1] < 2', "            ^"]),
        ('data["é"]["1"] < foo', ["unknown name 'foo'", '  data["é"]["1"] < foo', "                   ^"]),
        ('maxx(data["a"]) < 1', ["unknown function 'maxx'; did you mean max?", '  maxx(data["a"]) < 1', "  ^"]),
        ('  max(data["a"]) = 1', ["not an expression: invalid syntax", '  max(data["a"]) = 1', "                 ^"]),
        ("len(x) == ${steps}", ["a shell variable was not expanded", "  len(x) == ${steps}", "            ^"]),
    ],
)
def test_the_message_shows_the_place(expr: str, lines: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        parse(expr)
    assert str(caught.value).splitlines()[:3] == lines
    assert caught.value.fix


def test_source_of_a_part() -> None:
    check = parse('max( data["a"] ) < 1')
    assert check.text == 'max( data["a"] ) < 1'
    assert check.source(check.tree.left) == 'max( data["a"] )'  # type: ignore[attr-defined]
