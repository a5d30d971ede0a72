"""The second pass of a merge: copies the winning records, in unit order, into one file, and hashes it on the way.

- Records are fetched in windows of units: within a window file by file, each read forwards, so that one file is open at a time and
  nothing jumps across hundreds of them. Memory is two windows, whatever the size of the campaign: one is read while one is written.
- What is written is checked once more, record by record: a journal that changed or decayed since it was scanned is never merged.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from seatrial.files import write_error
from seatrial.model.errors import BlockedError
from seatrial.model.verdict import Boundary
from seatrial.rollouts.merge.index import Index
from seatrial.rollouts.merge.result import Written
from seatrial.rollouts.record import TornError, check, unit_of

_WINDOW = 16 << 20
_PIECE = 1 << 20
"""Hashed and written at a time: what was hashed is then still in the processor's cache."""


def copy_winners(index: Index, units: Iterable[int], path: Path, tick: Callable[[], None]) -> Written:
    """Write the records of `units` to a new file and sync it; `tick` is called now and then."""
    rows = size = 0
    try:
        with path.open("xb", buffering=0) as stream, ThreadPoolExecutor(max_workers=1) as beside:
            sink = _Sink(stream.fileno())
            buffers, put = (bytearray(_WINDOW), bytearray(_WINDOW)), None
            for window, length in _windows(index, units):
                tick()
                # A record that is larger than a window gets a buffer of its own.
                buffer = buffers[0] if length <= _WINDOW else bytearray(length)
                data = memoryview(buffer)[:length]
                _fetch(index, window, data)
                if put is not None:
                    put.result()
                put, buffers = beside.submit(sink.put, data), buffers[::-1]
                rows, size = rows + len(window), size + length
            if put is not None:
                put.result()
            os.fsync(stream.fileno())
    except OSError as error:
        raise write_error(path, error) from error
    return Written(rows=rows, bytes=size, sha256=sink.digest.hexdigest())


class _Sink:
    """Hashes and writes a window while the next one is read."""

    def __init__(self, handle: int) -> None:
        self._handle = handle
        self.digest = hashlib.sha256()

    def put(self, data: memoryview) -> None:
        for start in range(0, len(data), _PIECE):
            piece = data[start : start + _PIECE]
            self.digest.update(piece)
            while piece:
                piece = piece[os.write(self._handle, piece) :]


def _windows(index: Index, units: Iterable[int]) -> Iterator[tuple[dict[int, int], int]]:
    """Units with where each one's record goes in the window, and the size of all. Only a record that is larger makes a larger one."""
    starts: dict[int, int] = {}
    size = 0
    for unit in units:
        length = index.length[unit]
        if starts and size + length > _WINDOW:
            yield starts, size
            starts, size = {}, 0
        starts[unit] = size
        size += length
    if starts:
        yield starts, size


def _fetch(index: Index, starts: dict[int, int], data: memoryview) -> None:
    """Read the records of some units to their places."""
    file, opened, handle = 0, -1, -1
    try:
        for unit in sorted(starts, key=index.where.__getitem__):
            file, offset = index.place_of(unit)
            if file != opened:
                if handle >= 0:
                    os.close(handle)
                handle, opened = os.open(index.files[file], os.O_RDONLY | os.O_CLOEXEC), file
            line = data[starts[unit] : starts[unit] + index.length[unit]]
            if os.preadv(handle, [line], offset) < len(line):
                raise _changed(index.files[file], "it is shorter")
            _check(line, unit, index.files[file])
    except OSError as error:
        raise _changed(index.files[file], error.strerror or str(error)) from error
    finally:
        if handle >= 0:
            os.close(handle)


def _check(line: memoryview, unit: int, path: Path) -> None:
    try:
        check(line)
        if unit_of(line) != unit:
            raise _changed(path, "another unit stands there")
    except TornError as error:
        raise _changed(path, f"{error}") from error


def _changed(path: Path, why: str) -> BlockedError:
    return BlockedError(Boundary.ENVIRONMENT, f"{path}: not what was read a moment ago: {why}", "merge again; if it stays, check the disk")
