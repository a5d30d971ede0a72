"""What comes with a file: everything that its import executes, and what was read on the way.

- Edges are those of the text united with those that were seen while the session ran.
- A file in the closure counts with its module level (all of it, if it could not be instrumented), with what its imports reach, and with the
  blocks and files that were used while it was imported, in whichever process.
- Functions that run once per process are added to every block that mentions them (`once`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

from seatrial.regress.select.files.digests import IMPORTS, LEVEL, WHOLE, Digests
from seatrial.regress.select.files.imports import closure
from seatrial.regress.select.gather.evidence import Deed
from seatrial.regress.select.gather.once import Deeds, Epoch, Once, Part, plain
from seatrial.regress.select.trace.blocks import half, number
from seatrial.regress.select.trace.events import AGAIN, BY, CALL, HELLO, LOAD, MUTE, SPAWN, STARTED, TASK, THROUGH, WRITE
from seatrial.regress.select.trace.events import WHOLE as WHOLE_FILE

INNER = re.compile(r"(\.<locals>)?\.?<(lambda|listcomp|setcomp|dictcomp|genexpr)>")
"""Code of its own in Python that belongs to the block around it."""


class Seen:
    """What all processes of a session saw of imports."""

    def __init__(self) -> None:
        self.edges: dict[str, set[str]] = {}
        self.whole: set[str] = set()
        self.loaded: set[str] = set()
        self.during: dict[str, set[Deed]] = {}
        self.outside: set[str] = set()
        """Absolute paths of modules that are neither the project's nor installed."""
        self.written: set[str] = set()
        self.kept: dict[Part, set[str]] = {}
        """A function of the project: files that other people's code read for it, and may have kept."""
        self.read: dict[Part, set[str]] = {}
        """A function: files that were read by it or for it."""
        self.calls: dict[Part, set[tuple[int, int]]] = {}
        """A function: lines of it, and the numbers of the blocks that were brought to run there."""
        self.again: set[int] = set()
        """Numbers of keepers of which not all calls are known."""

    def called(self, function: Part, calls: set[tuple[int, int]]) -> None:
        """Lines of a function, and what was brought to run there."""
        self.calls.setdefault(_around(function), set()).update(calls)

    def add(self, deed: Deed) -> None:
        kind, a, b = deed
        if kind == LOAD:
            self.loaded.add(b)
            if a:
                self.loaded.add(a)
                self.edges.setdefault(a, set()).add(b)
        elif kind in (SPAWN, MUTE, HELLO, TASK):
            return
        elif kind in (THROUGH, BY):
            path, _, function = b.partition("\0")
            self.read.setdefault(_around((path, function)), set()).add(a)
            if kind == THROUGH:
                self.kept.setdefault(_around((path, function)), set()).add(a)
        elif kind == CALL:
            path, function, line = b.split("\0")
            self.called((path, function), {(int(line), int(a))})
        elif kind == AGAIN:
            self.again.add(int(a))
        elif kind == WHOLE_FILE and a.startswith("/"):
            self.outside.add(a)
        elif kind == WHOLE_FILE and a == b:
            self.whole.add(a)
        else:
            if kind == WRITE:
                self.written.add(a)
            if b:
                self.during.setdefault(b, set()).add(deed)


def _around(function: Part) -> Part:
    """A function as blocks are called."""
    return (function[0], INNER.sub("", function[1])) if "<" in function[1] else function


class Files:
    """Which block a number stands for: first among the files that were loaded, then in the whole project."""

    def __init__(self, digests: Digests, loaded: Iterable[str]) -> None:
        self._digests = digests
        self._numbers: dict[int, Part] = {}
        self._rest: list[str] | None = None
        self._add(loaded)

    def part(self, wanted: int) -> Part | None:
        if wanted not in self._numbers and self._rest is None:
            self._rest = self._digests.project.python()
            self._add(self._rest)
        return self._numbers.get(wanted)

    def _add(self, paths: Iterable[str]) -> None:
        for path in paths:
            facts = self._digests.facts(path)
            if facts:
                file = number(path, "") ^ half("")
                self._numbers.update([(file ^ block, (path, name)) for block, name in facts.halves.items()])


def _calls(seen: Seen, files: Files) -> dict[Part, frozenset[tuple[int, Part | None]]]:
    """What functions brought to run, by line; None for a process."""
    found = {}
    for caller, told in seen.calls.items():
        parts = ((line, number, files.part(number)) for line, number in told)
        found[caller] = frozenset((line, part) for line, number, part in parts if part or number == STARTED)
    return found


class Closures:
    """Closures over one session's edges, each computed once."""

    def __init__(
        self, digests: Digests, seen: Seen, imported: dict[str, set[Part]], together: Callable[[], Sequence[Sequence[Epoch]]], files: Files
    ) -> None:
        self.digests = digests
        self._edges = seen.edges
        self._imported = imported
        self._whole = seen.whole
        self._kept = {part: {(path, WHOLE) for path in paths - seen.written} for part, paths in seen.kept.items()}
        read = {part: {(path, WHOLE) for path in paths - seen.written} for part, paths in seen.read.items()}
        self._reached: dict[frozenset[str], frozenset[str]] = {}
        self._parts: dict[frozenset[str], frozenset[Part]] = {}
        self._behind: dict[Part, frozenset[Part]] = {}
        self._before: dict[Part, frozenset[Part]] = {}
        again = frozenset(part for number in seen.again if (part := files.part(number)))
        self._once = Once(digests, self.reached, together, Deeds(_calls(seen, files), read, again))
        for path in {*seen.loaded, *imported}:
            self._once.learn(path)

    def reached(self, start: Iterable[str]) -> frozenset[str]:
        key = frozenset(start)
        if key not in self._reached:
            self._reached[key] = closure(key, self._next)
            for path in self._reached[key]:
                self._once.learn(path)
        return self._reached[key]

    def parts(self, start: Iterable[str]) -> frozenset[Part]:
        """All that importing `start` depends on."""
        key = frozenset(start)
        if key not in self._parts:
            found: set[Part] = set()
            for path in self.reached(key):
                found.update(((path, WHOLE if path in self._whole else LEVEL), (path, IMPORTS)))
                used = self._imported.get(path, set())
                found.update(used)
                for part in used:
                    found.update(self.behind(part))
                facts = self.digests.facts(path)
                found.update(self._once.behind(facts.level if facts else frozenset()))
                found.update(self._once.kept_by((path, "__getattr__")))  # of a module: nobody calls it by name
            self._parts[key] = frozenset(found)
        return self._parts[key]

    def wholes(self, start: Iterable[str]) -> frozenset[Part]:
        """The same without trusting any trace: whole files."""
        return frozenset((path, WHOLE) for path in self.reached(start)) | self.parts(start)

    def behind(self, part: Part) -> frozenset[Part]:
        """Functions that may have run once, before, on behalf of a block, and on behalf of these."""
        if self._once.stands_alone(part) and plain(part) not in self._kept:
            return frozenset()
        if part not in self._behind:
            found = {part}
            pending = [part]
            while pending:
                more = self._direct(pending.pop()) - found
                found |= more
                pending.extend(more)
            self._behind[part] = frozenset(found - {part})
        return self._behind[part]

    def _direct(self, part: Part) -> frozenset[Part]:
        """The same in one step."""
        if part not in self._before:
            facts = self.digests.facts(part[0]) if part[0].endswith(".py") else None
            mentioned = facts.mentions.get(part[1], frozenset()) if facts else frozenset()
            found = self._once.behind(mentioned) | self._once.kept_by(part)
            self._before[part] = frozenset(found | self._kept.get(plain(part), set()))
        return self._before[part]

    def _next(self, path: str) -> Iterable[str]:
        return self.digests.targets(path) | self._edges.get(path, set())
