"""Reading the facts that probes left in a phase directory.

A torn or malformed row is not skipped: it is kept as damage, and whoever proves something from damaged facts fails.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from seatrial.files import read_text
from seatrial.model.errors import UserError
from seatrial.model.guarded import BadValue, parse_json_once
from seatrial.model.series import Damage

PATTERN = "*facts*.jsonl"
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Facts:
    """All facts of one phase, in the order in which they were written."""

    rows: tuple[Row, ...]
    damage: tuple[Damage, ...] = ()

    def of(self, kind: str, **match: Any) -> list[Row]:
        """The facts of one kind whose fields have the given values."""
        return [row for row in self.rows if row["fact"] == kind and all(row.get(key) == value for key, value in match.items())]

    def one(self, kind: str, **match: Any) -> Row | None:
        """The only such fact, or None when there is none or more than one."""
        found = self.of(kind, **match)
        return found[0] if len(found) == 1 else None


def read_facts(path: Path) -> Facts:
    """Read a facts.jsonl; an absent file has no facts."""
    if not path.is_file():
        return Facts(())
    rows: list[Row] = []
    damage: list[Damage] = []
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if not line:
            continue
        try:
            row = parse_json_once(line)
            if not isinstance(row, dict) or not isinstance(row.get("fact"), str):
                raise BadValue("a fact is an object with the key 'fact'")
            rows.append(row)
        except BadValue as error:
            damage.append(Damage(str(path), f"line {number}", 1, f"not a fact: {error}"))
    return Facts(tuple(rows), tuple(damage))


def read_all(source: Path) -> Facts:
    """The facts of a run: one file, or every file of facts below a directory, in the order of their names. None is an error."""
    if source.is_dir():
        files = sorted(source.rglob(PATTERN))
        if not files:
            raise UserError(f"{source}: no file of facts below it ({PATTERN})", "name the file that the hooks were told to write")
    elif source.is_file():
        files = [source]
    else:
        raise UserError(f"{source}: no such file or directory", "name the file of facts, or the directory that holds it")
    read = [read_facts(file) for file in files]
    return Facts(tuple(row for each in read for row in each.rows), tuple(damage for each in read for damage in each.damage))
