"""The log of a child: stamps, filter, carriage returns, bytes that are no text, torn files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from seatrial.core.errors import BlockedError
from seatrial.runtime.process import STAMP_LENGTH, LineLog, stamp

STAMP = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z ")


def write(path: Path, *chunks: bytes) -> list[str]:
    with LineLog(path, lambda line: line) as log:
        for chunk in chunks:
            log.feed(chunk)
    lines = path.read_bytes().decode().split("\n")
    assert lines.pop() == ""
    assert all(STAMP.match(line) for line in lines)
    return [line[STAMP_LENGTH:] for line in lines]


def test_stamp_has_its_fixed_form() -> None:
    assert STAMP.fullmatch(stamp())
    assert len(stamp()) == STAMP_LENGTH


@pytest.mark.parametrize(
    ("chunks", "lines"),
    [
        ((b"a\nb\n",), ["a", "b"]),
        ((b"a", b"b", b"c\nd"), ["abc", "d"]),
        ((b"\n\n",), ["", ""]),
        ((), []),
        ((b"1%\r2%\r", b"3%\n"), ["1%\r2%\r3%"]),
        ((b"dos\r\n",), ["dos\r"]),
        ((b"\xc3", b"\xa4\n"), ["ä"]),
        ((b"\xff\xfe broken\n",), ["\\xff\\xfe broken"]),
        ((b"cut \xe2\x82\nnext\n",), ["cut \\xe2\\x82", "next"]),
        ((b"form\x0cfeed \xe2\x80\xa8 separator\n",), ["form\x0cfeed \u2028 separator"]),
    ],
)
def test_lines(tmp_path: Path, chunks: tuple[bytes, ...], lines: list[str]) -> None:
    assert write(tmp_path / "run.log", *chunks) == lines


def test_filter_sees_whole_lines_however_they_arrive(tmp_path: Path) -> None:
    path = tmp_path / "run.log"
    with LineLog(path, lambda line: line.replace("secret", "***")) as log:
        log.feed(b"token=sec")
        log.feed(b"ret\nlast sec")
        log.feed(b"ret")
        assert log.last_line == "token=***"
    assert "secret" not in path.read_text()
    assert path.read_text().count("***") == 2


def test_a_filter_that_fails_writes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "run.log"

    def fail(line: str) -> str:
        raise ValueError(line)

    log = LineLog(path, fail)
    with pytest.raises(ValueError):
        log.feed(b"secret\n")
    log.close()
    assert path.read_bytes() == b""


def test_endless_line_is_cut_between_words(tmp_path: Path) -> None:
    path = tmp_path / "run.log"
    with LineLog(path, lambda line: line.replace("secret", "***")) as log:
        for _ in range(5):
            log.feed(b"secret " * 150_000)
    text = path.read_text()
    assert "secret" not in text
    assert text.count("*** ") == 750_000
    assert text.count("\n") == 2


def test_appends_and_closes_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "run.log"
    path.write_bytes(b"2026-11-15T03:41:59.123Z to")
    with LineLog(path, lambda line: line) as log:
        log.feed(b"new\n")
    first, second, rest = path.read_text().split("\n")
    assert (first, second[STAMP_LENGTH:], rest) == ("2026-11-15T03:41:59.123Z to", "new", "")


def test_notes_come_after_what_the_child_wrote_and_are_filtered(tmp_path: Path) -> None:
    path = tmp_path / "run.log"
    with LineLog(path, str.upper) as log:
        log.feed(b"partial")
        log.note("one\ntwo")
    assert [line[STAMP_LENGTH:] for line in path.read_text().splitlines()] == ["PARTIAL", "[SEATRIAL] ONE", "[SEATRIAL] TWO"]


def test_a_log_that_cannot_be_opened_blocks(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(BlockedError, match=r"file/run\.log: cannot write the log"):
        LineLog(tmp_path / "file" / "run.log", lambda line: line)


def test_a_full_disk_blocks() -> None:
    log = LineLog(Path("/dev/full"), lambda line: line)
    with pytest.raises(BlockedError, match="No space left"):
        log.feed(b"line\n")
    log.close()
