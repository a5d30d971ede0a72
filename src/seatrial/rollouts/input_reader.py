"""Reads rows of JSONL and Parquet files one at a time, names bad ones, and gives each row an id that stays its own.

- JSONL: UTF-8 with or without a byte order mark, CRLF or LF; blank lines hold no row. Parquet: by batches; values that JSON cannot hold
  (bytes, decimals, NaN) are refused with their column. The file is hashed while it is read, always to its end.
- An id is 16 hex digits of the sha256 over the dataset's name and the row as canonical JSON (without Gym's `_ng_*`), so it survives added,
  removed and reordered rows. Equal rows get `-2`, `-3`. `content_of` leaves the name out, to join equal rows of two datasets.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson

from seatrial.core.errors import UserError
from seatrial.core.guarded import BadValue, open_file
from seatrial.rollouts.fast_json import parse_json_fast

_BATCH = 256
_BOM = b"\xef\xbb\xbf"
_FORMATS = "rows are JSONL (an object per line) or Parquet: convert other files, mend or take out single lines"


class BadRowError(ValueError):
    """A row that cannot be used, why, and what to do where that is something else than to mend the row."""

    def __init__(self, message: str, fix: str = "") -> None:
        super().__init__(message)
        self.fix = fix


Found = tuple[int, dict[str, Any] | BadRowError]
"""The line of a row (Parquet: its number), counted from 1, and the row, or why it is none."""


class RowSource:
    """A file of rows. Its size and hash are known when `rows` has come to its end."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.bytes = 0
        self.sha256 = ""
        self.enough = False
        """Set it, and the rest of the file is hashed and counted, but not parsed."""
        self.skipped = 0
        """Rows after that."""

    def rows(self) -> Iterator[Found]:
        """Each row until there is enough; blank lines hold none."""
        try:
            with open_file(self.path) as stream:
                is_parquet = stream.read(4) == b"PAR1"
            yield from self._parquet_rows() if is_parquet else self._jsonl_rows()
        except OSError as error:
            raise UserError(f"{self.path}: cannot read: {error.strerror or error}", "check the path and its permissions") from error

    def _jsonl_rows(self) -> Iterator[Found]:
        digest = hashlib.sha256()
        with open_file(self.path) as stream:
            for number, line in enumerate(stream, 1):
                digest.update(line)
                self.bytes += len(line)
                text = (line.removeprefix(_BOM) if number == 1 else line).strip()
                if text and self.enough:
                    self.skipped += 1
                elif text:
                    yield number, _row(text)
        self.sha256 = digest.hexdigest()

    def _parquet_rows(self) -> Iterator[Found]:
        try:
            import pyarrow as arrow
            import pyarrow.parquet as parquet
        except ImportError as error:
            raise UserError(f"{self.path}: Parquet needs pyarrow: {error}", 'pip install "seatrial[rollouts]"') from error
        self.bytes, self.sha256 = self.path.stat().st_size, sha256_of(self.path)
        number = 0
        try:
            with parquet.ParquetFile(self.path) as file:
                for batch in file.iter_batches(batch_size=_BATCH, use_threads=False):
                    for row in batch.to_pylist():
                        number += 1
                        yield number, _storable(row)
                        if self.enough:
                            self.skipped = file.metadata.num_rows - number
                            return
        except (arrow.ArrowException, ValueError, OverflowError, MemoryError, LookupError) as error:  # names that are no text, odd times
            raise UserError(f"{self.path}: not a whole Parquet file (after row {number}): {error}", "write it again") from error


def sha256_of(path: Path) -> str:
    """The hash of a file, read in blocks."""
    with open_file(path) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def parse(text: bytes) -> dict[str, Any]:
    """A line as an object. Raises BadRowError, also for what would not survive being written again; see `parse_json_fast`."""
    try:
        row = parse_json_fast(text)
    except BadValue as error:
        column = "" if error.column is None else f" (column {error.column})"
        raise BadRowError(f"not JSON: {error.what}{column}", _FORMATS) from error
    if not isinstance(row, dict):
        raise BadRowError(f"not an object: {text[:40].decode(errors='replace')}", _FORMATS)
    return row


def _row(text: bytes) -> dict[str, Any] | BadRowError:
    try:
        return parse(text)
    except BadRowError as error:
        return error


def _storable(row: dict[str, Any]) -> dict[str, Any] | BadRowError:
    for column, value in row.items():
        if said := unstorable(value):
            return BadRowError(f"column {column!r} holds {said}: JSON cannot say it")
    return row


def unstorable(value: Any) -> str | None:
    """What of a value JSON cannot say."""
    if isinstance(value, float):
        return None if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return next(filter(None, map(unstorable, value.values())), None)
    if isinstance(value, list):
        return next(filter(None, map(unstorable, value)), None)
    return None if value is None or isinstance(value, str | bool | int) else f"a {type(value).__name__}"


_ID_DIGITS = 16
_ALL = 1 << 64


def canonical(data: Mapping[str, Any]) -> bytes:
    """What is hashed of a row. A TypeError for what JSON does not hold."""
    kept = {key: value for key, value in data.items() if not key.startswith("_ng_")}
    return orjson.dumps(kept, option=orjson.OPT_SORT_KEYS)


def content_of(text: bytes) -> str:
    """The same for equal rows, in whatever dataset and campaign; takes what `canonical` gives."""
    return hashlib.sha256(text).hexdigest()[:_ID_DIGITS]


class RowIds:
    """Gives the rows of one dataset their ids, in order."""

    def __init__(self, dataset: str) -> None:
        self._name = dataset.encode() + b"\n"
        self._seen: set[int] = set()
        self._again: dict[int, int] = {}
        self.duplicates = 0
        """Rows that were there before."""

    def give(self, text: bytes) -> str:
        """The id of a row; takes what `canonical` gives."""
        digits = hashlib.sha256(self._name + text).hexdigest()[:_ID_DIGITS]
        # Numbers instead of texts: half the memory, over as many rows as there are.
        number = int(digits, 16)
        if number not in self._seen:
            self._seen.add(number)
            return digits
        self.duplicates += 1
        self._again[number] = self._again.get(number, 1) + 1
        return f"{digits}-{self._again[number]}"


def is_chosen(task: str, weight: float) -> bool:
    """Whether a row belongs to the share `weight`; a larger share keeps all rows of a smaller one."""
    return int.from_bytes(hashlib.sha256(f"weight:{task}".encode()).digest()[:8], "big") < weight * _ALL
