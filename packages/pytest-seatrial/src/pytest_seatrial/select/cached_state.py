"""What a test needs that ran in another one: the work of functions that keep it.

- Some are not run again by whoever comes later (`trace.memo`; also what a decorator of the project keeps, or a call makes a cache of). They
  are found by name: a block that mentions one, under any of its names, depends on it and on all that it ran. They are also found by what
  happened: a block that brought one to run in another test depends on it, too.
- Others run again and do less (`trace.slices`): who runs one depends on what ran for the part that may be left out, in whichever test.
- What ran for a function: what it names there, what was seen to be called there, and what these called in turn. All calls under such a
  function are told each time (`Recorder`); where they were too many, names stand in for them. Only what was hit in an epoch in which the
  function itself was hit can stand behind it. Files that were read by or for these come along, what was looked for in these epochs, and,
  if a process was started, all that other processes did.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from pytest_seatrial.select.project_files import closure
from pytest_seatrial.select.source_digests import EXISTS, LISTING, WHOLE, Digests
from pytest_seatrial.select.trace import memoized
from pytest_seatrial.select.trace.instrument import Slice

Part = tuple[str, str]  # a path and a block in it
Reached = Callable[[Iterable[str]], frozenset[str]]
ASKED = "?"  # before the block of a file that was read, listed or looked for in an epoch: nothing that ran
LOOKED = (ASKED + LISTING, ASKED + EXISTS)  # questions of which nobody tells which function asked
RUN_BY_CLASS = frozenset({"__call__", "__get__", "__init__", "__set_name__"})


class Deeds(NamedTuple):
    """What functions (see `plain`) did, in whichever test."""

    calls: Mapping[Part, frozenset[tuple[int, Part | None]]]  # lines, and the blocks that were brought to run there; None for a process
    read: Mapping[Part, set[Part]]  # files that were read by or for it
    again: frozenset[Part]  # keepers that ran so often that not all of their calls are known


class Epoch(NamedTuple):
    """What was hit and asked for in an epoch: by everybody, and by other processes than pytest's own."""

    every: frozenset[Part]
    others: frozenset[Part]


class Once:
    """What is known of the files that were learned."""

    def __init__(self, digests: Digests, reached: Reached, together: Callable[[], Sequence[Sequence[Epoch]]], deeds: Deeds) -> None:
        """`together`: of every pytest process (with its children), what was hit in each epoch, in their order; asked for if needed."""
        self._digests = digests
        self._find = together
        self._deeds = deeds
        self._slices: dict[Part, list[Slice]] = {}
        self._sets: dict[str, frozenset[str]] = {}
        self._sure: set[Part] = set()
        self._meant: dict[Part, tuple[Part, ...]] = {}
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
        self._slices.clear()
        for name, words in facts.setters.items():
            self._sets[name] = self._sets.get(name, frozenset()) | words
        for block in facts.sticky:
            self._add((path, block))
        for block in {*facts.sticky, *facts.keepers}:
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

    def stands_alone(self, part: Part) -> bool:
        """Whether nothing at all can be behind a block; quick, since most are so."""
        facts = self._digests.facts(part[0]) if part[0].endswith(".py") else None
        if facts is None:
            return True
        if part[1] in facts.keepers or part[1] in facts.sticky or part in self._sure:
            return False
        if self._sure and not self._sure.isdisjoint(self._callees(part)):
            return False
        names = facts.mentions.get(part[1], frozenset())
        return names.isdisjoint(self._aliases) and names.isdisjoint(self._sticky) and names.isdisjoint(self._kept)

    def behind(self, names: frozenset[str]) -> set[Part]:
        """Functions that may have run before on behalf of a block that mentions these names."""
        wanted = set(names).union(*(self._lead(name) for name in names & self._aliases.keys()))
        first = {part for name in wanted & self._sticky.keys() for part in self._sticky[name]}
        for name in wanted & self._kept.keys():
            for path, words in self._kept[name]:
                makers = {word for word in words if any(one in word.lower() for one in memoized.WORDS)}
                # Whoever uses a cache that something of the project makes runs that.
                if not makers or not all(map(self.knows, makers)):
                    first.update(self._functions(path, words))
        return set().union(*(self._called(part) for part in first))

    def slices(self, part: Part) -> list[Slice]:
        """What a keeper may leave out. What was told something by a method of the project keeps it only if that sets what is asked."""
        if part not in self._slices:
            facts = self._digests.facts(part[0]) if part[0].endswith(".py") else None
            some = facts.keepers.get(part[1], ()) if facts else ()
            self._slices[part] = [one for one in some if not one.told or self._shows(one)]
        return self._slices[part]

    def _shows(self, told: Slice) -> bool:
        """Whether what a method was told may show in what is asked; only the project's own are known."""
        if "" in told.asked or not self.knows(told.told):
            return True
        words = told.asked.union(*(self._digests.mentions(*part) for name in told.asked for part in self._under(name)))
        return any(
            not words.isdisjoint(self._sets.get(_calls(part[1])[0], frozenset())) for part in self._under(told.told) if _calls(part[1])
        )

    def _under(self, name: str) -> frozenset[Part]:
        """Functions of this name, and what they were seen to call, over any number of steps."""
        return closure((part for named in self._named.values() for part in named.get(name, ())), self._callees)

    def _callees(self, part: Part) -> list[Part]:
        return [callee for _, callee in self._deeds.calls.get(plain(part), ()) if callee]

    def knows(self, name: str) -> bool:
        return any(name in named for named in self._named.values())

    def kept_by(self, part: Part) -> set[Part]:
        """What a block that ran may have kept from another test, or got from one that nobody runs again."""
        first = self._sure.intersection(self._callees(part))
        if part in self._sure or self.slices(part):
            first.add(part)
        return set().union(*(self._called(one) for one in first))

    @functools.cached_property
    def _together(self) -> list[Epoch]:
        return [epoch for process in self._find() for epoch in process]

    @functools.cached_property
    def _epochs(self) -> dict[Part, list[int]]:
        found: dict[Part, list[int]] = {}
        for number, epoch in enumerate(self._together):
            for part in epoch.every:
                found.setdefault(part, []).append(number)
        return found

    def _called(self, start: Part) -> frozenset[Part]:
        """What a function may have run that others need and do not run again; nothing if it did not run."""
        if start not in self._from:
            epochs = self._epochs.get(start, self._epochs.get((start[0], WHOLE), ()))
            ran = set().union(*(self._together[number].every for number in epochs))
            found = self._brought(start, ran)
            if self._whole(start) and epochs:
                found.add(start)
            known = [part for part in (start, *found) if part[0].endswith(".py")]
            found.update(*(self._deeds.read.get(plain(part), ()) for part in known))
            if epochs:
                found.update((path, block.removeprefix(ASKED)) for path, block in ran if block in LOOKED)
            if any(callee is None for part in known for _, callee in self._deeds.calls.get(plain(part), ())):
                others = set().union(*(self._together[number].others for number in epochs))
                found.update((path, block.removeprefix(ASKED)) for path, block in others)
            self._from[start] = frozenset(found)
        return self._from[start]

    def _whole(self, part: Part) -> bool:
        """Whether all of a function is left out by those who come later, not a part of it."""
        return part in self._sure or not self.slices(part)

    def _brought(self, start: Part, ran: set[Part]) -> set[Part]:
        """What ran for a function: what it names, and what was brought to run by it and by these in turn. Where not all calls are told,
        names stand in for them."""
        facts = self._digests.facts(start[0])
        told = facts is not None and start not in self._deeds.again and (start[1] in facts.sticky or start[1] in facts.keepers)
        if self._whole(start):
            pending = [*self._mentioned(start), *self._callees(start)]
        else:
            calls = self._deeds.calls.get(plain(start), frozenset())
            lines = frozenset[int]().union(*(one.lines for one in self.slices(start)))
            names = frozenset[str]().union(*(one.mentions for one in self.slices(start)))
            pending = [*self._functions(start[0], names), *(callee for line, callee in calls if callee and line in lines)]
        files = {path for path, block in ran if block == WHOLE}

        def ran_for(part: Part) -> list[Part]:
            some = [*self._callees(part), *(() if told else self._mentioned(part))]
            return [one for one in some if one in ran or one[0] in files]

        return set(closure((part for part in pending if part in ran or part[0] in files), ran_for))

    def _mentioned(self, part: Part) -> tuple[Part, ...]:
        """Functions that a block may mean."""
        if part not in self._meant:
            self._meant[part] = tuple(self._functions(part[0], self._digests.mentions(*part)))
        return self._meant[part]

    def _lead(self, name: str) -> frozenset[str]:
        """Which of the names that matter here another name stands for, over any number of steps."""
        if name not in self._leads:
            seen = closure([name], lambda one: self._aliases.get(one, ()))
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
