"""Assertions that a loop's own scripts make about the run of a level."""

from __future__ import annotations

import pytest

from seatrial.core.specs import CheckSpec
from seatrial.core.verdict import Verdict
from tests.trial.conftest import Bench, result
from tests.trial.fake import FakeLoop


@pytest.mark.parametrize(
    ("expr", "verdict", "words"),
    [
        ('max(data["train/loss"]) > 0.5', Verdict.PASS, "the script asserts it"),
        ('data["train/loss"]["1"] > 0.5', Verdict.PASS, "fragile: it rests on a single step"),
        ('max(data["train/loss"]) > 1000', Verdict.FAIL, "it stands for: the script asserts it"),
        ('all(v > 0 for v in data["train/loss"].values())', Verdict.FAIL, "comprehensions are not supported"),
    ],
)
def test_they_count_and_one_that_cannot_be_read_is_missed(bench: Bench, expr: str, verdict: Verdict, words: str) -> None:
    spec = CheckSpec(expr=expr, why="the script asserts it")
    bench.monkeypatch.setattr(FakeLoop, "own_checks", lambda *_: (spec,))
    level = result(bench.start(0), 0)
    check = next(check for check in level.checks if check.name == expr)
    assert level.verdict is verdict, level.reason
    assert words in check.message
    assert check.passed is (verdict is Verdict.PASS)
