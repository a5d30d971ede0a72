"""runs.jsonl: the journal of a bisect, one run a line, and the truth of what was run.

- A row is appended and synced before anything is concluded from it. A line without its end is what a kill left: it is dropped with a
  note, its run is owed again, and the next row takes its place.
- Everything else that is malformed is a UserError with the line, the key and the fix; a row is never dropped in silence.
- A person may delete rows and change marks (`bad` to `skip`). A mark that contradicts the rest of its row wins, and the row says so.
- Rows come free of secrets, as the logs are that they were made from. They are not redacted here: a failure that is read back must
  be equal to the one that was written.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from seatrial.files import number_to_json, sync_directory, write_error
from seatrial.model.errors import UserError
from seatrial.model.guarded import BadValue, parse_json, parse_json_once, read_file
from seatrial.regress.bisect.record import Mark, Run, SkipKind
from seatrial.report.text import number


@dataclass(frozen=True)
class Journal:
    """What was read."""

    rows: tuple[Run, ...] = ()
    notes: tuple[str, ...] = ()


def append(path: Path, row: Run) -> None:
    """Add a row; when this returns it is on the disk."""
    value = number_to_json(row.value) if isinstance(row.value, float) else row.value
    data = row.model_copy(update={"value": value}).model_dump(mode="json")
    line = json.dumps(data, allow_nan=False).encode("ascii") + b"\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        new = not path.exists()
        with path.open("a+b") as stream:
            _end_last_line(stream.fileno(), path.read_bytes())
            stream.write(line)
            stream.flush()
            os.fsync(stream.fileno())
        if new:
            sync_directory(path.parent)
    except OSError as error:
        raise write_error(path, error) from error


def read(path: Path) -> Journal:
    """The rows; a journal that does not exist has none."""
    try:
        data = read_file(path)
    except FileNotFoundError:
        return Journal()
    except OSError as error:
        raise UserError(f"{path}: cannot read: {error.strerror or error}", "check the path and its permissions") from error
    lines = data.split(b"\n")
    last, notes = lines.pop(), []
    if last and _is_whole(last):
        lines.append(last)
    elif last:
        notes.append(f"{path.name}: line {len(lines) + 1} was cut off by a kill; its run is done again")
    rows: list[Run] = []
    for count, line in enumerate(lines, start=1):
        if line.strip():
            rows.append(_row(path, count, line, rows[-1].number if rows else 0))
    return Journal(tuple(map(_settled, rows)), tuple(notes))


def _end_last_line(handle: int, data: bytes) -> None:
    """Make the file end at the end of a line: a whole row gets its newline, half a row goes."""
    last = data.rpartition(b"\n")[2]
    if not last:
        return
    if _is_whole(last):
        os.write(handle, b"\n")
    else:
        os.truncate(handle, len(data) - len(last))


def _is_whole(line: bytes) -> bool:
    """Whether an object is complete: no beginning of one is an object itself."""
    try:
        return isinstance(parse_json(line), dict)
    except BadValue:
        return False


def _row(path: Path, count: int, line: bytes, before: int) -> Run:
    where = f"{path}:{count}"
    try:
        data = parse_json_once(line.decode("utf-8"), finite=True)
    except ValueError as error:
        fix = f"undo the edit of line {count}, or delete the line: its run is then done again"
        raise UserError(f"{where}: not a row: {error}", fix) from error
    try:
        row = Run.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"]) or "(the whole line)"
        raise UserError(f"{where}: {key}: {first['msg']}", f"undo the edit of `{key}` in line {count}, or delete the line") from error
    if row.number <= before:
        message = f"{where}: number: {row.number} comes after {before}; numbers increase from row to row"
        raise UserError(message, f"delete line {count} if it is a copy, or bring the lines back into their order")
    return row


def _settled(row: Run) -> Run:
    """The row, with the mark that a person may have changed, and without what contradicts it."""
    change: dict[str, Any] = {}
    if row.mark is Mark.SKIP:
        if row.skip is None:
            change = {"skip": SkipKind.HAND}
    else:
        if row.skip is not None:
            change["skip"] = None
        if row.mark is Mark.GOOD and row.failure is not None:
            change["failure"] = None
        measured_good = row.passed is True and row.failure is None
        if row.passed is False if row.mark is Mark.GOOD else measured_good:
            # The person contradicts the measurement: it must not count against the mark.
            change |= {"passed": None, "value": None}
    if not change:
        return row
    was = f", value {number(row.value)}" if "value" in change else ""
    note = f"marked {row.mark} by hand{was}"
    return row.model_copy(update={**change, "reason": f"{note}; was: {row.reason}" if row.reason else note, "notes": (*row.notes, note)})
