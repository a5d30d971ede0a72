"""The caret of a refused check stands where the problem is."""

from __future__ import annotations

import pytest

from seatrial.metrics.checks import CheckSyntaxError, parse


@pytest.mark.parametrize(
    ("text", "column"),
    [
        ('max(data["a"]) <', 16),
        ('max(data["a"].__class__) < 1', 14),
        ('max(data["a"]) = 1', 15),
        ("äöü < 1", 0),
    ],
)
def test_column(text: str, column: int) -> None:
    with pytest.raises(CheckSyntaxError) as caught:
        parse(text)
    shown = [line for line in str(caught.value).split("\n") if line.strip() == "^"]
    assert shown == ["  " + " " * column + "^"]
