"""What child processes did in a context, and which of them never spoke.

- A child that did anything in an epoch brings its whole life up to then, and that of the child it was forked from; a Ray worker that only
  runs tasks brings the epoch alone.
- A program that a fixture (or the session) started belongs to it for its whole life, whenever it did what it did: a server may still be
  starting while the first test runs, and the second test uses what it did then.
- A Python child that was started and never said hello is silent: its deeds are not known.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import PurePath

from seatrial.regress.select.gather.evidence import Deed
from seatrial.regress.select.trace import events as kinds
from seatrial.regress.select.trace.events import Event, Process

PYTHON = re.compile(r"^(python|pypy)[\d.]*t?$")


class Children:
    """All children of one pytest process."""

    def __init__(self, children: Sequence[tuple[Process, list[Event]]]) -> None:
        self._children = children
        self._by_log = {process.log: (process, events) for process, events in children}
        self._last: dict[int, list[tuple[str, int]]] = {}  # an epoch: children that did something in it, and where their last deed stands
        for process, events in children:
            for epoch, at in {event.epoch: at for at, event in enumerate(events)}.items():
                self._last.setdefault(epoch, []).append((process.log, at))
        self.spoke = {_key(process.argv) for process, _ in children}
        self.words = frozenset(PurePath(word).name for process, _ in children for word in process.argv)

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


def silent(deeds: Iterable[Deed], children: Children) -> Iterator[tuple[list[str], str]]:
    """Command lines and directories of Pythons that never reported."""
    for kind, a, b in deeds:
        if kind == kinds.SPAWN:
            argv = [str(word) for word in json.loads(a)]
            if is_python(argv) and _key(argv) not in children.spoke:
                yield argv, b


def is_python(argv: Sequence[str]) -> bool:
    return bool(argv) and PYTHON.match(PurePath(argv[0]).name) is not None


def unheard(paths: Iterable[str], children: Children) -> set[str]:
    """Python files that a command names, of which no child says that it ran them."""
    found = set()
    for path in paths:
        place = PurePath(path)
        names = {place.name, place.stem, place.parent.name if place.stem in ("__main__", "__init__") else place.stem}
        if not any(word in names or word.rpartition(".")[2] in names for word in children.words):
            found.add(path)
    return found


def texts(argv: Sequence[str]) -> list[str]:
    """Programs that stand on the command line itself."""
    return [text for flag, text in itertools.pairwise(argv) if flag.startswith("-") and not flag.startswith("--") and flag.endswith("c")]


def _started(deeds: Iterable[Deed]) -> set[tuple[str, ...]]:
    return {_key([str(word) for word in json.loads(a)]) for kind, a, _ in deeds if kind == kinds.SPAWN}


def _key(argv: Sequence[str]) -> tuple[str, ...]:
    """A command line without the way in which the program was named."""
    return tuple(argv[1:])
