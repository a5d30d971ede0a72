"""The configuration really in force: the dictionary that verl's task runner prints before anything is built.

- It is read as a literal, never evaluated; lines of other processes between its lines are left out. pprint writes it
  piece by piece and Ray breaks lines between the pieces, so a line of the dump may begin with anything.
- A dump that is torn, or that holds anything but literals, is no dump: the answer is None, never a part of it.
- Of several runs in one log the last one counts.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from seatrial.loops.lines import Row, blocks
from seatrial.model.guarded import BadValue, parse_literal

OPENING = re.compile(r"\{'(?:actor_rollout_ref|model)': ?")
"""The first key of a task runner's dump, and of a supervised run's."""
WARNING = re.compile(r"/.+\.py:\d+: \w*Warning: ")
QUOTED = re.compile(r" {2}\S")
"""The line of source that Python writes below a warning; the dump is indented by one blank or by more."""


def read_config(log: Path) -> dict[str, Any] | None:
    """The configuration that the task runner (or the supervised trainer) printed last, or None."""
    found = read_configs(log)
    return found[-1] if found else None


def read_configs(log: Path) -> list[dict[str, Any] | None]:
    """Every configuration that was printed, in order; None stands for one that is torn."""
    made: list[dict[str, Any] | None] = []
    end = -1
    for index, rows in blocks(log, OPENING):
        if index > end:  # else it begins inside of the last one
            found, length = _literal(rows)
            if found is None or "trainer" in found:  # else another dictionary that begins alike
                made.append(found)
                end = index + length if found else end
    return made


def _literal(rows: list[Row]) -> tuple[dict[str, Any] | None, int]:
    """The literal that begins at the first row, as written by one process, and the row where it ends."""
    process = rows[0][1]
    parts: list[str] = []
    depth, warned = 0, False
    for index, (_, prefix, text) in enumerate(rows):
        if prefix != process:
            continue
        # What the process imports meanwhile may warn, on its other stream.
        before, warned = warned, bool(WARNING.match(text))
        if warned or (before and QUOTED.match(text)):
            continue
        parts.append(text)
        depth += _depth(text)
        if depth <= 0:
            return _parse("\n".join(parts)), index
    return None, 0


def _depth(text: str) -> int:
    """Brackets opened less brackets closed, outside of strings."""
    plain = re.sub(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"", "", text)
    return sum(plain.count(mark) for mark in "{[(") - sum(plain.count(mark) for mark in "}])")


def _parse(text: str) -> dict[str, Any] | None:
    try:
        found = parse_literal(text)
    except BadValue:
        return None
    return found if isinstance(found, dict) else None
