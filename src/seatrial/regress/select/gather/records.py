"""From evidence to records: the dependencies of every test that ended.

- A context is a test, the value of a fixture, the collection of a file, or the base; each becomes a set of its own, shared by its users.
- What a child did in a context belongs to it, with all that the child had done before (a server, an actor, a pool keep state), except for
  Ray workers that only run tasks.
- Where a trace is missing (a Python child that never reported, a torn log, `.remote(` without a worker), whole files stand in for it.
"""

from __future__ import annotations

import ast
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from seatrial.regress.select.files import shell
from seatrial.regress.select.files.digests import ABSENT, EXISTS, LEVEL, LISTING, UNSETTLED, WHOLE, Digests, Version
from seatrial.regress.select.files.imports import imports, packages_above, resolve
from seatrial.regress.select.files.project import stamp
from seatrial.regress.select.gather import once
from seatrial.regress.select.gather.children import Children, is_python, silent, texts
from seatrial.regress.select.gather.closure import Closures, Files, Seen
from seatrial.regress.select.gather.evidence import BASE, Deed, Evidence, Ran
from seatrial.regress.select.gather.once import Part
from seatrial.regress.select.state import Outcome
from seatrial.regress.select.trace import events as kinds

VERSION = frozenset({"-V", "-VV", "--version", "--help", "-h"})
OF_EPOCH = frozenset({kinds.LOAD, kinds.SPAWN, kinds.MUTE})
ASKED = {kinds.READ: WHOLE, kinds.WHOLE: WHOLE, kinds.LIST: LISTING, kinds.EXISTS: EXISTS}


@dataclass(slots=True)
class Own:
    """What one context itself depends on; `seeds` are files whose import comes with it."""

    parts: set[Part] = field(default_factory=set)
    seeds: set[str] = field(default_factory=set)
    written: set[str] = field(default_factory=set)
    blind: bool = False  # something of it was not traced
    named: dict[str, int] = field(default_factory=dict)  # Python files that other programs were told to run, and how often
    untraced: set[str] = field(default_factory=set)  # those that ran without being traced


class Common(NamedTuple):
    """Dependencies that are no files: two of every test, and one of those that were skipped, which is found when it is needed."""

    options: Version
    command: Version
    surroundings: Callable[[], Version]

    def now(self, block: str) -> str:
        """The digest of one of them."""
        for _, name, digest in (self.options, self.command):
            if name == block:
                return digest
        _, name, digest = self.surroundings()
        return digest if name == block else ABSENT


@dataclass(frozen=True, slots=True)
class _Shared:
    """What tests of one file that use the same contexts have in common; `seeds` need not be followed again."""

    written: set[str]
    blind: bool
    files: frozenset[str]
    seeds: frozenset[str]
    around: tuple[frozenset[Version], ...]
    contexts: tuple[frozenset[Version], ...]


class Recorder:
    """Records of one session, over the evidence of all its pytest processes."""

    def __init__(self, digests: Digests, evidence: Sequence[Evidence], inputs: Sequence[str], given: Common) -> None:
        self._digests = digests
        self._project = digests.project
        self._inputs = inputs
        self._given = given
        self._versions: dict[frozenset[Part], frozenset[Version]] = {}
        self._one: dict[Part, Version] = {}
        self._simple: dict[str, Version | None] = {}
        self._common: dict[bool, frozenset[Version]] = {}
        self._around: dict[str, tuple[frozenset[str], frozenset[Part]]] = {}
        seen = self._seen = Seen()
        for one in evidence:
            for deed in dict.fromkeys(deed for deeds in one.deeds.values() for deed in deeds if deed[0] != kinds.HIT or deed[2]):
                seen.add(deed)
            for _, events in one.children:
                for kind, _, a, b in events:
                    seen.add((kind, a, b))
        self._files = Files(digests, seen.loaded | set(seen.during))
        during = {path: self._during(deeds) for path, deeds in seen.during.items()}
        self._closures = Closures(digests, seen, during, lambda: [self._together(one) for one in evidence], self._files)
        self._everywhere = frozenset(self._outside())

    def outcomes(self, evidence: Evidence) -> list[Outcome]:
        """What is to be written about every test of one pytest process."""
        return _Session(self, evidence).outcomes()

    def _together(self, evidence: Evidence) -> list[once.Epoch]:
        """What was hit and asked for in each epoch, in whichever process and import."""
        own = self._happened((epoch, kind, a) for epoch, deeds in evidence.deeds.items() for kind, a, _ in deeds)
        theirs = self._happened((epoch, kind, a) for _, events in evidence.children for kind, epoch, a, _ in events)
        none = frozenset[Part]()
        return [once.Epoch(own.get(one, none) | theirs.get(one, none), theirs.get(one, none)) for one in sorted({*own, *theirs})]

    def _happened(self, deeds: Iterable[tuple[int, str, str]]) -> dict[int, frozenset[Part]]:
        found: dict[int, set[Part]] = {}
        for epoch, kind, a in deeds:
            if kind == kinds.HIT:
                part = self._files.part(int(a))
                if part is not None:
                    found.setdefault(epoch, set()).add(part)
            elif kind == kinds.WHOLE and not a.startswith("/"):
                found.setdefault(epoch, set()).add((a, WHOLE))
            elif kind in ASKED and a not in self._seen.written and not self._project.foreign(a) and not a.startswith("/"):
                found.setdefault(epoch, set()).add((a, once.ASKED + ASKED[kind]))
        return {epoch: frozenset(parts) for epoch, parts in found.items()}

    def _during(self, deeds: Iterable[Deed]) -> set[Part]:
        own = Own()
        for deed in deeds:
            self.take(own, deed)
        return own.parts

    def take(self, own: Own, deed: Deed) -> None:
        """Add one thing that happened to what a context depends on."""
        kind, a, b = deed
        if kind == kinds.HIT:
            part = self._files.part(int(a))
            if part is None:
                own.blind = True
            else:
                own.parts.add(part)
                own.seeds.add(part[0])
        elif kind == kinds.LOAD:
            if not a:
                own.seeds.add(b)
        elif kind == kinds.WRITE:
            own.written.add(a)
        elif kind == kinds.FIRST:
            if a.endswith(".py") and a in self._project.stamps:
                own.parts.add((a, LEVEL))
        elif kind in (kinds.SPAWN, kinds.MUTE):
            self._command(own, kind, [str(word) for word in json.loads(a)], b.partition("\0")[0])
        elif kind == kinds.WHOLE and a.startswith("/"):
            return  # of every test
        elif kind in ASKED and a not in own.written and not self._project.foreign(a):
            own.parts.add((a, ASKED[kind]))
            if kind == kinds.WHOLE or (kind == kinds.READ and a in self._seen.edges):  # it was read and run, and imported something
                own.seeds.add(a)

    def _command(self, own: Own, kind: str, argv: list[str], place: str) -> None:
        """A program was started: files that it was told to use."""
        here = self._project.relative(place) or ""
        paths = shell.named(argv, self._project, here, python=is_python(argv))
        bare = kind == kinds.MUTE or shell.hides(argv, paths, self._project)
        for path in paths:
            own.parts.add((path.rstrip("/"), LISTING if path.endswith("/") else WHOLE))
            if path.endswith(".py") and not is_python(argv):
                own.named[path] = own.named.get(path, 0) + 1
                if bare:
                    own.untraced.add(path)

    def _outside(self) -> Iterator[Version]:
        """Modules that lie elsewhere and are not installed; those that a test made for itself, in a temporary place, are its own."""
        temporary = os.path.realpath(tempfile.gettempdir()) + "/"
        for path in self._seen.outside:
            found = stamp(Path(path))
            if found is not None and found[1] < self._project.began:
                yield self._digests.version(path, WHOLE)
            elif not path.startswith(temporary):
                yield path, WHOLE, UNSETTLED

    def unseen(self, argv: Sequence[str], place: str) -> set[str]:
        """Python files that a silent Python may have run: what its command line names, and what a text on it imports. A program of which
        nothing is known (a script from elsewhere, with the project on its path) may run any."""
        here = self._project.relative(place) or ""
        programs = texts(argv)
        named = {path for path in shell.named(argv[1:], self._project, here, python=True) if path.endswith(".py")}
        if not programs and not named and not VERSION.intersection(argv):
            return set(self._project.python())
        return named | self._imported(programs, place)

    def _imported(self, programs: Iterable[str], place: str) -> set[str]:
        """What the text of a program would import; all Python files if it cannot be read."""
        found: set[str] = set()
        for text in programs:
            try:
                tree = ast.parse(text)
            except (SyntaxError, ValueError):
                return set(self._project.python())
            here = self._project.relative(place) or ""
            found |= resolve(f"{here}/-c" if here else "-c", imports(tree), self._project)
        return found

    def finish(self, own: Own) -> frozenset[Part]:
        """The set of a context: its parts, what may have run before on their behalf, and whole files where it is blind."""
        parts = set(own.parts)
        for part in own.parts:
            parts.update(self._closures.behind(part))
        if own.untraced:
            parts.update(self._closures.wholes(own.untraced))
        if own.blind:
            parts.update(self._closures.wholes(own.seeds | {path for path, _ in own.parts if path.endswith(".py")}))
        return frozenset(parts)

    def remote(self, own: Own) -> bool:
        """Whether a block that ran sends work to Ray."""
        return any(map(self._sends, own.parts))

    def _sends(self, part: Part) -> bool:
        facts = self._digests.facts(part[0]) if part[0].endswith(".py") else None
        return bool(facts and facts.remote and (part[1] in facts.remote or part[1] == WHOLE))

    def simple(self, number: str) -> Version | None:
        """The block of a number, if it brings nothing but itself."""
        if number not in self._simple:
            part = self._files.part(int(number))
            plain = part is not None and not self._sends(part) and not self._closures.behind(part)
            self._simple[number] = self._version(part) if part is not None and plain else None
        return self._simple[number]

    def versions(self, parts: frozenset[Part]) -> frozenset[Version]:
        if parts not in self._versions:
            self._versions[parts] = frozenset([self._one.get(part) or self._version(part) for part in parts])
        return self._versions[parts]

    def _version(self, part: Part) -> Version:
        found = self._one[part] = self._digests.version(*part)
        return found

    def around(self, path: str) -> tuple[frozenset[str], frozenset[Part]]:
        """What pytest takes with a test file: files to import, and what would change that if it appeared."""
        if path not in self._around:
            self._around[path] = self._find_around(path)
        return self._around[path]

    def _find_around(self, path: str) -> tuple[frozenset[str], frozenset[Part]]:
        seeds = {path} if path in self._project.stamps else set()
        parts: set[Part] = {(path, WHOLE)} if path and not path.endswith(".py") else set()
        directory = path
        while directory:
            directory = directory.rpartition("/")[0]
            for name in ("conftest.py", "__init__.py"):
                file = f"{directory}/{name}" if directory else name
                if file not in self._project.stamps:
                    parts.add((file, WHOLE))
                elif name == "conftest.py":
                    seeds.add(file)
        return frozenset(seed for seed in seeds if seed.endswith(".py")), frozenset(parts)

    def base_seeds(self, seeds: set[str], collected: set[str]) -> set[str]:
        """What was imported for everybody: not the test files, their packages and conftests, which have their own users."""
        packages = {init for path in collected for init in packages_above(path, self._project)}
        return {seed for seed in seeds - collected - packages if not seed.endswith("conftest.py")}

    def common(self, *, skipped: bool) -> frozenset[Version]:
        if skipped not in self._common:
            inputs = frozenset((path, WHOLE) for path in self._project.matching(self._inputs))
            given = {self._given.options, self._given.command, *([self._given.surroundings()] if skipped else [])}
            self._common[skipped] = self.versions(inputs) | self._everywhere | given
        return self._common[skipped]

    @property
    def closures(self) -> Closures:
        return self._closures


class _Session:
    """One pytest process."""

    def __init__(self, recorder: Recorder, evidence: Evidence) -> None:
        self._recorder = recorder
        self._evidence = evidence
        self._children = Children(evidence.children, evidence.deeds)
        self._own: dict[int, Own] = {}
        self._sets: dict[int, frozenset[Part]] = {}
        self._shared: dict[tuple[str, tuple[int, ...]], _Shared] = {}

    def outcomes(self) -> list[Outcome]:
        base = self._base()
        last: dict[str, list[Ran]] = {}
        for ran in self._evidence.tests:
            last.setdefault(ran.test, []).append(ran)
        found = []
        for test, runs in last.items():
            if runs[-1].outcome == "left":
                continue  # it did not run: what was known of it stays, and nothing new is
            if runs[-1].outcome == "failed":
                found.append(Outcome(test, None))
            else:
                common = self._recorder.common(skipped=runs[-1].outcome == "skipped")
                found.append(Outcome(test, (*base, common, *(one for ran in runs for one in self._record(ran)))))
        return found

    def _base(self) -> tuple[frozenset[Version], ...]:
        own = self._context(BASE, set())
        seeds = self._recorder.base_seeds(own.seeds, self._evidence.collected)
        parts = self._recorder.finish(own)
        return self._recorder.versions(parts), self._recorder.versions(self._recorder.closures.parts(seeds))

    def _record(self, ran: Ran) -> list[frozenset[Version]]:
        recorder = self._recorder
        shared = self._shared.get((ran.path, ran.uses)) or self._share(ran)
        simple = None if shared.blind or self._evidence.children else self._simple(ran.epoch, shared.seeds)
        if simple is not None:
            return [*shared.around, simple, *shared.contexts]
        mine = self._context(ran.epoch, shared.written, shared=False)
        if mine.blind or shared.blind:
            mine.parts.update(recorder.closures.wholes(shared.files))
        seeds = sorted(mine.seeds - shared.seeds)
        return [
            *shared.around,
            recorder.versions(recorder.finish(mine)),
            *shared.contexts,
            *(recorder.versions(recorder.closures.parts([seed])) for seed in seeds),
        ]

    def _simple(self, epoch: int, known: frozenset[str]) -> frozenset[Version] | None:
        """The quick way for what most tests are: they ran blocks of files that are followed anyway, and nothing stands behind these."""
        found = []
        for kind, a, b in self._evidence.deeds.get(epoch, ()):
            if kind == kinds.CALL:
                continue
            version = self._recorder.simple(a) if kind == kinds.HIT and not b else None
            if version is None or version[0] not in known:
                return None
            found.append(version)
        return frozenset(found)

    def _share(self, ran: Ran) -> _Shared:
        recorder = self._recorder
        contexts = self._uses(ran.uses)
        owns = [self._context(epoch, set()) for epoch in contexts]
        files, parts = recorder.around(ran.path)
        reached = recorder.closures.reached(files)
        seeds = set().union(*(own.seeds for own in owns)) - reached
        sets = [*(self._set(epoch) for epoch in contexts), *(recorder.closures.parts([seed]) for seed in sorted(seeds))]
        found = self._shared[ran.path, ran.uses] = _Shared(
            set().union(*(own.written for own in owns)),
            any(own.blind for own in owns),
            files,
            reached | seeds,
            (recorder.versions(recorder.closures.parts(files)), recorder.versions(parts)),
            tuple(recorder.versions(one) for one in sets),
        )
        return found

    def _uses(self, epochs: Iterable[int]) -> list[int]:
        """Contexts of a test, with those that stand behind them."""
        found: set[int] = set()
        pending = list(epochs)
        while pending:
            epoch = pending.pop()
            if epoch not in found:
                found.add(epoch)
                pending.extend(self._evidence.needs.get(epoch, ()))
        return sorted(found)

    def _set(self, epoch: int) -> frozenset[Part]:
        if epoch not in self._sets:
            self._sets[epoch] = self._recorder.finish(self._own[epoch])
        return self._sets[epoch]

    def _context(self, epoch: int, written: set[str], *, shared: bool = True) -> Own:
        if epoch in self._own:
            return self._own[epoch]
        own = Own(written=set(written))
        deeds = self._children.own(epoch, self._evidence.deeds.get(epoch, ()))
        lives, torn = self._children.lives(epoch)
        if shared:
            lives += self._children.born(epoch, deeds)
        for some, epochs in ((deeds, [epoch]), (lives, self._children.epochs(epoch) if lives else [])):
            own.named.clear()
            for deed in some:
                # What happened while a module was imported belongs to that module, whoever asked for it first.
                if not deed[2] or deed[0] in OF_EPOCH:
                    self._recorder.take(own, deed)
            if own.named:
                own.untraced |= self._children.unheard(own.named, epochs)
        for argv, place in silent([*deeds, *lives]):
            own.blind = True
            own.untraced |= self._recorder.unseen(argv, place)
        own.blind = own.blind or torn
        if not own.blind and not self._children.worked(epoch) and self._recorder.remote(own):
            own.blind = True
        self._own[epoch] = own
        return own
