"""Recorded text cannot leave its place."""

from __future__ import annotations

import pytest

from seatrial.core.text import failure_identity, number, one_line, ranges, unique, visible


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


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("differs by 5.0e-03 of 4.2e+00", "differs by -2 of 0.1"),
        ("<Mock id='139'> at 0x7f3a", "<Mock id='4'> at 0x11"),
        ("from /tmp/a/own after 4 attempts", "from ../b/c after 12 attempts"),
        ("(/a/b.py:12) took 1.5s.", "(/c/d.py:9) took 20s."),
        ("13/26 equal, pytest-3", "2/26 equal, pytest-11"),
        (
            "(Worker pid=28) ERROR:2026-11-17 20:39:49,512: uid=3c2aeb0d-222f-43c2-980c-f769bab3b52a",
            "(Worker pid=912) ERROR:2026-11-17 20:42:15,520: uid=b600f46b-b3f0-4a67-b44a-4dcffd1bae07",
        ),
        ("actor_id: 3fea615ef5304710a94f", "actor_id: ab5304710a94f05d8010"),
    ],
)
def test_what_two_runs_differ_in_is_gone(one: str, other: str) -> None:
    assert failure_identity(one) == failure_identity(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("model.layers.1.mlp.weight", "model.layers.0.mlp.weight"),
        ("linear_fc1", "linear_fc2"),
        ("tests/a.py: x", "tests/b.py: x"),
        ("differs by NaN", "differs by 1.0"),
        ("in float32", "in float16"),
        ("deadbeef", "facade"),
        ("conv1d_bias", "conv2d_bias"),
        ("KeyError: 'tmp_weights'", "KeyError: 'tmp_buffers'"),
        ("expected ' a b', got 'a b'", "expected ' a b', got 'a  b'"),
    ],
)
def test_names_stay_with_their_digits(one: str, other: str) -> None:
    assert failure_identity(one) != failure_identity(other)
