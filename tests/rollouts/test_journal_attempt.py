"""An attempt's file: one writer, one name, and whole records whatever the disk does."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from seatrial.core.errors import BlockedError, UserError
from seatrial.rollouts.journal.attempts import GROUP_ROWS, Attempt, LeaseHolder, attempt_files
from seatrial.rollouts.rollout_record import Head, check, encode

LINE = encode(Head(unit=1, task="t", repeat=0, seed=1, outcome="ok", reward=1.0), {"text": "x" * 5000})


def numbered(number: int) -> LeaseHolder:
    return LeaseHolder.here().model_copy(update={"number": number})


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    path = tmp_path / "small"
    path.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", path], check=False, capture_output=True)
    if made.returncode:
        pytest.skip("no file system can be mounted here")
    try:
        yield path
    finally:
        subprocess.run(["umount", path], check=True)


@pytest.fixture
def syncs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one with each sync."""
    seen: list[int] = []
    monkeypatch.setattr(os, "fdatasync", seen.append)
    return seen


def test_files_sort_as_winners_do(tmp_path: Path) -> None:
    for number in (10, 2, 10_000):
        Attempt.open(tmp_path, numbered(number)).close()
    (tmp_path / "state-0001-aa.json").touch()
    (tmp_path / "attempt-0001-aa.jsonl.bak").touch()
    assert [file.number for file in attempt_files(tmp_path)] == [2, 10, 10_000]
    assert attempt_files(tmp_path / "none") == []


def test_a_file_is_never_opened_twice(tmp_path: Path) -> None:
    holder = numbered(3)
    with Attempt.open(tmp_path, holder) as attempt:
        attempt.append(LINE)
    assert attempt.path.name == f"attempt-0003-{holder.token}.jsonl"
    with pytest.raises(UserError, match="File exists"):
        Attempt.open(tmp_path, holder)
    with pytest.raises(ValueError, match="number of a lease"):
        Attempt.open(tmp_path, LeaseHolder.here())


def test_a_record_is_in_the_file_when_append_returns(tmp_path: Path) -> None:
    with Attempt.open(tmp_path, numbered(1)) as attempt:
        for count in (1, 2, 3):
            attempt.append(LINE)
            assert attempt.path.read_bytes() == LINE * count


def test_it_is_synced_by_group_and_by_time(tmp_path: Path, syncs: list[int]) -> None:
    now = 0.0
    attempt = Attempt.open(tmp_path, numbered(1), clock=lambda: now)
    for _ in range(2 * GROUP_ROWS + 1):
        attempt.append(LINE)
    assert len(syncs) == 2
    attempt.tick()
    assert len(syncs) == 2
    now = 1.0
    attempt.tick()
    attempt.tick()
    assert len(syncs) == 3
    attempt.close()
    attempt.close()
    assert len(syncs) == 3


def test_closing_syncs_what_is_left(tmp_path: Path, syncs: list[int]) -> None:
    with Attempt.open(tmp_path, numbered(1), clock=lambda: 0.0) as attempt:
        attempt.append(LINE)
    assert len(syncs) == 1


def test_a_full_disk_blocks_and_leaves_whole_records(small_disk: Path) -> None:
    attempt = Attempt.open(small_disk, numbered(1))

    def fill() -> None:
        for _ in range(100):
            attempt.append(LINE)

    with pytest.raises(BlockedError, match="No space left on device") as blocked:
        fill()
    assert "then resume" in blocked.value.fix
    data = attempt.path.read_bytes()
    assert len(data) % len(LINE) == 0
    assert len(data) > 5 * len(LINE)
    check(data[-len(LINE) :])
    with pytest.raises(BlockedError, match="No space left"):  # also when there is room again: this attempt is over
        attempt.append(b"{}\n")
    attempt.close()
    assert attempt.path.read_bytes() == data


def test_short_writes_are_finished_and_half_ones_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attempt = Attempt.open(tmp_path, numbered(1))
    write, left = os.write, [100, 200, len(LINE), 50]

    def short(handle: int, data: bytes) -> int:
        if not left:
            raise OSError(errno.EDQUOT, "Disk quota exceeded")
        return write(handle, data[: left.pop(0)])

    monkeypatch.setattr(os, "write", short)
    attempt.append(LINE)
    assert attempt.path.read_bytes() == LINE
    with pytest.raises(BlockedError, match="quota"):
        attempt.append(LINE)
    assert attempt.path.read_bytes() == LINE


def test_a_failed_sync_ends_the_attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(handle: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    attempt = Attempt.open(tmp_path, numbered(1), clock=lambda: 0.0)
    attempt.append(LINE)
    monkeypatch.setattr(os, "fdatasync", fails)
    with pytest.raises(BlockedError, match="Input/output"):
        attempt.close()
    with pytest.raises(BlockedError, match="Input/output"):
        attempt.append(LINE)
