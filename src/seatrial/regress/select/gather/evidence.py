"""What one pytest process saw, in a form that can be written into a file by an xdist worker and read by the controller.

- Events are folded by epoch: one entry per thing, in the order in which it first happened. Blocks that were entered outside of imports,
  which are most of it, and calls, which are of no epoch, stand apart.
- A worker appends a line per finished test, so that a killed worker loses the test that it was in and nothing else.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from seatrial.regress.select.trace.blocks import KEEPS
from seatrial.regress.select.trace.events import HIT, Event, Kept, Process

ASIDE = 1  # our own work, which belongs to nobody
BASE = 0  # outside of any test, fixture or import: belongs to every test
Deed = tuple[str, str, str]  # kind, a, b of an event


class Ran(NamedTuple):
    """One test that ended, with the epochs of the contexts that it used."""

    test: str
    path: str
    epoch: int
    uses: tuple[int, ...]
    outcome: str  # passed, skipped, failed, or left (out by a guard)


class Evidence:
    """Everything from one pytest process and its children."""

    def __init__(self) -> None:
        self.hits: dict[int, list[int]] = {}
        """By epoch: numbers of blocks that were entered while no module was imported."""
        self.calls: dict[tuple[str, str], set[tuple[int, int]]] = {}
        """A file and a function in it: lines, and the numbers of the blocks that were brought to run there."""
        self.deeds: dict[int, dict[Deed, None]] = {}
        """By epoch: all the rest."""
        self.tests: list[Ran] = []
        self.collected: set[str] = set()
        self.needs: dict[int, tuple[int, ...]] = {}
        """What a fixture's context uses itself."""
        self.children: list[tuple[Process, list[Event]]] = []
        self._same: dict[Deed, Deed] = {}

    def fold(self, kept: Kept) -> None:
        hits: list[int] = []
        for number in kept.hits:
            if number < 0:
                hits = self.hits.setdefault(-1 - number, [])
            else:
                hits.append(number & (KEEPS - 1))
        for number, path, function, line in _fours(kept.calls):
            self.calls.setdefault((path, function), set()).add((line, number))
        for kind, epoch, a, b in _fours(kept.events):
            deed = (kind, a, b)
            self.deeds.setdefault(epoch, {})[self._same.setdefault(deed, deed)] = None

    def did(self, epoch: int) -> list[Deed]:
        """All that the pytest process did in an epoch."""
        return [*[(HIT, str(number), "") for number in self.hits.get(epoch, ())], *self.deeds.get(epoch, ())]


def _fours(fields: list[Any]) -> Iterator[tuple[Any, Any, Any, Any]]:
    one = iter(fields)
    return zip(one, one, one, one, strict=True)


class Journal:
    """Where a process puts what it saw: into `evidence`, or into a file when it is a worker.

    While tests run nothing is made that the garbage collector looks at: it would look through all objects of the session more often.
    """

    def __init__(self, path: Path | None) -> None:
        self.evidence = Evidence()
        self._kept: list[Any] = []  # the fields of one `Ran` after the other
        self._handle = None if path is None else os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def add(self, drain: Callable[[], Kept], ran: Ran | None, needs: dict[int, tuple[int, ...]]) -> None:
        """A test ended, or (without one) the session did; `drain` gives what happened since the last time that it was called."""
        if self._handle is None:
            self._kept.extend(ran or ())
            if needs:
                self.evidence.needs.update(needs)
            if ran is None:
                self.evidence.fold(drain())
            return
        line: dict[str, Any] = {"did": drain(), "ran": None if ran is None else ran._asdict(), "needs": sorted(needs.items())}
        line["collected"] = sorted(self.evidence.collected)
        self.evidence.collected = set()
        os.write(self._handle, json.dumps(line).encode() + b"\n")

    def take(self) -> Evidence:
        """All of it; nothing is left here."""
        found, self.evidence = self.evidence, Evidence()
        fields = iter(self._kept)
        found.tests.extend(map(Ran, fields, fields, fields, fields, fields))
        self._kept = []
        return found

    def close(self) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


def read(path: Path) -> Evidence:
    """The evidence of a worker; a torn last line belongs to a test that did not end. A ValueError for a line that cannot be read: what it
    told may belong to any test, so nothing of this session may be recorded."""
    evidence = Evidence()
    for number, line in _lines(path):
        try:
            _take(evidence, json.loads(line))  # not guarded: names of files that are no text must stay what they are
        except (RecursionError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path.name} of {path.parent.name}, line {number}: not what a worker writes: {error}") from error
    return evidence


def _take(evidence: Evidence, line: dict[str, Any]) -> None:
    evidence.fold(Kept(*line["did"]))
    evidence.collected.update(line["collected"])
    evidence.needs.update((epoch, tuple(used)) for epoch, used in line["needs"])
    ran = line["ran"]
    if ran is not None:
        evidence.tests.append(Ran(ran["test"], ran["path"], ran["epoch"], tuple(ran["uses"]), ran["outcome"]))


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    with path.open("rb") as stream:
        for number, line in enumerate(stream, 1):
            if line.endswith(b"\n"):
                yield number, line
