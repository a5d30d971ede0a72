"""Lines, segments, prefixes and time stamps."""

from __future__ import annotations

from pathlib import Path

import pytest

from seatrial.core.errors import UserError
from seatrial.triage.log import Line, read_log


def lines(tmp_path: Path, data: bytes) -> list[Line]:
    path = tmp_path / "run.log"
    path.write_bytes(data)
    return list(read_log(path))


def test_only_newlines_count(tmp_path: Path) -> None:
    got = lines(tmp_path, "a\x0bb\u2028c\rd\n\nlast".encode())
    assert [(line.number, line.body) for line in got] == [(1, "a\x0bb\u2028c"), (1, "d"), (2, ""), (3, "last")]


def test_progress_segments_keep_their_process(tmp_path: Path) -> None:
    got = lines(tmp_path, b"\x1b[36m(Runner pid=7)\x1b[0m \rload: 0%\rload: 100%\n")
    assert [(line.number, line.process, line.body) for line in got] == [
        (1, "(Runner pid=7)", "load: 0%"),
        (1, "(Runner pid=7)", "load: 100%"),
    ]
    assert got[1].text == "(Runner pid=7) load: 100%"


@pytest.mark.parametrize(
    ("raw", "process", "body"),
    [
        ("2026-11-15T03:41:59.123Z   File x", "", "  File x"),
        ("1794705297 (policy) error: x", "(policy)", "error: x"),
        ("(pid=12, ip=192.0.2.10) x", "(pid=12, ip=192.0.2.10)", "x"),
        ("(Worker_TP0 pid=12)", "(Worker_TP0 pid=12)", ""),
        ("(PolicyWorker[rank=0] pid=12) x", "(PolicyWorker[rank=0] pid=12)", "x"),
        ("2026-11-15T03:41:59.123Z [mcore 1step] (Actor pid=1)   File x", "(Actor pid=1)", "  File x"),
        ("[mcore 1step] Traceback", "", "Traceback"),
        ("[one step] x", "", "[one step] x"),
        ("[rank1]:   File x", "[rank1]:", "  File x"),
        ("(Actor pid=1) [rank0]: x", "(Actor pid=1) [rank0]:", "x"),
        (" 3: [rank3]: x", "", " 3: [rank3]: x"),
        ("3: [rank3]: x", "3: [rank3]:", "x"),
        ("(1) a `tokenizers` file", "", "(1) a `tokenizers` file"),
        ("\x1b[31mred\x1b[0m \x1b]0;title\x07x", "", "red x"),
        ("crlf\r", "", "crlf"),
    ],
)
def test_prefixes(raw: str, process: str, body: str, tmp_path: Path) -> None:
    (line,) = lines(tmp_path, raw.encode() + b"\n")
    assert (line.process, line.body) == (process, body)


def test_undecodable_bytes_stay_visible(tmp_path: Path) -> None:
    (line,) = lines(tmp_path, b"loss \xff\xfe nan\n")
    assert line.body == r"loss \xff\xfe nan"


def test_between_and_empty(tmp_path: Path) -> None:
    assert lines(tmp_path, b"") == []
    path = tmp_path / "run.log"
    path.write_text("a\nb\nc\nd\n")
    assert [line.body for line in read_log(path).between(2, 3)] == ["b", "c"]


def test_missing_log_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"absent\.log: cannot read"):
        read_log(tmp_path / "absent.log")
    with pytest.raises(UserError, match="cannot read"):
        read_log(tmp_path)
