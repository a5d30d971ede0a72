"""What child processes did in a context, and which of them never spoke.

- A child that did anything in an epoch brings its whole life up to then, and that of the child it was forked from; a Ray worker that only
  runs tasks brings the epoch alone.
- A program that a fixture (or the session) started belongs to it for its whole life, whenever it did what it did: a server may still be
  starting while the first test runs, and the second test uses what it did then.
- A Python child that was started and did not say hello is silent: its deeds are not known. They are counted, by command line and epoch:
  another test's child with the same command line does not speak for this one's. A child may be slow to say hello, so those that spoke in
  a later epoch stand for those that are missing, if there are enough of them.
"""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import PurePath

from seatrial.regress.select.gather.evidence import Deed
from seatrial.regress.select.trace import events as kinds
from seatrial.regress.select.trace.events import Event, Process

PYTHON = re.compile(r"^(python|pypy)[\d.]*t?$")


class Children:
    """All children of one pytest process."""

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

    def unheard(self, paths: Mapping[str, int], epochs: Iterable[int]) -> set[str]:
        """Python files that commands name, of which fewer children say that they ran them, in these epochs, than there were commands."""
        if not paths:
            return set()
        words: Counter[str] = Counter()
        for epoch in epochs:
            words.update(self._words.get(epoch, {}))
        found = set()
        for path, times in paths.items():
            place = PurePath(path)
            names = {place.name, place.stem, place.parent.name if place.stem in ("__main__", "__init__") else place.stem}
            if max(words[name] for name in names) < times:
                found.add(path)
        return found

    def epochs(self, until: int) -> list[int]:
        return [epoch for epoch in self._words if epoch <= until]

    def lives(self, epoch: int) -> tuple[list[Deed], bool]:
        """What belongs to an epoch, and whether something of it was lost."""
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
        for log, _ in self._last.get(epoch, ()):
            process, events = self._by_log[log]
            if process.kind.startswith("ray") and any(event.kind == kinds.HIT and event.epoch == epoch for event in events):
                return True
        return False

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
