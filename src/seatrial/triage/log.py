"""A log file as a stream of searchable lines.

- Line numbers count newline characters only, as `sed -n Np` does; the segments of a progress bar (`\\r`) share the
  number of their line and are yielded one by one.
- Colour codes and what a launcher puts before a line (`log_text.without_head`) are removed; undecodable bytes stay visible.
- The prefix that names the writing process, as `(Worker pid=7) ` or `[rank1]: `, is split off into `process`, and from
  the body also the mark of a repeated line.
- Nothing is held: each iteration reads the file again, and a line that is too long comes in pieces (`files.read_pieces`), so a log
  of any size costs one piece of memory.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from seatrial.files import read_pieces
from seatrial.model.errors import UserError
from seatrial.model.guarded import open_file
from seatrial.model.log_text import ANSI, MAY_BEGIN, split_process, without_head

_REPEATED = re.compile(r" ?\[repeated \d+x across cluster\].*$")
"""What Ray puts behind a line that it shows once for several processes; a frame or a message ends before it."""


class Line(NamedTuple):
    """One line, or one segment of a line with a progress bar."""

    number: int
    process: str
    """The prefix of the writing process, empty for the main process."""
    body: str
    """The text without the process prefix."""
    text: str
    """The text with it, and with the mark of a line that stands for several."""


@dataclass(frozen=True, slots=True)
class Log:
    """A readable log file."""

    path: Path

    def __iter__(self) -> Iterator[Line]:
        process, blank, new = "", 0, tuple.__new__
        for number, start, piece in read_pieces(self.path):
            if blank:
                yield Line(blank, "", "", "")
            blank = 0 if piece else number  # what follows the last line feed is no line
            if blank:
                continue
            if start and piece[0] not in MAY_BEGIN and piece.isprintable() and "| " not in piece:  # nearly every line
                yield new(Line, (number, "", _REPEATED.sub("", piece) if " across cluster]" in piece else piece, piece))
                continue
            if start:
                process, body, text = _head(piece.rstrip("\r"))
            else:
                body = text = ANSI.sub("", piece) if "\x1b" in piece else piece
            if "\r" not in text and start:
                yield Line(number, process, body, text)
                continue
            for segment in body.split("\r"):
                if segment.strip():
                    yield Line(number, process, segment, f"{process} {segment}" if process else segment)

    def between(self, first: int, last: int) -> Iterator[Line]:
        """The lines whose numbers are within `first` and `last`, both included."""
        for line in self:
            if line.number > last:
                return
            if line.number >= first:
                yield line


def read_log(path: Path) -> Log:
    """Open a log; a missing or unreadable file is a UserError that names it."""
    try:
        with open_file(path):
            return Log(path)
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError | ValueError) -> UserError:
    what = error.strerror if isinstance(error, OSError) else None
    return UserError(f"{path}: cannot read the log: {what or error}".replace("\0", "\\0"), "give the path of a log file that you may read")


def _head(text: str) -> tuple[str, str, str]:
    """The process, the body and the text of the beginning of a line; later parts of it belong to the same process."""
    if "\x1b" in text:
        text = ANSI.sub("", text)
    text = without_head(text)
    process, body = split_process(text)
    return process.strip(), _REPEATED.sub("", body) if " across cluster]" in body else body, text
