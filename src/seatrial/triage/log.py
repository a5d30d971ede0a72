"""A log file as a stream of searchable lines.

- Line numbers count newline characters only, as `sed -n Np` does; the segments of a progress bar (`\\r`) share the
  number of their line and are yielded one by one.
- Colour codes, leading time stamps (ours, and epoch seconds) and the label of a run are removed; undecodable bytes stay visible.
- The prefix that names the writing process, as `(Worker pid=7) ` or `[rank1]: `, is split off into `process`, and from
  the body also the mark of a repeated line.
- Nothing is held: each iteration reads the file again, so a log of any size costs one line of memory.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from seatrial.model.errors import UserError

_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\^_])")
_STAMP = re.compile(r"(?:\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?Z|\d{10}(?:\.\d+)?) ")
_LABEL = re.compile(r"\[\w+ \d+step\] ")
"""What a script puts before every line of one of its runs (`sed 's/^/[mcore 1step] /'`)."""
_PROCESS = re.compile(
    r"(?:\((?:[A-Za-z_][\w.:-]*|(?:[A-Za-z_][\w.:\[\]=-]* )?pid=\d+(?:, ip=[^)\s]+)?)\)(?: |$)"  # (name[rank=0] pid=7, ip=…), (name)
    r"|\[(?:rank|default|trainer|worker)?\d+\]: ?"  # [rank1]:
    r"|\d{1,5}: )+"  # srun --label
)

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
        try:
            with self.path.open("rb") as stream:
                for number, raw in enumerate(stream, 1):
                    yield from _split(number, raw)
        except OSError as error:
            raise _unreadable(self.path, error) from error

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
        with path.open("rb"):
            return Log(path)
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> UserError:
    return UserError(f"{path}: cannot read the log: {error.strerror or error}", "give the path of a log file that you may read")


def _split(number: int, raw: bytes) -> Iterator[Line]:
    """Decode one line and cut it at carriage returns; later segments belong to the process of the first."""
    text = raw.decode("utf-8", "backslashreplace").rstrip("\r\n")
    if "\x1b" in text:
        text = _ANSI.sub("", text)
    if text[:1].isdigit() and (stamp := _STAMP.match(text)):
        text = text[stamp.end() :]
    if text[:1] == "[" and (label := _LABEL.match(text)):
        text = text[label.end() :]
    prefix = _PROCESS.match(text)
    process, body = (prefix.group().strip(), text[prefix.end() :]) if prefix else ("", text)
    if " across cluster]" in body:
        body = _REPEATED.sub("", body)
    if "\r" not in text:
        yield Line(number, process, body, text)
        return
    for segment in body.split("\r"):
        if segment.strip():
            yield Line(number, process, segment, f"{process} {segment}" if process else segment)
