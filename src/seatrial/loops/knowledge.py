"""Reading the TOML files beside a loop into the types of `seatrial.model.knowledge`."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from seatrial.model.errors import UserError
from seatrial.model.guarded import parse_toml, read_file
from seatrial.model.record import Record

R = TypeVar("R", bound=Record)


def read_tables(path: Path, table: str, kind: type[R], beside: tuple[str, ...] = ()) -> tuple[R, ...]:
    """All `[[table]]` entries of a file; an error names the file, the entry and the key. Tables `beside` it are for other readers."""
    try:
        data = parse_toml(read_file(path).decode("utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: {error}", "correct the file") from error
    unknown = sorted(set(data) - {table, *beside})
    found = data.get(table, [])
    if unknown or not isinstance(found, list) or not all(isinstance(entry, dict) for entry in found):
        raise UserError(f"{path}: unknown key {(unknown or [table])[0]!r}; only [[{table}]] entries are read", f"use [[{table}]]")
    entries = []
    for index, entry in enumerate(found, 1):
        try:
            entries.append(kind.model_validate(entry))
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(str(part) for part in first["loc"])
            raise UserError(
                f"{path}: {table} {index} ({entry.get('id', entry.get('name', '?'))}): {key}: {first['msg']}", "correct the entry"
            ) from error
    return tuple(entries)
