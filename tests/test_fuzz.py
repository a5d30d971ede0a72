"""A short run of the fuzzer; `python tests/fuzz.py` makes longer ones."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from cli.command import inside
from fuzz import DATA, fuzz
from seatrial.files import CUT, LINE, MOST_TELLING, PIECE, LeftOut, left_out_of, read_pieces


def test_no_input_ends_in_a_crash_or_a_hang(tmp_path: Path) -> None:
    assert [f"{found.index} {found.target}: {found.what}" for found in fuzz(range(300), 3, tmp_path / "in")] == []


def test_a_failed_stage_with_an_exception_that_has_no_capital(tmp_path: Path) -> None:
    (tmp_path / "run.log").write_text("stage FAIL socketError: bar\n")
    assert inside("judge", "trl", "--log", tmp_path / "run.log").code == 1


def test_a_name_that_is_no_utf8_is_refused(tmp_path: Path) -> None:
    answer = inside("judge", "trl", "--log", f"{tmp_path}/\udcff.log")
    assert (answer.code, "rename" in answer.err) == (2, True)


@pytest.mark.parametrize("damage", [b"", b"SQLite format 3\0" + b"x" * 500, b"not a database at all" * 50])
def test_a_damaged_history_is_an_error_with_its_fix(tmp_path: Path, damage: bytes) -> None:
    (tmp_path / "h.db").write_bytes(damage)
    answer = inside("history", "runs", "--store", tmp_path / "h.db")
    assert (answer.code, "fix:" in answer.err) == (2, True)


def test_long_lines_come_in_pieces_and_keep_their_number(tmp_path: Path) -> None:
    path = tmp_path / "run.log"
    path.write_bytes(b"x" * (PIECE + 1) + b"\nshort\r\n" + b"bar\r" * PIECE + b"\nend")
    found = list(read_pieces(path))
    assert {number for number, _, _ in found} == {1, 2, 3, 4}
    assert (found[0][2][-1], found[1][2]) == (CUT, f"{CUT}x")
    assert "".join(text + "\r" for number, _, text in found if number == 3).count("bar") == PIECE
    assert (found[-1], left_out_of(path)) == ((4, True, "end"), LeftOut())


def test_the_middle_of_an_endless_line_is_left_out_and_said(tmp_path: Path) -> None:
    path = tmp_path / "run.log"
    path.write_bytes(b"first\n" + b"x" * (3 * LINE) + b"last\nend\n")
    found = list(read_pieces(path))
    assert sum(len(text) for _, _, text in found) < LINE + 4 * PIECE
    assert any(text.endswith("last") for number, _, text in found if number == 2)
    assert left_out_of(path) == LeftOut(first=2)
    assert "line 2 is longer than 1 MB" in inside("judge", "verl", "--log", path).out


BAR = b"Map:  10%|###   | 1/9 [00:01<00:01,  1.00s/it]\r"


@pytest.mark.parametrize("word", [b"{'loss': nan, 'grad_norm': 0.5}", b"Traceback (most recent call last):", b"Killed"])
def test_a_telling_word_in_the_middle_of_an_endless_line_is_read(tmp_path: Path, word: bytes) -> None:
    path = tmp_path / "run.log"
    bar = BAR * (2 * LINE // len(BAR))
    path.write_bytes(b"first\n" + bar + word + b"\r" + bar + b"\nend\n")
    found = list(read_pieces(path))
    assert any(word.decode() in text.split("\r") for _, _, text in found)
    assert sum(len(text) for _, _, text in found) < LINE + 5 * PIECE
    assert left_out_of(path) == LeftOut(first=2)


def test_a_telling_word_that_two_pieces_share_is_read(tmp_path: Path) -> None:
    path = tmp_path / "run.log"
    word = b"Traceback (most recent call last):"
    for before in range(LINE + 3 * PIECE - len(word), LINE + 3 * PIECE + len(word), 7):
        path.write_bytes(b"x" * before + word + b"y" * LINE + b"\nend\n")
        assert word.decode() in "".join(text.replace(CUT, "") for _, _, text in read_pieces(path))


def test_too_many_telling_words_in_an_endless_line_are_no_pass(tmp_path: Path) -> None:
    lines = (DATA / "trl").rglob("*.log")
    text = next(path for path in sorted(lines) if inside("judge", "trl", "--log", path).code == 0).read_bytes()
    many = (BAR * 1000 + b"errors: 0\r") * (MOST_TELLING * 2 * PIECE // (1000 * len(BAR)))
    plain = BAR * (3 * LINE // len(BAR))
    for bar, code in ((plain, 0), (many, 99)):
        (tmp_path / "run.log").write_bytes(bar + b"\n" + text)
        answer = inside("judge", "trl", "--log", tmp_path / "run.log")
        assert (answer.code, "line 1 is longer" in answer.out) == (code, True), answer.out


def test_huge_numbers_in_words_of_a_launcher(tmp_path: Path) -> None:
    digits = "9" * 5000
    (tmp_path / "run.log").write_text(f"rc={digits}\nSkipping batch 3 [repeated {digits}x across cluster]\n")
    for loop in ("trl", "verl", "nemo-rl"):
        assert inside("judge", loop, "--log", tmp_path / "run.log").code != 3


@pytest.mark.parametrize("text", [" " * 60_000, "\t" * 60_000, "rc" + " " * 60_000 + "x", "make: *** " * 6000, '  File "' * 7000])
def test_a_line_costs_no_square_of_its_length(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.log").write_text(text + "\n")
    began = time.process_time()
    for loop in ("trl", "verl", "nemo-rl"):
        inside("judge", loop, "--log", tmp_path / "run.log")
    assert time.process_time() - began < 5


def test_a_step_of_two_to_the_31_costs_no_list_of_the_steps_before_it(tmp_path: Path) -> None:
    rows = [f'{{"step": {step}, "train/loss": 0.5, "train/grad_norm": 0.1, "train/reward": 0.2}}' for step in (1, 2, 3, 4, 2**53)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(rows) + "\n")
    (tmp_path / "run.log").write_text("{'train_runtime': 1.0, 'train_loss': 0.5}\n")
    began = time.process_time()
    for loop in ("trl", "verl", "nemo-rl"):
        assert inside("judge", loop, "--log", tmp_path / "run.log", "--metrics", tmp_path / "metrics.jsonl").code in (1, 99)
    assert time.process_time() - began < 5
