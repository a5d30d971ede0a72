"""Journals of JSON lines: one process appends, others read while it writes, and a kill costs the last line at most.

- A line is in the file when `append` returns, and on the disk after every `rows` lines or `seconds`, and when the journal is closed.
- A write that fails is taken back, so that the file ends in a whole line; the journal then takes no more.
- A last line without its newline counts if it is a whole object, since no beginning of an object is one. Else it is torn.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from seatrial.core.errors import BlockedError
from seatrial.core.files import read_rows, sync_directory, write_error
from seatrial.core.guarded import BadValue, parse_json, read_file
from seatrial.core.verdict import Boundary


class Journal:
    """Appends lines. With `new` the file must not be there yet; else what a kill left of its last line goes first."""

    def __init__(
        self, path: Path, *, new: bool = False, rows: int = 1, seconds: float = 0.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.path = path
        self._rows, self._seconds, self._clock = rows, seconds, clock
        self._unsynced = 0
        self._synced = clock()
        self._broken: BlockedError | None = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            made = not path.exists()
            self._handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | (os.O_EXCL if new else 0), 0o644)
            self._size = 0 if made else self._end_last_line()
        except OSError as error:
            raise write_error(path, error) from error
        if made:
            sync_directory(path.parent)

    def append(self, line: bytes) -> None:
        """Write one line, with its newline; a BlockedError when the disk does not take it."""
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
        if self._unsynced >= self._rows:
            self._sync()
        else:
            self.tick()

    def tick(self) -> None:
        """Sync what has waited long enough; call it now and then when no lines come."""
        if self._unsynced and self._clock() - self._synced >= self._seconds:
            self._sync()

    def close(self) -> None:
        """Sync and close. Idempotent."""
        if self._handle < 0:
            return
        try:
            if self._unsynced and not self._broken:
                self._sync()
        finally:
            os.close(self._handle)
            self._handle = -1

    def _end_last_line(self) -> int:
        """Make the file end at the end of a line: a whole row gets its newline, half a row goes. Returns its size."""
        data = read_file(self.path)
        last = data.rpartition(b"\n")[2]
        if not last:
            return len(data)
        if _is_object(last):
            return len(data) + os.write(self._handle, b"\n")
        os.truncate(self._handle, len(data) - len(last))
        return len(data) - len(last)

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
            pass  # then the last line is torn, and nothing will follow it
        return self._broken

    def _blocked(self, error: OSError) -> BlockedError:
        message = f"{self.path}: cannot write: {error.strerror or error}"
        return BlockedError(Boundary.ENVIRONMENT, message, f"free space on the disk of {self.path.parent}, then resume")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def append_row(path: Path, row: Mapping[str, Any]) -> None:
    """Add a row to a journal; when this returns it is on the disk."""
    with Journal(path) as journal:
        journal.append(json.dumps(row, allow_nan=False).encode("ascii") + b"\n")


class JournalLine(NamedTuple):
    """One line."""

    number: int
    """Counts from 1."""
    text: str
    ended: bool
    """It has its newline, as all lines but the last one do."""

    @property
    def torn(self) -> bool:
        """It is the last one, and a kill cut it off: it counts for nothing."""
        return not self.ended and not _is_object(self.text)


def read_journal(path: Path) -> Iterator[JournalLine]:
    """The lines of a journal; a UserError when it cannot be read."""
    for number, text, ended in read_rows(path):
        yield JournalLine(number, text.removesuffix("\n"), ended)


def _is_object(line: str | bytes) -> bool:
    try:
        return isinstance(parse_json(line), dict)
    except BadValue:
        return False
