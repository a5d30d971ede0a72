"""A short run of the fuzzer; `python -m tests.fuzz` makes longer ones."""

from __future__ import annotations

import math
import re
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from seatrial.core.files import CUT, LINE, MOST_TELLING, PIECE, LeftOut, left_out_of, read_pieces
from seatrial.evidence.lazy_redactor import LazyRedactor
from tests.cli.command import inside
from tests.fuzz import DATA, fuzz


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


SMALL, LARGE = 8_000, 32_000
"""Characters of a line; a longer one is read in pieces."""


def growth(work: Callable[[int], None]) -> float:
    """How often the processor time of the small line the large one costs: 4 where that grows with the length, 16 with its square. The
    least times of a few tries count, since other programs only ever add to them."""
    least = dict.fromkeys((SMALL, LARGE), math.inf)
    for _ in range(5):
        for length in least:
            began = time.process_time()
            work(length)
            least[length] = min(least[length], time.process_time() - began)
        if least[LARGE] < QUADRATIC * least[SMALL]:
            break
    return least[LARGE] / least[SMALL]


QUADRATIC = 9
"""More than linear growth gives, and less than quadratic."""


@pytest.mark.parametrize("text", [" ", "\t", "rc" + " " * 9000, "make: *** ", '  File "'])
def test_a_line_costs_no_square_of_its_length(tmp_path: Path, text: str) -> None:
    def judge(length: int) -> None:
        (tmp_path / "run.log").write_text((text * length)[:length] + "x\n")
        for loop in ("trl", "verl", "nemo-rl"):
            inside("judge", loop, "--log", tmp_path / "run.log")

    judge(100)  # imports
    assert growth(judge) < QUADRATIC


@pytest.mark.parametrize("text", ["x", "x1_", ":__", "://", " ", "a.b", "<a ", "name: ", '"', "\\\\"])
def test_what_the_redactor_reads_costs_no_square_of_its_length(text: str) -> None:
    redactor = LazyRedactor({})
    redactor.tokens("ghp_" + "a1B2" * 9)  # imports

    def read(length: int) -> None:
        for _ in range(4):
            redactor.tokens((text * length)[:length])

    assert growth(read) < QUADRATIC


def test_growth_tells_a_square_from_a_line() -> None:
    pattern = re.compile(" +x")

    def square(length: int) -> None:
        pattern.search(" " * (length // 5))

    def line(length: int) -> None:
        pattern.sub("", "x" * length * 100)

    assert growth(line) < QUADRATIC < growth(square)


def work(run: Callable[[], None]) -> tuple[int, int]:
    """Lines of Seatrial that were executed, each turn of a loop counted, and the bytes that were held at most."""
    count = 0

    def each(frame: FrameType, event: str, _: object) -> Any:
        nonlocal count
        count += event == "line"
        return each if "seatrial" in frame.f_code.co_filename else None

    before = sys.gettrace()
    tracemalloc.start()
    sys.settrace(each)
    try:
        run()
        return count, tracemalloc.get_traced_memory()[1]
    finally:
        sys.settrace(before)
        tracemalloc.stop()


def test_a_huge_step_costs_no_list_of_the_steps_before_it(tmp_path: Path) -> None:
    def judge(last: int) -> None:
        rows = [f'{{"step": {step}, "train/loss": 0.5, "train/grad_norm": 0.1, "train/reward": 0.2}}' for step in (1, 2, 3, 4, last)]
        (tmp_path / "metrics.jsonl").write_text("\n".join(rows) + "\n")
        for loop in ("trl", "verl", "nemo-rl"):
            assert inside("judge", loop, "--log", tmp_path / "run.log", "--metrics", tmp_path / "metrics.jsonl").code in (1, 99)

    (tmp_path / "run.log").write_text("{'train_runtime': 1.0, 'train_loss': 0.5}\n")
    judge(9)  # imports, and what is kept of them
    (lines, held), (more_lines, more_held) = work(lambda: judge(1 << 16)), work(lambda: judge(1 << 20))
    assert more_lines < lines + 10_000
    assert more_held < held + 1_000_000
    judge(2**53)
