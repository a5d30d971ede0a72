"""Facts that lie somewhere already: one file, or every file of facts below a directory, as one run."""

from __future__ import annotations

from pathlib import Path

from seatrial.loops.facts import Facts, read_facts
from seatrial.model.errors import UserError

PATTERN = "*facts*.jsonl"


def read_all(source: Path) -> Facts:
    """The facts of a run, file by file in the order of their names; a directory without any is an error."""
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
