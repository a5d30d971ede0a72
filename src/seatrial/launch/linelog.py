"""The log of a child process: every line stamped, filtered and on disk as soon as it is complete.

- Each line is written as `2026-11-15T03:41:59.123Z text`; the text went through the caller's filter (the redactor).
- Only a newline ends a line: progress bars that use carriage returns are kept as they are.
- Bytes that are not UTF-8 stay visible as `\\xff`; nothing the child wrote is dropped.
- The file is opened for appending; a torn last line of an earlier writer is closed first.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Self

from seatrial.model.errors import BlockedError
from seatrial.model.verdict import Boundary

LineFilter = Callable[[str], str]

STAMP_LENGTH = len("2026-11-15T03:41:59.123Z ")
_MAX_LINE = 4 * 1024 * 1024


def stamp() -> str:
    """The present moment as it stands in front of a log line."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z") + " "


class LineLog:
    """Turns the bytes of a child into stamped and filtered lines of a log file."""

    def __init__(self, path: Path, line_filter: LineFilter) -> None:
        self._path = path
        self._filter = line_filter
        self._pending = bytearray()
        self.last_line = ""
        """The last complete line, filtered, without its stamp."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab+", buffering=0)
            if _is_torn(self._file.fileno()):
                self._file.write(b"\n")
        except OSError as error:
            raise self._blocked(error) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def feed(self, data: bytes) -> None:
        """Take bytes from the child; complete lines are written at once."""
        head, newline, tail = data.rpartition(b"\n")
        if newline:
            self._pending += head
            complete, self._pending = self._pending, bytearray(tail)
            self._write(complete)
        else:
            self._pending += tail
        if len(self._pending) > _MAX_LINE:
            self._spill()

    def note(self, text: str) -> None:
        """Write lines of Seatrial's own, marked as such, after what the child wrote so far."""
        self._flush()
        self._write("\n".join(f"[seatrial] {line}" for line in text.splitlines()).encode())

    def close(self) -> None:
        """Write what the child left without a newline, and close the file."""
        if not self._file.closed:
            try:
                self._flush()
            finally:
                self._file.close()

    def _flush(self) -> None:
        if self._pending:
            complete, self._pending = self._pending, bytearray()
            self._write(complete)

    def _spill(self) -> None:
        """Bound the memory for an endless line; cut at a blank, so that the filter sees every word whole."""
        cut = max(self._pending.rfind(b"\r"), self._pending.rfind(b" ")) + 1 or len(self._pending)
        complete, self._pending = self._pending[:cut], self._pending[cut:]
        self._write(complete)

    def _write(self, complete: bytes | bytearray) -> None:
        lines = [self._filter(line) for line in complete.decode("utf-8", "backslashreplace").split("\n")]
        self.last_line = lines[-1]
        now = stamp()
        data = memoryview("".join(f"{now}{line}\n" for line in lines).encode("utf-8", "backslashreplace"))
        try:
            while data:
                data = data[self._file.write(data) :]
        except OSError as error:
            raise self._blocked(error) from error

    def _blocked(self, error: OSError) -> BlockedError:
        return BlockedError(
            Boundary.ENVIRONMENT,
            f"{self._path}: cannot write the log: {error.strerror or error}",
            "free space, or make the directory writable",
        )


def _is_torn(handle: int) -> bool:
    """Whether the file has content that does not end with a newline."""
    size = os.fstat(handle).st_size
    return size > 0 and os.pread(handle, 1, size - 1) != b"\n"
