"""inputs.jsonl: every row of every dataset, checked, with its id, in order.

- Rows are streamed: what grows with their number is a hash of each (to tell duplicates apart) and where each starts.
- Every bad row of every file is found before anything is refused; the first 20 are named, and all are counted.
- `weight` chooses among a file's rows, `limit` takes the first so many of those.
"""

from __future__ import annotations

import hashlib
import os
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from seatrial.model.errors import UserError
from seatrial.model.record import Record
from seatrial.rollouts.campaign import Campaign, Dataset
from seatrial.rollouts.inputs.ids import Ids, canonical, content_of, is_chosen
from seatrial.rollouts.inputs.reading import BadRowError, Source
from seatrial.rollouts.inputs.rows import TASK_INDEX, agent_of, check, tags_of
from seatrial.rollouts.place import Place

Progress = Callable[[str], None]
"""Called now and then with how far it is."""
SAY_EVERY = 50_000
_SHOWN = 20


class InputFile(Record):
    """A file whose rows are in inputs.jsonl."""

    dataset: str
    path: str
    sha256: str
    bytes: int
    rows: int
    """Taken."""
    skipped: int = 0
    """Left out by limit or weight."""
    duplicates: int = 0
    """Rows that are the same as an earlier one of the file: each is a task of its own."""


@dataclass(frozen=True, slots=True)
class Written:
    """What became of the inputs."""

    files: tuple[InputFile, ...]
    sha256: str


class Faults:
    """Bad rows: the first ones in words, what to do about them, and how many."""

    def __init__(self) -> None:
        self.first: list[str] = []
        self.total = 0
        self._fixes: list[str] = []

    def add(self, where: str, what: object) -> None:
        """Note one."""
        self.total += 1
        if len(self.first) < _SHOWN:
            self.first.append(f"{where}: {what}")
            self._fixes.append(what.fix if isinstance(what, BadRowError) else "")

    def refuse(self, fix: str) -> None:
        """Raise a UserError with all of them, if there are any; `fix` is for those that bring none of their own."""
        if self.total:
            more = f"\n… and {self.total - len(self.first)} more" if self.total > len(self.first) else ""
            rows = "row" if self.total == 1 else "rows"
            fixes = "; ".join(dict.fromkeys(own or fix for own in self._fixes))
            raise UserError(f"{self.total} bad {rows}; nothing was started:\n" + "\n".join(self.first) + more, fixes)


class RowWriter:
    """Writes inputs.jsonl, and knows where each row starts."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._stream = place.inputs.open("wb")
        self._digest = hashlib.sha256()
        self._offsets = array("Q", [0])

    def add(self, task: str, content: str, dataset: str, data: Any, *, agent: str | None, tags: tuple[str, ...], source: str) -> None:
        """One row, as `Units.row` reads it."""
        stored = {"id": task, "content": content, "dataset": dataset, "agent": agent, "tags": tags, "source": source, "data": data}
        line = orjson.dumps(stored, option=orjson.OPT_APPEND_NEWLINE)
        self._stream.write(line)
        self._digest.update(line)
        self._offsets.append(self._offsets[-1] + len(line))

    def finish(self) -> str:
        """Make it durable, write the index; gives the hash."""
        self._stream.flush()
        os.fsync(self._stream.fileno())
        with self._place.index.open("wb") as index:
            self._offsets.tofile(index)
            index.flush()
            os.fsync(index.fileno())
        return self._digest.hexdigest()

    def close(self) -> None:
        """Let go of the file."""
        self._stream.close()


@contextmanager
def row_writer(place: Place) -> Iterator[RowWriter]:
    """A writer that is closed, whatever happens."""
    writer = RowWriter(place)
    try:
        yield writer
    finally:
        writer.close()


def write_inputs(campaign: Campaign, base: Path, place: Place, progress: Progress | None = None) -> Written:
    """All rows of a campaign into inputs.jsonl and inputs.index of `place`. Raises a UserError that names the bad ones."""
    faults = Faults()
    with row_writer(place) as writer:
        files = tuple(_Reader(campaign, dataset, base, writer, faults).run(progress) for dataset in campaign.datasets)
        faults.refuse("correct these rows, or take them out of the file; what a row must have: docs/rollouts.md")
        for file in files:
            if not file.rows:
                raise UserError(f"{file.path}: dataset {file.dataset}: none of {file.skipped} rows is left", "raise its weight")
        return Written(files=files, sha256=writer.finish())


class _Reader:
    """Takes the rows of one dataset."""

    def __init__(self, campaign: Campaign, dataset: Dataset, base: Path, writer: RowWriter, faults: Faults) -> None:
        self._campaign = campaign
        self._dataset = dataset
        self._source = Source((base / dataset.path).absolute())
        self._writer = writer
        self._faults = faults
        self._ids = Ids(dataset.name)
        self._indices: set[int] = set()
        self._seen_columns: set[str] = set()
        self._taken = 0
        self._skipped = 0

    def run(self, progress: Progress | None) -> InputFile:
        """Read the file to its end."""
        seen = 0
        for seen, (line, found) in enumerate(self._source.rows(), 1):
            where = f"{self._source.path}:{line}"
            try:
                if isinstance(found, BadRowError):
                    raise found
                self._take(found, where)
            except BadRowError as error:
                self._faults.add(where, error)
            except orjson.JSONEncodeError as error:
                self._faults.add(where, f"cannot be stored: {error}")
            if self._dataset.limit is not None and self._taken >= self._dataset.limit:
                self._source.enough = True
            if progress and seen % SAY_EVERY == 0:
                progress(f"{self._dataset.name}: {seen} rows read")
        self._check_whole(seen)
        return InputFile(
            dataset=self._dataset.name,
            path=str(self._source.path),
            sha256=self._source.sha256,
            bytes=self._source.bytes,
            rows=self._taken,
            skipped=self._skipped + self._source.skipped,
            duplicates=self._ids.duplicates,
        )

    def _take(self, data: dict[str, Any], where: str) -> None:
        check(data, self._dataset, self._campaign)
        self._check_index(data)
        agent, tags = agent_of(data, self._dataset, self._campaign), tags_of(data, self._dataset)
        self._seen_columns.update(column for column in self._dataset.tag_columns if column in data)
        text = canonical(data)
        task = self._ids.give(text)
        if not is_chosen(task, self._dataset.weight):
            self._skipped += 1
            return
        self._taken += 1
        if not self._faults.total:
            self._writer.add(task, content_of(text), self._dataset.name, data, agent=agent, tags=tags, source=where)

    def _check_index(self, data: dict[str, Any]) -> None:
        """Gym takes two rows with one index for two rollouts of one task."""
        index = data.get(TASK_INDEX)
        if index is None:
            return
        if isinstance(index, bool) or not isinstance(index, int) or index < 0:
            raise BadRowError(f"{TASK_INDEX} is {index!r}, not a number from 0")
        if index in self._indices:
            raise BadRowError(f"{TASK_INDEX} {index} stands in an earlier row too")
        self._indices.add(index)

    def _check_whole(self, seen: int) -> None:
        """What only the whole file can show."""
        if not seen:
            self._faults.add(str(self._source.path), BadRowError("empty: there is no row in it", "name a file that holds rows"))
        for column in self._dataset.tag_columns:
            if seen and column not in self._seen_columns and not self._faults.total:
                error = BadRowError(f"no row has the tag column {column!r}", "correct tag_columns of [[datasets]]")
                self._faults.add(str(self._source.path), error)
