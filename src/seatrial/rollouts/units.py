"""The units of a campaign: unit = row x repetition, numbered 0..N-1, without keeping a row in memory.

- Rows are numbered in the order of `inputs.jsonl`, dataset after dataset; the units of a row follow each other, in the order of the
  dataset's labels. So everything but the row itself is arithmetic over the manifest.
- Memory: eight bytes per row (where it starts), and the last few rows that were read.
- The seed of a unit comes from the campaign's seed, the row's id and the repetition: a retry, another shard count or another order
  of rows asks for the same. -1 stands for "send none" (seed_rule = "none").
"""

from __future__ import annotations

import hashlib
import os
from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from types import TracebackType
from typing import Self

import orjson

from seatrial.model.errors import UserError
from seatrial.model.guarded import open_file, read_file
from seatrial.rollouts.manifest import Manifest
from seatrial.rollouts.place import Place
from seatrial.rollouts.work import Row, Unit

NO_SEED = -1
_KEPT = 32
_BEFORE_ID = b'{"id":"'
_ID_WITHIN = 64


def derive_seed(seed: int, task: str, repeat: int) -> int:
    """31 bits: every server takes them."""
    digest = hashlib.sha256(f"{seed}:{task}:{repeat}".encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1


class Units:
    """Units and rows of a campaign directory; use it as a context manager."""

    def __init__(self, place: Place, manifest: Manifest) -> None:
        self.total = manifest.units
        self.rows = manifest.rows
        self._shards = manifest.shards
        self._by_rows = manifest.deal == "rows"
        self._names = [file.dataset for file in manifest.files]
        self._labels = [manifest.repeats[name] for name in self._names]
        counts = [file.rows for file in manifest.files]
        self._row_starts = list(accumulate(counts, initial=0))
        self._unit_starts = list(accumulate((rows * len(labels) for rows, labels in zip(counts, self._labels, strict=True)), initial=0))
        work = manifest.identity["work"]
        self._seed: int = work["seed"]
        self._rule: str = work["seed_rule"]
        self._path = place.inputs
        self._offsets = _read_index(place, manifest)
        self._recent: OrderedDict[int, Row] = OrderedDict()
        self._handle = _opened(place.inputs)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the inputs."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def of_shard(self, shard: int) -> Iterator[int]:
        """The units of a shard, in order."""
        if not 0 <= shard < self._shards:
            raise IndexError(f"shard {shard} of {self._shards}")
        if not self._by_rows:
            yield from range(shard, self.total, self._shards)
            return
        for row in range(shard, self.rows, self._shards):
            yield from self.units_of_row(row)

    def shard_of(self, number: int) -> int:
        """The shard that a unit belongs to."""
        return (self.row_of(number) if self._by_rows else self._known(number)) % self._shards

    def row_of(self, number: int) -> int:
        """The row of a unit."""
        part = self._part_of_unit(number)
        return self._row_starts[part] + (number - self._unit_starts[part]) // len(self._labels[part])

    def repeat_of(self, number: int) -> int:
        """The label of a unit's repetition."""
        part = self._part_of_unit(number)
        labels = self._labels[part]
        return labels[(number - self._unit_starts[part]) % len(labels)]

    def seed_of(self, number: int) -> int:
        """The seed to ask with, or NO_SEED."""
        return self._seed_for(self.task_of(self.row_of(number)), self.repeat_of(number))

    def units_of_row(self, index: int) -> range:
        """The units of a row."""
        part = self._part_of_row(index)
        width = len(self._labels[part])
        first = self._unit_starts[part] + (index - self._row_starts[part]) * width
        return range(first, first + width)

    def spans(self) -> Iterator[tuple[int, int]]:
        """The units of each row, in order: the first, and the one behind the last."""
        for part, labels in enumerate(self._labels):
            width = len(labels)
            for first in range(self._unit_starts[part], self._unit_starts[part + 1], width):
                yield first, first + width

    def dataset_of(self, index: int) -> str:
        """The dataset of a row, which is not read for it."""
        return self._names[self._part_of_row(index)]

    def unit(self, number: int) -> Unit:
        """A unit with its row."""
        row, repeat = self.row(self.row_of(number)), self.repeat_of(number)
        return Unit(number=number, row=row, repeat=repeat, seed=self._seed_for(row.id, repeat))

    def task_of(self, index: int) -> str:
        """The id of a row, of which no more is read: it stands first."""
        self._part_of_row(index)
        start = os.pread(self._handle, _ID_WITHIN, self._offsets[index])
        if not start.startswith(_BEFORE_ID):
            raise _changed(f"{self._path}:{index + 1}: not the row that was written")
        return start[len(_BEFORE_ID) : start.index(b'"', len(_BEFORE_ID))].decode()

    def row(self, index: int) -> Row:
        """A row, read when it is asked for."""
        kept = self._recent.get(index)
        if kept is not None:
            self._recent.move_to_end(index)
            return kept
        self._part_of_row(index)
        row = self._read(index)
        self._recent[index] = row
        if len(self._recent) > _KEPT:
            self._recent.popitem(last=False)
        return row

    def _read(self, index: int) -> Row:
        start, end = self._offsets[index], self._offsets[index + 1]
        line = os.pread(self._handle, end - start, start)
        try:
            stored = orjson.loads(line)
            return Row(
                index=index,
                id=stored["id"],
                dataset=stored["dataset"],
                data=stored["data"],
                agent=stored["agent"],
                tags=tuple(stored["tags"]),
                source=stored["source"],
            )
        except (ValueError, KeyError, TypeError) as error:
            raise _changed(f"{self._path}:{index + 1}: not the row that was written: {error}") from error

    def _seed_for(self, task: str, repeat: int) -> int:
        if self._rule == "derived":
            return derive_seed(self._seed, task, repeat)
        return repeat if self._rule == "repeat" else NO_SEED

    def _known(self, number: int) -> int:
        if not 0 <= number < self.total:
            raise IndexError(f"unit {number} of {self.total}")
        return number

    def _part_of_unit(self, number: int) -> int:
        return bisect_right(self._unit_starts, self._known(number)) - 1

    def _part_of_row(self, index: int) -> int:
        if not 0 <= index < self.rows:
            raise IndexError(f"row {index} of {self.rows}")
        return bisect_right(self._row_starts, index) - 1


def _read_index(place: Place, manifest: Manifest) -> array[int]:
    """The index, which must fit the manifest and the inputs."""
    offsets = array("Q")
    try:
        offsets.frombytes(read_file(place.index))
        size = place.inputs.stat().st_size
    except (OSError, ValueError) as error:
        raise _changed(f"{place.index}: cannot read: {error}") from error
    if len(offsets) != manifest.rows + 1 or offsets[-1] != size:
        raise _changed(f"{place.inputs}: {size} bytes and {len(offsets) - 1} rows; the manifest says {manifest.rows} rows")
    return offsets


def _opened(path: Path) -> int:
    """A descriptor of the rows."""
    try:
        with open_file(path) as stream:
            return os.dup(stream.fileno())
    except OSError as error:
        raise _changed(f"{path}: cannot read: {error.strerror or error}") from error


def _changed(message: str) -> UserError:
    return UserError(message, "the campaign directory was edited; restore it, or start a new campaign")
