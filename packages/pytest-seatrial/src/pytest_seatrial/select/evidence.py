"""What one pytest process and its children saw; xdist workers write it to a file and the controller reads it."""

from __future__ import annotations

import itertools
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any, NamedTuple

from pytest_seatrial.select.trace import trace_events as kinds
from pytest_seatrial.select.trace.instrument import KEEPS
from pytest_seatrial.select.trace.trace_events import HIT, Event, KeptWork, Process

ASIDE = 1  # our own work, which belongs to nobody
BASE = 0  # outside of any test, fixture or import: belongs to every test
Deed = tuple[str, str, str]  # kind, a, b of an event


class RanTest(NamedTuple):
    """One test that ended, with the epochs of the contexts that it used."""

    test: str
    path: str
    epoch: int
    uses: tuple[int, ...]
    outcome: str  # passed, skipped, failed, or left (out by a guard)


class Evidence:
    """Everything from one pytest process and its children."""

    def __init__(self) -> None:
        self.hits: dict[int, list[int]] = {}  # by epoch: numbers of blocks that were entered while no module was imported
        self.calls: dict[tuple[str, str], set[tuple[int, int]]] = {}
        """A file and a function in it: lines, and the numbers of the blocks that were brought to run there."""
        self.deeds: dict[int, dict[Deed, None]] = {}  # by epoch: all the rest
        self.tests: list[RanTest] = []
        self.collected: set[str] = set()
        self.needs: dict[int, tuple[int, ...]] = {}  # what a fixture's context uses itself
        self.children: list[tuple[Process, list[Event]]] = []
        self._same: dict[Deed, Deed] = {}

    def fold(self, kept: KeptWork) -> None:
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


class EvidenceJournal:
    """Where a process puts what it saw: into `evidence`, or into a file when it is a worker.

    While tests run nothing is made that the garbage collector looks at: it would look through all objects of the session more often.
    """

    def __init__(self, path: Path | None) -> None:
        self.evidence = Evidence()
        self._kept: list[Any] = []  # the fields of one `Ran` after the other
        self._handle = None if path is None else os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def add(self, drain: Callable[[], KeptWork], ran: RanTest | None, needs: dict[int, tuple[int, ...]]) -> None:
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
        found, self.evidence = self.evidence, Evidence()
        fields = iter(self._kept)
        found.tests.extend(map(RanTest, fields, fields, fields, fields, fields))
        self._kept = []
        return found

    def close(self) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


def read_evidence(path: Path) -> Evidence:
    """The evidence of a worker; a torn last line belongs to a test that did not end. A ValueError for a line that cannot be read: what it
    told may belong to any test, so nothing of this session may be recorded."""
    evidence = Evidence()
    for number, text in enumerate(path.read_bytes().split(b"\n")[:-1], 1):
        try:
            line = json.loads(text)  # not guarded: names of files that are no text must stay what they are
            evidence.fold(KeptWork(*line["did"]))
            evidence.collected.update(line["collected"])
            evidence.needs.update((epoch, tuple(used)) for epoch, used in line["needs"])
            if (ran := line["ran"]) is not None:
                evidence.tests.append(RanTest(ran["test"], ran["path"], ran["epoch"], tuple(ran["uses"]), ran["outcome"]))
        except (RecursionError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path.name} of {path.parent.name}, line {number}: not what a worker writes: {error}") from error
    return evidence


PYTHON = re.compile(r"^(python|pypy)[\d.]*t?$")


class Children:
    def __init__(self, children: Sequence[tuple[Process, list[Event]]], deeds: Mapping[int, Iterable[Deed]]) -> None:
        """`deeds`: what the pytest process did, by epoch."""
        self._quiet = _quiet(children, deeds)
        children = self._children = [(process, list(self._marked(events))) for process, events in children]
        self._by_log = {process.log: (process, events) for process, events in children}
        self._last: dict[int, list[tuple[str, int]]] = {}  # an epoch: children that did something in it, and where their last deed stands
        for process, events in children:
            for epoch, at in {event.epoch: at for at, event in enumerate(events)}.items():
                self._last.setdefault(epoch, []).append((process.log, at))
        self._words: dict[int, Counter[str]] = {}  # an epoch: names on the command lines of those that said hello in it
        for process, events in children:
            if events and process.kind != "fork":
                found = {PurePath(word).name for part in process.argv for word in part.split()}
                self._words.setdefault(events[0].epoch, Counter()).update(found | {name.rpartition(".")[2] for name in found})

    def _marked(self, events: Iterable[Event]) -> Iterator[Event]:
        for event in events:
            yield event
            if event.kind == kinds.SPAWN and (event.epoch, _key(_argv(event.a))) in self._quiet:
                yield event._replace(kind=kinds.MUTE)

    def own(self, epoch: int, deeds: Iterable[Deed]) -> list[Deed]:
        """What the pytest process did, with a mark for each child of its that did not speak."""
        if not self._quiet:
            return list(deeds)
        return [(kind, a, b) for kind, _, a, b in self._marked(Event(kind, epoch, a, b) for kind, a, b in deeds)]

    def unheard(self, paths: Mapping[str, int], epoch: int, *, before: bool) -> set[str]:
        """Python files that commands name, of which fewer children say that they ran them, in this epoch (or also before), than there were
        commands."""
        words: Counter[str] = Counter()
        for at in [one for one in self._words if one == epoch or (before and one < epoch)]:
            words.update(self._words[at])
        found = set()
        for path, times in paths.items():
            place = PurePath(path)
            names = {place.name, place.stem, place.parent.name if place.stem in ("__main__", "__init__") else place.stem}
            if max(words[name] for name in names) < times:
                found.add(path)
        return found

    def lives(self, epoch: int) -> tuple[list[Deed], bool]:
        found: dict[Deed, None] = {}
        torn = False
        for log, at in self._last.get(epoch, ()):
            process, events = self._by_log[log]
            torn = torn or bool(process.trouble)
            if process.kind == kinds.RAY_TASK:
                mine = [event for event in events if event.epoch == epoch]
            else:
                mine = [*self._before(process, epoch), *events[: at + 1]]
            found.update(dict.fromkeys((event.kind, event.a, event.b) for event in mine))
        return list(found), torn

    def worked(self, epoch: int) -> bool:
        """Whether a Ray worker ran a block of the project in this epoch."""
        lives = (self._by_log[log] for log, _ in self._last.get(epoch, ()))
        return any(
            process.kind.startswith("ray") and any(event.kind == kinds.HIT and event.epoch == epoch for event in events)
            for process, events in lives
        )

    def born(self, epoch: int, deeds: Iterable[Deed]) -> list[Deed]:
        """The whole lives of programs that were started in an epoch, with those that they started in turn."""
        if not self._children:
            return []
        keys = _started(deeds)
        taken: dict[str, list[Event]] = {}
        grown = True
        while grown:
            grown = False
            for process, events in self._children:
                first = bool(events) and events[0].epoch == epoch
                if process.log in taken or not (
                    (process.kind == "python" and (first or _key(process.argv) in keys)) or (process.parent and process.parent in taken)
                ):
                    continue
                taken[process.log] = events
                keys |= _started((event.kind, event.a, event.b) for event in events)
                grown = True
        return list(dict.fromkeys((event.kind, event.a, event.b) for events in taken.values() for event in events))

    def _before(self, process: Process, epoch: int) -> list[Event]:
        """The life of the children that this one was forked from."""
        found: list[Event] = []
        seen = {process.log}
        while process.parent and process.parent not in seen and process.parent in self._by_log:
            process, events = self._by_log[process.parent]
            seen.add(process.log)
            found.extend(event for event in events if event.epoch <= epoch)
        return found


def _quiet(children: Sequence[tuple[Process, list[Event]]], deeds: Mapping[int, Iterable[Deed]]) -> set[tuple[int, tuple[str, ...]]]:
    """Epochs and command lines of which more Pythons were started than said hello."""
    spawned = [(epoch, a) for epoch, found in deeds.items() for kind, a, _ in found if kind == kinds.SPAWN]
    spawned += [(event.epoch, event.a) for _, events in children for event in events if event.kind == kinds.SPAWN]
    missing = Counter((epoch, _key(_argv(a))) for epoch, a in spawned if is_python(_argv(a)))
    spoke = Counter((events[0].epoch, _key(process.argv)) for process, events in children if events and process.kind != "fork")
    both = missing & spoke
    missing, late = missing - both, spoke - both
    found = set()
    for epoch, key in missing:
        wanted = sum(times for (_, one), times in missing.items() if one == key)
        after = sum(times for (at, one), times in late.items() if one == key and at > epoch)
        if after < wanted:
            found.add((epoch, key))
    return found


def silent(deeds: Iterable[Deed]) -> Iterator[tuple[list[str], str]]:
    """Command lines and directories of Pythons that never reported."""
    for kind, a, b in deeds:
        if kind == kinds.MUTE and is_python(_argv(a)):
            yield _argv(a), b.partition("\0")[0]


def _argv(text: str) -> list[str]:
    return [str(word) for word in json.loads(text)]


def is_python(argv: Sequence[str]) -> bool:
    return bool(argv) and PYTHON.match(PurePath(argv[0]).name) is not None


def texts(argv: Sequence[str]) -> list[str]:
    """Programs that stand on the command line itself."""
    return [text for flag, text in itertools.pairwise(argv) if flag.startswith("-") and not flag.startswith("--") and flag.endswith("c")]


def _started(deeds: Iterable[Deed]) -> set[tuple[str, ...]]:
    return {_key(_argv(a)) for kind, a, _ in deeds if kind == kinds.SPAWN}


def _key(argv: Sequence[str]) -> tuple[str, ...]:
    """A command line without the way in which the program was named."""
    return tuple(argv[1:])
