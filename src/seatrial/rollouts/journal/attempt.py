"""One attempt's own file of a shard: `attempt-NNNN-<token>.jsonl`, written by nobody else and never opened for writing again.

- A record is one write; every GROUP_ROWS records or GROUP_S seconds the file is synced to disk. A kill loses nothing that was
  appended; a lost node loses at most the last group, which is then owed again.
- A write that fails (full disk, quota) is taken back, so that the file ends in a whole record, and the attempt takes no more.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from seatrial.files import sync_directory, write_error
from seatrial.model.errors import BlockedError
from seatrial.model.verdict import Boundary
from seatrial.rollouts.journal.holder import Holder

GROUP_ROWS = 100
GROUP_S = 1.0

_NAME = re.compile(r"attempt-(\d{4,})-([0-9a-f]+)\.jsonl")


@dataclass(frozen=True, slots=True, order=True)
class AttemptFile:
    """A file of a shard; they sort as winners do: the lowest number first."""

    number: int
    token: str
    path: Path


def attempt_files(shard_dir: Path) -> list[AttemptFile]:
    """The attempts of a shard, in order; none when it has no directory yet."""
    try:
        names = [path.name for path in shard_dir.iterdir()]
    except FileNotFoundError:
        return []
    return sorted(AttemptFile(int(match[1]), match[2], shard_dir / match[0]) for name in names if (match := _NAME.fullmatch(name)))


class Attempt:
    """Appends records. Made by `open`, with the number that a lease gave."""

    def __init__(self, path: Path, handle: int, clock: Callable[[], float]) -> None:
        self.path = path
        self._handle = handle
        self._clock = clock
        self._size = 0
        self._unsynced = 0
        self._synced = clock()
        self._broken: BlockedError | None = None

    @classmethod
    def open(cls, shard_dir: Path, holder: Holder, *, clock: Callable[[], float] = time.monotonic) -> Self:
        """A new file, named after `lease.holder`: the number that fences others off is the one that orders winners."""
        if not holder.number:
            raise ValueError("an attempt needs the number of a lease: pass lease.holder")
        path = shard_dir / f"attempt-{holder.label}.jsonl"
        try:
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise write_error(path, error) from error
        sync_directory(shard_dir)
        return cls(path, handle, clock)

    def append(self, line: bytes) -> None:
        """Write one record (see `record.encode`); a BlockedError when the disk does not take it."""
        if self._broken:
            raise self._broken
        try:
            written = os.write(self._handle, line)
            while written < len(line):
                written += os.write(self._handle, line[written:])
        except OSError as error:
            raise self._take_back(error) from error
        self._size += written
        self._unsynced += 1
        if self._unsynced >= GROUP_ROWS:
            self._sync()
        else:
            self.tick()

    def tick(self) -> None:
        """Sync what has waited for GROUP_S; call it now and then when no records come."""
        if self._unsynced and self._clock() - self._synced >= GROUP_S:
            self._sync()

    def close(self) -> None:
        """Sync and close; twice is once."""
        if self._handle < 0:
            return
        try:
            if self._unsynced and not self._broken:
                self._sync()
        finally:
            os.close(self._handle)
            self._handle = -1

    def _sync(self) -> None:
        try:
            os.fdatasync(self._handle)
        except OSError as error:
            # What the kernel has dropped cannot be told from what it kept: nothing more goes into this file.
            self._broken = self._blocked(error)
            raise self._broken from error
        self._unsynced = 0
        self._synced = self._clock()

    def _take_back(self, error: OSError) -> BlockedError:
        self._broken = self._blocked(error)
        try:
            os.ftruncate(self._handle, self._size)
        except OSError:
            pass  # then the last record is torn, and nothing will follow it: it is owed again
        return self._broken

    def _blocked(self, error: OSError) -> BlockedError:
        message = f"{self.path}: cannot write: {error.strerror or error}"
        return BlockedError(Boundary.ENVIRONMENT, message, f"free space on the disk of {self.path.parent}, then resume")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
