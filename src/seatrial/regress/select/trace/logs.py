"""Logs of the processes that a test started: one file per process, one line per event, written at once.

- A line is written by one `write`, so that what a killed process did is there. The descriptor is checked before each: a daemon that
  closes all descriptors and opens others must not find our lines in its own files.
- A log that cannot be written says so by a file beside it (`.lost`); a start that failed leaves a line `! message`. `read` tells both.
"""

# Paths are text here: pathlib may not be loaded yet, and what it does is watched.
# ruff: noqa: PTH118

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from seatrial.regress.select.trace.events import HELLO, RAY_TASK, TASK, Event, Process, decode, encode

if TYPE_CHECKING:
    from pathlib import Path

SUFFIX, LOST = ".log", ".lost"
FORK = "fork:"


class Log:
    """The log of this process."""

    def __init__(self, session: str, kind: str) -> None:
        self.kind = kind
        self.name = f"{os.getpid()}-{os.urandom(4).hex()}"
        self.lost = False
        self._path = os.path.join(session, self.name + SUFFIX)
        self._file = -1
        self._identity = (0, 0)

    def write(self, event: Event) -> None:
        """Append an event; the first is preceded by who we are."""
        if not self.lost:
            try:
                line = encode(event)
                if self._file < 0:
                    line = encode(Event(HELLO, event.epoch, self.kind, json.dumps(_argv()))) + line
                self._append(line)
            except OSError:
                self._say_lost()

    def hello(self, epoch: int) -> None:
        """Report before anything is done."""
        try:
            self._append(encode(Event(HELLO, epoch, self.kind, json.dumps(_argv()))))
        except OSError:
            self._say_lost()

    def _append(self, line: bytes) -> None:
        if self._file < 0 or self._identity != _identity(self._file):
            self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
            self._identity = _identity(self._file)
        if os.write(self._file, line) != len(line):
            raise OSError("the line was cut")

    def _say_lost(self) -> None:
        self.lost = True
        try:
            os.close(os.open(self._path + LOST, os.O_WRONLY | os.O_CREAT, 0o666))
        except OSError:
            pass  # the session is over, and its directory gone


def read(session: Path) -> Iterator[tuple[Process, list[Event]]]:
    """Every child's process and events."""
    lost = {path.name.removesuffix(SUFFIX + LOST) for path in session.glob(f"*{SUFFIX}{LOST}")}
    named = {path.name.removesuffix(SUFFIX) for path in session.glob(f"*{SUFFIX}")}
    for name in sorted(named | lost):
        path = session / f"{name}{SUFFIX}"
        data = path.read_bytes() if name in named else b""
        yield _process(name, data, ["events could not be written"] if name in lost else [])


def _process(name: str, data: bytes, trouble: list[str]) -> tuple[Process, list[Event]]:
    lines = data.split(b"\n")
    events = []
    for place, line in enumerate(lines[:-1], 1):
        try:
            events.append(decode(line))
        except ValueError:
            trouble.append(line[2:].decode("utf-8", "replace") if line.startswith(b"! ") else f"line {place} cannot be read")
    if lines[-1]:
        trouble.append(f"line {len(lines)} is torn")
    kind, parent, argv = "python", "", ()
    if events and events[0].kind == HELLO:
        kind, argv = events[0].a, tuple(json.loads(events[0].b))
        if kind.startswith(FORK):
            kind, parent = "fork", kind.removeprefix(FORK)
            events[0] = events[0]._replace(a=kind)
    elif not trouble:
        trouble.append("no line says what process this is")
    tasks = {event.a for event in events if event.kind == TASK}
    if tasks == {RAY_TASK}:
        kind = RAY_TASK
    pid = name.partition("-")[0]
    return Process(name, int(pid) if pid.isdigit() else 0, kind, argv, parent, tuple(trouble)), events


def kind_of_process() -> str:
    """python, multiprocessing or ray, by the command line."""
    argv = _argv()
    if any(part.endswith("default_worker.py") for part in argv):
        return "ray"
    return "multiprocessing" if any("multiprocessing" in part for part in argv) else "python"


def _argv() -> list[str]:
    return list(getattr(sys, "orig_argv", None) or sys.argv)


def _identity(file: int) -> tuple[int, int]:
    try:
        told = os.fstat(file)
    except OSError:
        return (0, 0)
    return (told.st_dev, told.st_ino)
