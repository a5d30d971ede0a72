"""What one pytest process saw, in a form that can be written into a file by an xdist worker and read by the controller.

- Events are folded by epoch as they are drained: one entry per thing, in the order in which it first happened.
- A worker appends a line per finished test, so that a killed worker loses the test that it was in and nothing else.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from seatrial.regress.select.trace.events import Event, Process

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


@dataclass(slots=True)
class Evidence:
    """Everything from one pytest process and its children."""

    deeds: dict[int, dict[Deed, None]] = field(default_factory=dict)
    tests: list[Ran] = field(default_factory=list)
    collected: set[str] = field(default_factory=set)
    needs: dict[int, tuple[int, ...]] = field(default_factory=dict)  # what a fixture's context uses itself
    children: list[tuple[Process, list[Event]]] = field(default_factory=list)
    _same: dict[Deed, Deed] = field(default_factory=dict)

    def fold(self, events: Iterable[tuple[str, int, str, str]]) -> None:
        for kind, epoch, a, b in events:
            deed = (kind, a, b)
            self.deeds.setdefault(epoch, {})[self._same.setdefault(deed, deed)] = None


class Journal:
    """Where a process puts what it saw: into `evidence`, or into a file when it is a worker.

    While tests run everything is kept in plain tuples of text and numbers: these are nothing to the garbage collector, which would else
    look through all objects of the session more often.
    """

    def __init__(self, path: Path | None) -> None:
        self.evidence = Evidence()
        self._kept: list[tuple[tuple[Any, ...], tuple[Any, ...] | None]] = []
        self._handle = None if path is None else os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def add(self, events: list[Event], ran: Ran | None = None, needs: dict[int, tuple[int, ...]] | None = None) -> None:
        if self._handle is None:
            self._kept.append((tuple(map(tuple, events)), None if ran is None else tuple(ran)))
            if needs:
                self.evidence.needs.update(needs)
            return
        line: dict[str, Any] = {"events": events, "ran": None if ran is None else ran._asdict(), "needs": sorted((needs or {}).items())}
        line["collected"] = sorted(self.evidence.collected)
        self.evidence.collected = set()
        os.write(self._handle, json.dumps(line).encode() + b"\n")

    def take(self) -> Evidence:
        """All of it; nothing is left here."""
        found, self.evidence = self.evidence, Evidence()
        for events, ran in self._kept:
            found.fold(events)
            if ran is not None:
                found.tests.append(Ran(*ran))
        self._kept.clear()
        return found

    def close(self) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


def read(path: Path) -> Evidence:
    """The evidence of a worker; a torn last line belongs to a test that did not end."""
    evidence = Evidence()
    for line in _lines(path):
        evidence.fold(Event(*event) for event in line["events"])
        evidence.collected.update(line["collected"])
        evidence.needs.update((epoch, tuple(used)) for epoch, used in line["needs"])
        ran = line["ran"]
        if ran is not None:
            evidence.tests.append(Ran(ran["test"], ran["path"], ran["epoch"], tuple(ran["uses"]), ran["outcome"]))
    return evidence


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open("rb") as stream:
        for line in stream:
            if line.endswith(b"\n"):
                yield json.loads(line)
