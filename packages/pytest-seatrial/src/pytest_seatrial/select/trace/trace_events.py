"""Events of the tracer, and the log files in which child processes write them: one file per process, one line per event."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from pathlib import Path

HIT, LOAD, WHOLE, READ, WRITE, LIST, EXISTS = "hit", "load", "whole", "read", "write", "list", "exists"
SPAWN, MUTE, HELLO, TASK, TROUBLE, FIRST = "spawn", "mute", "hello", "task", "trouble", "first"
THROUGH, BY, CALL, AGAIN = "through", "by", "call", "again"
RAY_TASK = "ray-task"
NUMBERED = frozenset({HIT, CALL, AGAIN})  # kinds whose `a` is a number
STARTED_WITH = frozenset({SPAWN, MUTE, HELLO})  # kinds that hold a command line
_DIGITS = 20
STARTED = 0  # in the place of a block: a process


class Event(NamedTuple):
    kind: str
    epoch: int
    a: str
    b: str = ""


class KeptWork(NamedTuple):
    """What the pytest process did, flat: one field after the other."""

    hits: list[int]  # blocks that were entered while nothing was imported: -1 less an epoch, then their numbers
    calls: list[Any]  # the number of a block, and of who brought it to run: the file, the function, the line
    events: list[Any]  # all else: kind, epoch, a, b


class Process(NamedTuple):
    log: str  # name of its log, without the suffix; unlike the pid it is never used twice
    pid: int
    kind: str
    """python, fork, multiprocessing, ray-task (only ever ran tasks: its life is shared between tests), ray (an actor, or not used)."""
    argv: tuple[str, ...]
    parent: str  # of a fork: the log of the child that it was forked from; "" when that is the pytest process, or when this is no fork
    trouble: tuple[str, ...]
    """What is missing from its events (torn lines, a full disk): such a process may have done more than is written here."""


def decode(line: bytes) -> Event:
    """The event of a line; ValueError if it is none."""
    try:
        value = json.loads(line)
        whole = isinstance(value, list) and len(value) == 4 and [type(v) for v in value] == [str, int, str, str] and _reads(*value)
    except RecursionError as error:
        raise ValueError("not an event: nested too deeply") from error
    if not whole:
        raise ValueError("not an event")
    return Event(*value)


def _reads(kind: str, epoch: int, a: str, b: str) -> bool:
    """Whether who asks for the number or the command line of an event will get one. No guarded reader here: this module is imported into
    processes under test, and what it imports counts as theirs."""
    if kind in NUMBERED:
        return a.isdecimal() and len(a) <= _DIGITS
    if kind in STARTED_WITH:
        argv = json.loads(b if kind == HELLO else a)
        return isinstance(argv, list) and all(isinstance(word, str) for word in argv)
    return -(1 << 63) <= epoch < 1 << 63


# ruff: noqa: PTH118

SUFFIX, LOST = ".log", ".lost"
FORK = "fork:"


class EventLog:
    def __init__(self, session: str, kind: str) -> None:
        self.kind = kind
        self.name = f"{os.getpid()}-{os.urandom(4).hex()}"
        self.lost = False
        self._path = os.path.join(session, self.name + SUFFIX)
        self._file = -1
        self._identity = (0, 0)

    def write(self, event: Event) -> None:
        """Append an event; the first is preceded by who we are."""
        if self._file < 0 and not self.lost:
            self.hello(event.epoch)
        self._append(event)

    def hello(self, epoch: int) -> None:
        """Report before anything is done."""
        self._append(Event(HELLO, epoch, self.kind, json.dumps(_argv())))

    def _append(self, event: Event) -> None:
        if self.lost:
            return
        try:
            line = json.dumps(event).encode() + b"\n"
            if self._file < 0 or self._identity != _identity(self._file):
                self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
                self._identity = _identity(self._file)
            if os.write(self._file, line) == len(line):
                return
        except OSError:
            pass
        self.lost = True  # the line was cut, or could not be written
        try:
            os.close(os.open(self._path + LOST, os.O_WRONLY | os.O_CREAT, 0o666))
        except OSError:
            pass  # the session is over, and its directory gone


def read_logs(session: Path) -> Iterator[tuple[Process, list[Event]]]:
    """Every child's process and events."""
    lost = {path.name.removesuffix(SUFFIX + LOST) for path in session.glob(f"*{SUFFIX}{LOST}")}
    named = {path.name.removesuffix(SUFFIX) for path in session.glob(f"*{SUFFIX}")}
    for name in sorted(named | lost):
        data = (session / f"{name}{SUFFIX}").read_bytes() if name in named else b""
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


HIT_NAME = "__seatrial_hit__"
INSTRUMENT_VERSION = 5
