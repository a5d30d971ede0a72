"""The lines of a console log as a loop's readers need them: without colours and time stamps, with the writing process apart.

- What a launcher puts before a line is removed (`log_text.without_head`).
- The prefix of Ray, torchrun or srun names the process; the parts of a progress bar (`\\r`) are yielded one by one.
- Numbers count line feeds only.
- A line that is too long comes in pieces (`files.read_pieces`), so a log of any size costs one piece of memory.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from seatrial.core.files import read_pieces
from seatrial.core.log_text import ANSI, MAY_BEGIN, split_process, without_head

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
