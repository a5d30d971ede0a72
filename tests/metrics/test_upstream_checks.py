"""Every expression of NeMo-RL's own scripts, against what upstream's checker says about it on made metrics."""

from __future__ import annotations

import gzip
import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from seatrial.core.series import Metrics, Series
from seatrial.metrics.checks import CheckSyntaxError, evaluate, parse
from tests.metrics.upstream_cases import SHAPES, cases

ROOT = Path(__file__).parent.parent
STORED: dict[str, Any] = json.loads(gzip.decompress((ROOT / "data" / "metrics" / "upstream_verdicts.json.gz").read_bytes()))
EDGES: dict[str, Any] = json.loads((ROOT / "data" / "metrics" / "check_metrics_cases.json").read_text())
PAGE = (ROOT.parent / "docs" / "checks-upstream.md").read_text()
HIDDEN = ("NaN first", "NaN in the middle", "NaN last", "all NaN", "one infinity", "one minus infinity", "no points")
"""Shapes in which upstream may say Pass although there is no finite point where one is asked for."""


def metrics_of(data: dict[str, Any]) -> Metrics:
    series = {}
    for tag, table in data.items():
        if isinstance(table, dict):
            steps = sorted(map(int, table))
            series[tag] = Series(tag, tuple(steps), tuple(table[str(step)] for step in steps))
    return Metrics(series=series, scalars={tag: value for tag, value in data.items() if tag not in series})


def disagreements() -> Iterator[tuple[str, str, bool]]:
    """Shape, expression and upstream's verdict, where ours is another one."""
    for expr, stored in STORED["verdicts"].items():
        for (name, data), letter in zip(cases(expr), stored, strict=True):
            if evaluate(expr, metrics_of(data)).passed is not (letter == "P"):
                yield name.rpartition(", ")[2], expr, letter == "P"


@pytest.fixture(scope="module")
def found() -> list[tuple[str, str, bool]]:
    return list(disagreements())


def rows(heading: str) -> list[list[str]]:
    """The cells of the table below a heading of the page."""
    body = PAGE.split(f"## {heading}\n")[1].split("\n## ")[0]
    table = [line for line in body.split("\n") if line.startswith("|")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in table[2:]]


def test_every_expression_of_the_scripts_parses() -> None:
    assert (STORED["scripts"], STORED["expressions"], len(STORED["verdicts"])) == (305, 877, 341)
    for expr in STORED["verdicts"]:
        assert "$" not in expr
        parse(expr)


def test_the_made_metrics_could_show_a_difference() -> None:
    """Every expression is both met and missed by metrics without NaN, or the comparison would be idle."""
    plain = [shape for shape in SHAPES if shape not in HIDDEN]
    idle = []
    for expr, stored in STORED["verdicts"].items():
        said = {
            letter
            for (name, _), letter in zip(cases(expr), stored, strict=True)
            if name.rpartition(", ")[2] in (*plain, "single values", "single texts")
        }
        idle += [expr] if said != {"P", "F"} else []
    assert idle == []


def test_verdicts_are_upstreams_but_where_it_hides_what_is_not_finite(found: list[tuple[str, str, bool]]) -> None:
    for shape, expr, upstream in found:
        assert upstream, f"ours passes and upstream's does not: {expr} ({shape})"
        assert shape in HIDDEN, f"{expr} ({shape})"


def test_the_page_counts_what_was_found(found: list[tuple[str, str, bool]]) -> None:
    counts = Counter(shape for shape, _, _ in found)
    verdicts = sum(map(len, STORED["verdicts"].values()))
    for words in (f"{verdicts:,} verdicts", f"{sum(counts.values())} differ", str(STORED["commit"])):
        assert words in PAGE
    assert {row[0]: int(row[1]) for row in rows("Where verdicts on the scripts' own expressions differ")} == counts


def test_the_page_says_what_both_checkers_say_about_edges() -> None:
    edges = {entry["expr"]: entry["passed"] for entry in EDGES["cases"]}
    listed = rows("Where the languages differ")
    assert len(listed) > 8
    for expr, upstream, ours, _ in listed:
        text = expr.strip("`").replace("\\|", "|")
        assert upstream == ("Pass" if edges[text] else "Fail"), text
        try:
            said = "Pass" if evaluate(text, metrics_of(EDGES["data"])).passed else "Miss"
        except CheckSyntaxError:
            said = "refused"
        assert ours == said, text
