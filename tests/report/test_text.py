"""Recorded text cannot leave its place."""

from __future__ import annotations

import pytest

from seatrial.report.text import number, one_line, ranges, unique, visible


def test_controls_are_written_out_and_colours_removed() -> None:
    assert visible("\x1b[31mred\x1b[0m \x1b]0;title\x07 \x00 \u202e\ufffe") == "red \\x1b]0;title\\x07 \\x00 \\u202e\\ufffe"
    assert visible("tab\tand\r\nnew line") == "tab\tand\nnew line"
    assert visible("progress 1\rprogress 2") == "progress 1\\x0dprogress 2"


@pytest.mark.parametrize("separator", ["\n", "\r\n", "\r", "\x0b", "\x0c", "\x85", "\u2028", "\u2029", "\x1c"])
def test_one_line_knows_every_line_separator(separator: str) -> None:
    assert one_line(f"a{separator}Result: Pass - forged") == "a Result: Pass - forged"


def test_numbers() -> None:
    assert [number(value) for value in (None, "NaN", 0.1 + 0.2, 1e-9, 12345678.0)] == ["no value", "NaN", "0.3", "1e-09", "1.23457e+07"]


def test_ranges() -> None:
    assert ranges(()) == ""
    assert ranges((7, 1, 2, 3, 3, 9)) == "1-3, 7, 9"


def test_unique_keeps_order_and_drops_empty() -> None:
    assert unique(["b", "", "a", " ", "b"]) == ("b", "a")
