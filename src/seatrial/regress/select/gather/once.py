"""Functions that run once per process (caches, writers of globals): recorded for the first caller, needed by all.

- They are found by name: a block that mentions such a function, under any of its names, depends on it and, since nobody runs them again
  either, on the functions that it mentions in turn. They are also found by what happened: a block that brought one to run in another
  test, or that is one itself, depends on all that it brought to run.
- Whatever filled a cache of this session ran in it: what a function has called was hit in an epoch in which it was hit itself. So only what
  was hit together with it can stand behind it; a name that means many functions brings no others. Files that were read in such an epoch
  may be what it kept, and come along; of a keeper (below), those that were read by or for what stands behind it.
- A function is of this kind by its own text (`trace.memo`), by a decorator of the project that keeps what it got, or by a call that makes
  a cache of it. One that runs again and may do less then (`keepers`) is not looked for by name: who uses it runs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from seatrial.regress.select.files.digests import WHOLE, Digests

Part = tuple[str, str]  # a path and a block in it
Reached = Callable[[Iterable[str]], frozenset[str]]
ASKED = "?"
"""Before the block of a file that was read, listed or looked for in an epoch: nothing that ran."""
EARLY = 2
"""A fixture is set up in an epoch of its own, within that of the test which asks for it first."""
RUN_BY_CLASS = frozenset({"__call__", "__get__", "__init__", "__set_name__"})


class Deeds(NamedTuple):
    """What functions (see `plain`) did, in whichever test: the blocks that they brought to run, the files that were read by or for them."""

    calls: Mapping[Part, frozenset[Part]]
    read: Mapping[Part, set[Part]]


class Once:
    """What is known of the files that were learned."""

    def __init__(self, digests: Digests, reached: Reached, together: Sequence[Sequence[frozenset[Part]]], deeds: Deeds) -> None:
        """`together`: of every pytest process (with its children), what was hit in each epoch, in their order."""
        self._digests = digests
        self._together = [parts for process in together for parts in process]
        self._process = [number for number, process in enumerate(together) for _ in process]
        self._deeds = deeds
        self._again: set[Part] = set()
        self._sure: set[Part] = set()
        self._meant: dict[Part, tuple[Part, ...]] = {}
        self._epochs: dict[Part, list[int]] = {}
        for number, parts in enumerate(self._together):
            for part in parts:
                self._epochs.setdefault(part, []).append(number)
        self._from: dict[Part, frozenset[Part]] = {}
        self._reached = reached
        self._named: dict[str, dict[str, list[Part]]] = {}
        self._sticky: dict[str, set[Part]] = {}
        self._aliases: dict[str, set[str]] = {}
        self._kept: dict[str, set[tuple[str, frozenset[str]]]] = {}  # a name that holds a cache: where, and of what
        self._keepers: set[str] = set()
        self._decorated: dict[str, set[Part]] = {}
        self._leads: dict[str, frozenset[str]] = {}

    def learn(self, path: str) -> None:
        """Index the functions of a file by the names under which others mention them."""
        if path in self._named:
            return
        names = self._named[path] = {}
        facts = self._digests.facts(path) if path.endswith(".py") else None
        if facts is None:
            return
        self._leads.clear()
        self._from.clear()
        self._meant.clear()
        for block in facts.blocks:
            for name in _calls(block):
                names.setdefault(name, []).append((path, block))
        for name, words in facts.other.aliases.items():
            self._aliases.setdefault(name, set()).update(words)
            if name in facts.other.kept:
                self._kept.setdefault(name, set()).add((path, words))
        self._again.update((path, block) for block in facts.keepers)
        for block in facts.sticky:
            self._add((path, block))
            for name in _owners(block) - self._keepers:
                self._keepers.add(name)
                for part in self._decorated.get(name, ()):
                    self._add(part)
        for block, words in facts.other.decorators.items():
            for name in words:
                self._decorated.setdefault(name, set()).add((path, block))
                if name in self._keepers:
                    self._add((path, block))

    def _add(self, part: Part) -> None:
        self._sure.add(part)
        for name in _calls(part[1]):
            self._sticky.setdefault(name, set()).add(part)

    def behind(self, names: frozenset[str]) -> set[Part]:
        """Functions that may have run before on behalf of a block that mentions these names."""
        wanted = set(names).union(*(self._lead(name) for name in names & self._aliases.keys()))
        first = {part for name in wanted & self._sticky.keys() for part in self._sticky[name]}
        for name in wanted & self._kept.keys():
            for path, words in self._kept[name]:
                first.update(self._functions(path, words))
        return set().union(*(self._called(part) for part in first))

    def kept_by(self, part: Part) -> set[Part]:
        """What a block that ran may have kept from another test, or got from one that did."""
        first = (self._deeds.calls.get(plain(part), frozenset()) | {part}) & (self._sure | self._again)
        return set().union(*(self._called(one) for one in first))

    def _called(self, start: Part) -> frozenset[Part]:
        """A function, and what it may have called when it ran; nothing if it did not run."""
        if start not in self._from:
            epochs = self._epochs.get(start, self._epochs.get((start[0], WHOLE), ()))
            ran = set().union(*(self._together[number] for number in epochs))
            files = {path for path, block in ran if block == WHOLE}
            found: set[Part] = set()
            pending = [start]
            while pending:
                part = pending.pop()
                if part not in found and (part in ran or part[0] in files):
                    found.add(part)
                    pending.extend(self._mentioned(part))
            found.update(self._brought(start, epochs))
            if start not in self._sure:
                found.update(*(self._deeds.read.get(plain(part), ()) for part in found))
            elif found:
                found.update((path, block.removeprefix(ASKED)) for path, block in ran if block.startswith(ASKED))
            self._from[start] = frozenset(found)
        return self._from[start]

    def _brought(self, start: Part, epochs: Iterable[int]) -> set[Part]:
        """What a function brought to run when it ran first in each process: a value is made then. What others brought it to run later,
        as with anything that calls whatever it is given, is theirs."""
        times: dict[int, int] = {}
        ran: set[Part] = set()
        for number in epochs:
            process = self._process[number]
            times[process] = times.get(process, 0) + 1
            if times[process] <= EARLY:
                ran |= self._together[number]
        found: set[Part] = set()
        pending = [start]
        while pending:
            part = pending.pop()
            if part in ran and part not in found:
                found.add(part)
                pending.extend(self._deeds.calls.get(plain(part), ()))
        return found

    def _mentioned(self, part: Part) -> tuple[Part, ...]:
        """Functions that a block may mean."""
        if part not in self._meant:
            facts = self._digests.facts(part[0])
            names = facts.mentions.get(part[1], frozenset()) if facts else frozenset[str]()
            self._meant[part] = tuple(self._functions(part[0], names))
        return self._meant[part]

    def _lead(self, name: str) -> frozenset[str]:
        """Which of the names that matter here another name stands for, over any number of steps."""
        if name not in self._leads:
            seen: set[str] = set()
            pending = [name]
            while pending:
                one = pending.pop()
                if one not in seen:
                    seen.add(one)
                    pending.extend(self._aliases.get(one, ()))
            self._leads[name] = frozenset(one for one in seen if one in self._sticky or one in self._kept)
        return self._leads[name]

    def _functions(self, path: str, names: frozenset[str]) -> Iterable[Part]:
        """Functions that a block of `path` means by these names."""
        facts = self._digests.facts(path)
        aliases = facts.other.aliases if facts else {}
        meant = names.union(*(aliases[name] for name in names & aliases.keys()))
        for other in self._reached([path]):
            known = self._named.get(other, {})
            for name in meant & known.keys():
                yield from known[name]


def plain(part: Part) -> Part:
    """A block as Python names it: the second function of one name has the same name."""
    return part[0], part[1].partition("#")[0]


def _owners(block: str) -> set[str]:
    """Names of decorators whose inner function, or whose instances, do the keeping."""
    parts = block.split(".")
    found = {parts[at - 1].partition("#")[0] for at, part in enumerate(parts) if part == "<locals>" and at}
    if len(parts) > 1 and parts[-1].partition("#")[0] in RUN_BY_CLASS:
        found.add(parts[-2])
    return found - {"<locals>"}


def _calls(block: str) -> list[str]:
    """Names that lead to a function: its own, and its class's for what runs by itself (`__init__`, `__enter__`)."""
    parts = [part.partition("#")[0] for part in block.split(".") if part != "<locals>"]
    if not parts or not parts[-1].isidentifier():
        return []
    dunder = parts[-1].startswith("__") and parts[-1].endswith("__")
    return parts[-2:] if dunder else parts[-1:]
