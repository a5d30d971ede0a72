"""Atomic writes and strict reads."""

from __future__ import annotations

import errno
import json
import math
import os
import threading
from pathlib import Path
from typing import NoReturn

import pytest

from seatrial.core import files
from seatrial.core.errors import BlockedError, UserError
from seatrial.core.records import CheckResult, Record


class Said(Record):
    said: str = ""
    seconds: float = 0.0


def test_a_file_is_written_whole_with_its_directory(tmp_path: Path) -> None:
    target = tmp_path / "new" / "place" / "größe.txt"
    files.write_text(target, "eins\nzwei ü\n")
    assert target.read_text(encoding="utf-8") == "eins\nzwei ü\n"
    assert target.stat().st_mode & 0o777 == 0o644
    assert [p.name for p in target.parent.iterdir()] == ["größe.txt"]


@pytest.mark.parametrize("function", ["fsync", "fdopen"])
@pytest.mark.parametrize(("number", "kind"), [(errno.ENOSPC, BlockedError), (errno.EDQUOT, BlockedError), (errno.EROFS, UserError)])
def test_a_write_that_fails_keeps_the_old_content_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str, number: int, kind: type[UserError | BlockedError]
) -> None:
    def refuse(*_: object) -> NoReturn:
        raise OSError(number, os.strerror(number))

    target = tmp_path / "trial.json"
    files.write_text(target, "old")
    monkeypatch.setattr(os, function, refuse)
    with pytest.raises(kind, match=rf"trial\.json: cannot write: {os.strerror(number)}"):
        files.write_text(target, "new")
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def test_a_rename_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()  # a directory stands where the file is to go
    (tmp_path / "a" / "b").touch()
    with pytest.raises(UserError, match="cannot write"):
        files.write_text(tmp_path / "a", "x")
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_an_interruption_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_: int) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        files.write_text(tmp_path / "a", "x")
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"file/sub/x\.json"):
        files.write_json(tmp_path / "file" / "sub" / "x.json", {})


def test_a_directory_that_cannot_be_synced_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = os.fsync, 0

    def second_fails(handle: int) -> None:
        nonlocal calls
        calls += 1
        if calls > 1:
            raise OSError(errno.EINVAL, "Invalid argument")
        real(handle)

    monkeypatch.setattr(os, "fsync", second_fails)
    files.write_text(tmp_path / "a", "x")
    assert (tmp_path / "a").read_text() == "x"


def test_a_reader_never_sees_half_a_file(tmp_path: Path) -> None:
    target = tmp_path / "a"
    contents = ("a" * 100_000, "b" * 100_000)
    files.write_text(target, contents[0])
    done = threading.Event()

    def write() -> None:
        for index in range(40):
            files.write_text(target, contents[index % 2])
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    seen = set()
    while not done.is_set():
        seen.add(target.read_text())
    writer.join()
    assert seen <= set(contents)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_json_refuses_what_is_not_finite(tmp_path: Path, value: float) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        files.write_json(tmp_path / "a.json", {"deep": [value]})
    assert list(tmp_path.iterdir()) == []
    marked = files.number_to_json(value)
    assert isinstance(marked, str)
    assert float(marked.replace("Infinity", "inf")) == pytest.approx(value, nan_ok=True)


@pytest.mark.parametrize("text", ["Infinity", "-inf", " nan "])
def test_a_stored_number_that_is_not_finite_is_refused_also_as_text(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.json").write_text(json.dumps({"said": text}))
    assert files.read_model(tmp_path / "x.json", Said).said == text
    (tmp_path / "x.json").write_text(json.dumps({"seconds": text}))
    with pytest.raises(UserError, match=r"x\.json: .*not finite"):
        files.read_model(tmp_path / "x.json", Said)


def test_finite_numbers_keep_every_bit() -> None:
    assert files.number_to_json(0.1 + 0.2) == 0.1 + 0.2


def test_torn_json_names_file_line_and_column(tmp_path: Path) -> None:
    path = tmp_path / "trial.json"
    path.write_text('{\n  "a": 1,\n  "b": ')
    with pytest.raises(UserError, match=r"trial\.json:3:8: not valid JSON") as caught:
        files.read_json(path)
    assert "torn" in caught.value.fix


def test_an_absent_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none\.json: cannot read: No such file"):
        files.read_json(tmp_path / "none.json")


def test_a_record_of_another_version_names_file_and_key(tmp_path: Path) -> None:
    path = tmp_path / "check.json"
    files.write_json(path, {"name": "a", "passed": True, "colour": "red"})
    with pytest.raises(UserError, match=r"check\.json: colour: Extra inputs"):
        files.read_model(path, CheckResult)
    files.write_json(path, CheckResult(name="a", passed=True, value="NaN"))
    assert files.read_model(path, CheckResult).value == "NaN"


def test_bytes_that_are_no_text_stay_visible(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"a\xffb")
    assert files.read_text(path) == "a\\xffb"


def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    (tmp_path / "null").symlink_to(os.devnull)
    for name, kind in (("pipe", "a named pipe"), ("zero", "a device")):
        for read in (files.read_text, lambda path: list(files.read_pieces(path)), lambda path: list(files.read_rows(path))):
            with pytest.raises(UserError, match=f"{name}: cannot read: is {kind}, not a file"):
                read(tmp_path / name)
    assert files.read_text(tmp_path / "null") == ""


def test_a_pipe_of_the_shell_is_read_once(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    with os.fdopen(writing, "wb") as stream:
        stream.write(b"a\r\nb")
    try:
        assert files.read_text(Path(f"/dev/fd/{reading}")) == "a\nb"
    finally:
        os.close(reading)


def test_a_device_is_written_to_and_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "full").symlink_to("/dev/full")
    with pytest.raises(BlockedError, match="No space left"):
        files.write_text(tmp_path / "full", "x")
    assert (tmp_path / "full").is_char_device()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="pipe: cannot write"):  # nobody reads
        files.write_text(tmp_path / "pipe", "x")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    try:
        files.write_text(tmp_path / "pipe", "x")
        assert os.read(reader, 9) == b"x"
    finally:
        os.close(reader)
    assert (tmp_path / "pipe").is_fifo()
