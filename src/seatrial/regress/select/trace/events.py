"""What the tracer tells: events, and the processes they come from.

- Every path is relative to the root, with `/`, links resolved. `""` stands for "none", and for the root where a directory is meant.
- The meaning of `a` and `b` by kind:

  =======  =====================  ==========================================================================
  kind     a                      b
  =======  =====================  ==========================================================================
  hit      number of the block    module that was being imported then (its path), or ""
  load     importer's path or ""  path of the module that it imported; `""`: no project file asked for it
  whole    path                   module being imported, or "": any block of this file may have been executed
  read     path                   module being imported, or "": opened for reading (there or not)
  write    path                   module being imported, or "": opened for writing, moved, removed, made
  list     path of a directory    module being imported, or ""
  exists   path                   module being imported, or "": asked whether it is there, not read
  spawn    argv as JSON           working directory of the new process (absolute); of the n-th like it in an epoch with "\\0n" after it
  mute     argv as JSON           the same of a process that got an environment without our variables: it cannot report
  through  path that was read     nearest file of the project on the stack, "\\0", and the function in it: other people's code read for it
  by       path that was read     the same, of a function that read it itself
  call     number of a block      nearest file of the project on the stack, "\\0", the function in it that brought it to run, "\\0", the
                                  line; the number 0: it started a process
  again    number of a keeper     "": it ran so often in this epoch that not all of its calls are told
  hello    kind of process        argv as JSON: the first event of a child
  task     "ray-task" or ""       "": from here on this Ray worker is an actor; "ray-task": it runs tasks
  first    path of a test file    "": the test that was the first to ask for a fixture is in it; told by the hooks, not by the tracer
  trouble  what                   "": an audit event was not understood; take everything of the epoch as possible
  =======  =====================  ==========================================================================
- One (kind, a, b) is told once per epoch and process; a call, once per process.
- A line of a log is a JSON array; what cannot be read is told in `Process.trouble`.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

HIT, LOAD, WHOLE, READ, WRITE, LIST, EXISTS = "hit", "load", "whole", "read", "write", "list", "exists"
SPAWN, MUTE, HELLO, TASK, TROUBLE, FIRST = "spawn", "mute", "hello", "task", "trouble", "first"
THROUGH, BY, CALL, AGAIN = "through", "by", "call", "again"
RAY_TASK = "ray-task"
NUMBERED = frozenset({HIT, CALL, AGAIN})
"""Kinds whose `a` is a number."""
STARTED_WITH = frozenset({SPAWN, MUTE, HELLO})
"""Kinds that hold a command line."""
_DIGITS = 20
STARTED = 0
"""In the place of a block: a process."""


class Event(NamedTuple):
    """One thing that happened."""

    kind: str
    epoch: int
    a: str
    b: str = ""

    @property
    def number(self) -> int:
        """Of a hit: the number of the block, as `blocks.number` has it."""
        return int(self.a)


class Kept(NamedTuple):
    """What the pytest process did, flat: one field after the other."""

    hits: list[int]
    """Blocks that were entered while nothing was imported: -1 less an epoch, then their numbers."""
    calls: list[Any]
    """The number of a block, and of who brought it to run: the file, the function, the line."""
    events: list[Any]
    """All else: kind, epoch, a, b."""


class Process(NamedTuple):
    """A child that reported."""

    log: str
    """Name of its log, without the suffix; unlike the pid it is never used twice."""
    pid: int
    kind: str
    """python, fork, multiprocessing, ray-task (only ever ran tasks: its life is shared between tests), ray (an actor, or not used)."""
    argv: tuple[str, ...]
    parent: str
    """Of a fork: the log of the child that it was forked from; "" when that is the pytest process, or when this is no fork."""
    trouble: tuple[str, ...]
    """What is missing from its events (torn lines, a full disk): such a process may have done more than is written here."""


def encode(event: Event) -> bytes:
    """The line of a log."""
    return json.dumps(event).encode() + b"\n"


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
