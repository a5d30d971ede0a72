"""Facts: kept in order, and never silently lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from seatrial.checks.probe_facts import Facts, read_facts
from seatrial.instruments import facts as probe


def test_what_the_probe_writes_is_read(tmp_path: Path) -> None:
    path = tmp_path / "facts.jsonl"
    probe.append(path, {"fact": "a", "x": 1, "name": "größe"})
    probe.append(path, {"fact": "b", "x": float("nan"), "deep": [float("inf")]})
    found = read_facts(path)
    assert found == Facts(({"fact": "a", "x": 1, "name": "größe"}, {"fact": "b", "x": "NaN", "deep": ["Infinity"]}))


def test_an_absent_file_has_no_facts(tmp_path: Path) -> None:
    assert read_facts(tmp_path / "none") == Facts(())


@pytest.mark.parametrize("row", ['{"fact": "a", "x', "[1]", '{"x": 1}', '{"fact": 1}', "null", "torn"])
def test_a_row_that_is_no_fact_is_damage(tmp_path: Path, row: str) -> None:
    path = tmp_path / "facts.jsonl"
    path.write_text(f'{{"fact": "a"}}\n{row}\n{{"fact": "b"}}\n')
    found = read_facts(path)
    assert [item["fact"] for item in found.rows] == ["a", "b"]
    assert (found.damage[0].where, found.damage[0].count) == ("line 2", 1)


def test_one_means_exactly_one() -> None:
    found = Facts(({"fact": "s", "when": "start"}, {"fact": "s", "when": "end"}, {"fact": "s", "when": "end"}))
    assert found.one("s", when="start") == {"fact": "s", "when": "start"}
    assert found.one("s", when="end") is None
    assert found.one("s", when="never") is None
    assert len(found.of("s")) == 3
    assert found.of("s", other=1) == []
