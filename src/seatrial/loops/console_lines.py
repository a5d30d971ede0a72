"""The lines of a console log as a loop's readers need them: without colours and time stamps, with the writing process apart."""

from __future__ import annotations

import ast
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from seatrial.core.files import read_pieces
from seatrial.core.guarded import BadValue, parse_literal
from seatrial.core.log_text import ANSI, MAY_BEGIN, split_process, without_head
from seatrial.core.series import Damage, Metrics, Overlap, Series

ConsoleLine = tuple[int, str, str]
LONGEST = 5000
"""Lines that a block of a log may have."""
LARGEST = 4_000_000
"""Characters that it may have."""
MOST = 100
"""Blocks that are looked at: a log with more beginnings repeats itself."""


def read_lines(log: Path) -> Iterator[tuple[int, str, str]]:
    """Number, process prefix and text of each line."""
    prefix = ""
    for number, start, piece in read_pieces(log):
        if start and piece and piece[0] not in MAY_BEGIN and piece.isprintable() and "| " not in piece:  # nearly every line
            prefix = ""
            yield number, "", piece
            continue
        text = ANSI.sub("", piece) if "\x1b" in piece else piece
        if start:
            prefix, text = split_process(without_head(text))
        if "\r" not in text:
            yield number, prefix, text
            continue
        for part in text.split("\r"):
            yield number, prefix, part


def read_blocks(log: Path, opening: re.Pattern[str]) -> Iterator[tuple[int, list[ConsoleLine]]]:
    """For each line that `opening` matches, its index among all lines, and the lines from it on that its block may have."""
    rest, ahead = read_lines(log), deque[ConsoleLine]()
    size = index = count = 0
    while count < MOST and (row := ahead.popleft() if ahead else next(rest, None)) is not None:
        size = size - len(row[2]) if ahead else 0
        if opening.match(row[2]):
            while len(ahead) < LONGEST and size < LARGEST and (more := next(rest, None)) is not None:
                ahead.append(more)
                size += len(more[2])
            count += 1
            yield index, [row, *ahead]
        index += 1


WARNING = re.compile(r"(?:/.+|\S+)\.py:\d+: \w*Warning: ")
QUOTED = re.compile(r" {2}\S")
"""The line of source that Python writes below a warning."""
TEXT = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"")


def lines_of(process: str, rows: Sequence[ConsoleLine]) -> Iterator[tuple[int, str]]:
    """Index and text of the lines that one process wrote, without warnings: what it imports meanwhile may warn on its other stream."""
    warned = False
    for index, (_, prefix, text) in enumerate(rows):
        if prefix == process:
            before, warned = warned, bool(WARNING.match(text))
            if not warned and not (before and QUOTED.match(text)):
                yield index, text


def bracket_depth(text: str) -> int:
    """Brackets opened less brackets closed, outside of strings."""
    plain = TEXT.sub("", text)
    return sum(plain.count(mark) for mark in "{[(") - sum(plain.count(mark) for mark in "}])")


def parse_dict(parts: Sequence[str], *value: Callable[[ast.expr], Any]) -> dict[str, Any] | None:
    """The dictionary that these lines print; None where they are torn."""
    try:
        found = parse_literal("\n".join(parts), *value)
    except BadValue:
        return None
    return found if isinstance(found, dict) else None


def as_series(points: Mapping[str, Mapping[int, float]]) -> dict[str, Series]:
    return {tag: Series(tag, tuple(sorted(table)), tuple(table[step] for step in sorted(table))) for tag, table in points.items()}


@dataclass(slots=True)
class Points:
    """Values by tag and step as a log prints them, with the steps that it prints twice, or after a later one."""

    values: dict[str, dict[int, float]] = field(default_factory=dict)
    twice: dict[str, set[int]] = field(default_factory=dict)
    again: dict[str, set[int]] = field(default_factory=dict)
    latest: dict[str, int] = field(default_factory=dict)

    def add(self, tag: str, step: int, value: float) -> None:
        """Take the next value."""
        if step <= self.latest.get(tag, step - 1):
            self.again.setdefault(tag, set()).add(step)
        self.latest[tag] = step
        table = self.values.setdefault(tag, {})
        if step in table and table[step] != value:
            self.twice.setdefault(tag, set()).add(step)
        table[step] = value

    def metrics(self, log: Path, damage: Sequence[Damage], words: Mapping[str, Damage] | None = None) -> Metrics:
        overlaps, restarts = (
            tuple(Overlap(tag, tuple(sorted(steps))) for tag, steps in sorted(found.items())) for found in (self.twice, self.again)
        )
        sources = (str(log),) if self.values else ()
        series = as_series(self.values)
        return Metrics(series=series, damage=tuple(damage), words=dict(words or {}), overlaps=overlaps, sources=sources, restarts=restarts)
