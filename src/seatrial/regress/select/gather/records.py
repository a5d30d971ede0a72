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
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from seatrial.regress.select.files import shell
from seatrial.regress.select.files.digests import ABSENT, EXISTS, LEVEL, LISTING, UNSETTLED, WHOLE, Digests, Version
from seatrial.regress.select.files.imports import imports, packages_above, resolve
from seatrial.regress.select.files.project import stamp
from seatrial.regress.select.gather import once
from seatrial.regress.select.gather.children import is_python, texts
from seatrial.regress.select.gather.closure import Closures, Files, Seen
from seatrial.regress.select.gather.evidence import Deed, Evidence
from seatrial.regress.select.gather.once import Part
from seatrial.regress.select.trace import events as kinds
from seatrial.regress.select.trace.syntax import BROKEN

VERSION = frozenset({"-V", "-VV", "--version", "--help", "-h"})
ASKED = {kinds.READ: WHOLE, kinds.WHOLE: WHOLE, kinds.LIST: LISTING, kinds.EXISTS: EXISTS}


class Own:
    """What one context itself depends on; `seeds` are files whose import comes with it."""

    def __init__(self, written: Iterable[str] = ()) -> None:
        self.parts: set[Part] = set()
        self.seeds: set[str] = set()
        self.written = set(written)
        self.blind = False  # something of it was not traced
        self.named: dict[str, int] = {}  # Python files that other programs were told to run, and how often
        self.untraced: set[str] = set()  # those that ran without being traced


class Common(NamedTuple):
    """Dependencies that are no files, of every test."""

    options: Version
    command: Version

    def now(self, block: str) -> str:
        """The digest of one of them."""
        return next((digest for _, name, digest in self if name == block), ABSENT)


class Recorder:
    """Records of one session, over the evidence of all its pytest processes."""

    def __init__(self, digests: Digests, evidence: Sequence[Evidence], inputs: Sequence[str], given: Common) -> None:
        self._digests = digests
        self._project = digests.project
        self._inputs = inputs
        self._given = given
        self._versions: dict[frozenset[Part], frozenset[Version]] = {}
        self._one: dict[Part, Version] = {}
        self._simple: dict[int, Version | None] = {}
        self._common: frozenset[Version] | None = None
        self._around: dict[str, tuple[frozenset[str], frozenset[Part]]] = {}
        seen = self._seen = Seen()
        for one in evidence:
            for function, calls in one.calls.items():
                seen.called(function, calls)
            for deed in dict.fromkeys(deed for deeds in one.deeds.values() for deed in deeds):
                seen.add(deed)
            for _, events in one.children:
                for kind, _, a, b in events:
                    seen.add((kind, a, b))
        self._files = Files(digests, seen.loaded | set(seen.during))
        during = {path: self._during(deeds) for path, deeds in seen.during.items()}
        self._closures = Closures(digests, seen, during, lambda: [self._together(one) for one in evidence], self._files)
        self._everywhere = frozenset(self._outside())

    def _together(self, evidence: Evidence) -> list[once.Epoch]:
        """What was hit and asked for in each epoch, in whichever process and import."""
        epochs = {*evidence.hits, *evidence.deeds}
        own = self._happened((epoch, kind, a) for epoch in epochs for kind, a, _ in evidence.did(epoch))
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
            except BROKEN:
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

    def simple(self, number: int) -> Version | None:
        """The block of a number, if it brings nothing but itself."""
        if number not in self._simple:
            part = self._files.part(number)
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

    def common(self) -> frozenset[Version]:
        if self._common is None:
            inputs = frozenset((path, WHOLE) for path in self._project.matching(self._inputs))
            self._common = self.versions(inputs) | self._everywhere | frozenset(self._given)
        return self._common

    @property
    def closures(self) -> Closures:
        return self._closures
