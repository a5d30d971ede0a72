"""From evidence to the dependencies of every test that ended, with everything that the import of a file executes and reads."""

from __future__ import annotations

import ast
import functools
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from pytest_seatrial.select import cached_state, project_files
from pytest_seatrial.select.cached_state import Deeds, Epoch, Once, Part, plain
from pytest_seatrial.select.evidence import BASE, Children, Deed, Evidence, RanTest, is_python, silent, texts
from pytest_seatrial.select.project_files import closure, imports, packages_above, resolve, stamp
from pytest_seatrial.select.selection_state import SKIPPED, RecordedOutcome
from pytest_seatrial.select.source_digests import EXISTS, IMPORTS, LEVEL, LISTING, UNSETTLED, WHOLE, Digests, Version
from pytest_seatrial.select.trace import trace_events as kinds
from pytest_seatrial.select.trace.instrument import BROKEN, block_number, half
from pytest_seatrial.select.trace.trace_events import STARTED

INNER = re.compile(r"(\.<locals>)?\.?<(lambda|listcomp|setcomp|dictcomp|genexpr)>")
"""Code of its own in Python that belongs to the block around it."""


class FileSeen:
    """What all processes of a session saw of imports."""

    def __init__(self) -> None:
        self.edges: dict[str, set[str]] = {}
        self.whole: set[str] = set()
        self.loaded: set[str] = set()
        self.during: dict[str, set[Deed]] = {}
        self.outside: set[str] = set()  # absolute paths of modules that are neither the project's nor installed
        self.written: set[str] = set()
        self.kept: dict[Part, set[str]] = {}  # a function of the project: files that other people's code read for it, and may have kept
        self.read: dict[Part, set[str]] = {}  # a function: files that were read by it or for it
        self.calls: dict[Part, set[tuple[int, int]]] = {}
        """A function: lines of it, and the numbers of the blocks that were brought to run there."""
        self.again: set[int] = set()  # numbers of keepers of which not all calls are known

    def called(self, function: Part, calls: set[tuple[int, int]]) -> None:
        """Lines of a function, and what was brought to run there."""
        self.calls.setdefault(_around(function), set()).update(calls)

    def add(self, deed: Deed) -> None:
        kind, a, b = deed
        if kind == kinds.LOAD:
            self.loaded.add(b)
            if a:
                self.loaded.add(a)
                self.edges.setdefault(a, set()).add(b)
        elif kind in (kinds.SPAWN, kinds.MUTE, kinds.HELLO, kinds.TASK):
            return
        elif kind in (kinds.THROUGH, kinds.BY):
            path, _, function = b.partition("\0")
            self.read.setdefault(_around((path, function)), set()).add(a)
            if kind == kinds.THROUGH:
                self.kept.setdefault(_around((path, function)), set()).add(a)
        elif kind == kinds.CALL:
            path, function, line = b.split("\0")
            self.called((path, function), {(int(line), int(a))})
        elif kind == kinds.AGAIN:
            self.again.add(int(a))
        elif kind == kinds.WHOLE and a.startswith("/"):
            self.outside.add(a)
        elif kind == kinds.WHOLE and a == b:
            self.whole.add(a)
        else:
            if kind == kinds.WRITE:
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
                file = block_number(path, "") ^ half("")
                self._numbers.update([(file ^ block, (path, name)) for block, name in facts.halves.items()])


class Closures:
    """Closures over one session's edges, each computed once."""

    def __init__(
        self,
        digests: Digests,
        seen: FileSeen,
        imported: dict[str, set[Part]],
        together: Callable[[], Sequence[Sequence[Epoch]]],
        files: Files,
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
        calls = {}
        for caller, lines in seen.calls.items():
            parts = ((line, number, files.part(number)) for line, number in lines)
            calls[caller] = frozenset((line, part) for line, number, part in parts if part or number == STARTED)
        self._once = Once(digests, self.reached, together, Deeds(calls, read, again))
        for path in {*seen.loaded, *imported}:
            self._once.learn(path)

    def reached(self, start: Iterable[str]) -> frozenset[str]:
        key = frozenset(start)
        if key not in self._reached:
            self._reached[key] = closure(key, lambda path: self.digests.targets(path) | self._edges.get(path, set()))
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
            self._behind[part] = closure([part], self._direct) - {part}
        return self._behind[part]

    def _direct(self, part: Part) -> frozenset[Part]:
        if part not in self._before:
            found = self._once.behind(self.digests.mentions(*part)) | self._once.kept_by(part)
            self._before[part] = frozenset(found | self._kept.get(plain(part), set()))
        return self._before[part]


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


class DependencyRecorder:
    """Records of one session, over the evidence of all its pytest processes."""

    def __init__(self, digests: Digests, evidence: Sequence[Evidence], inputs: Sequence[str], given: Sequence[Version]) -> None:
        self._digests = digests
        self.project = digests.project
        self._inputs = inputs
        self._given = given
        self._versions: dict[frozenset[Part], frozenset[Version]] = {}
        self._one: dict[Part, Version] = {}
        self._simple: dict[int, Version | None] = {}
        self._around: dict[str, tuple[frozenset[str], frozenset[Part]]] = {}
        seen = self._seen = FileSeen()
        for one in evidence:
            for function, calls in one.calls.items():
                seen.called(function, calls)
            for deed in dict.fromkeys(deed for deeds in one.deeds.values() for deed in deeds):
                seen.add(deed)
            for _, events in one.children:
                for kind, _, a, b in events:
                    seen.add((kind, a, b))
        self._files = Files(digests, seen.loaded | set(seen.during))
        during: dict[str, set[Part]] = {}
        for path, deeds in seen.during.items():
            own = Own()
            for deed in deeds:
                self.take(own, deed)
            during[path] = own.parts
        self.closures = Closures(digests, seen, during, lambda: [self._together(one) for one in evidence], self._files)

    def _together(self, evidence: Evidence) -> list[cached_state.Epoch]:
        """What was hit and asked for in each epoch, in whichever process and import."""
        epochs = {*evidence.hits, *evidence.deeds}
        own = self._happened((epoch, kind, a) for epoch in epochs for kind, a, _ in evidence.did(epoch))
        theirs = self._happened((epoch, kind, a) for _, events in evidence.children for kind, epoch, a, _ in events)
        none = frozenset[Part]()
        return [cached_state.Epoch(own.get(one, none) | theirs.get(one, none), theirs.get(one, none)) for one in sorted({*own, *theirs})]

    def _happened(self, deeds: Iterable[tuple[int, str, str]]) -> dict[int, frozenset[Part]]:
        found: dict[int, set[Part]] = {}
        for epoch, kind, a in deeds:
            if kind == kinds.HIT:
                part = self._files.part(int(a))
                if part is not None:
                    found.setdefault(epoch, set()).add(part)
            elif kind == kinds.WHOLE and not a.startswith("/"):
                found.setdefault(epoch, set()).add((a, WHOLE))
            elif kind in ASKED and a not in self._seen.written and not self.project.foreign(a) and not a.startswith("/"):
                found.setdefault(epoch, set()).add((a, cached_state.ASKED + ASKED[kind]))
        return {epoch: frozenset(parts) for epoch, parts in found.items()}

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
            if a.endswith(".py") and a in self.project.stamps:
                own.parts.add((a, LEVEL))
        elif kind in (kinds.SPAWN, kinds.MUTE):
            argv, here = [str(word) for word in json.loads(a)], self.project.relative(b.partition("\0")[0]) or ""
            paths = project_files.named(argv, self.project, here, python=is_python(argv))
            bare = kind == kinds.MUTE or project_files.hides(argv, paths, self.project)
            for path in paths:
                own.parts.add((path.rstrip("/"), LISTING if path.endswith("/") else WHOLE))
                if path.endswith(".py") and not is_python(argv):
                    own.named[path] = own.named.get(path, 0) + 1
                    if bare:
                        own.untraced.add(path)
        elif kind == kinds.WHOLE and a.startswith("/"):
            return  # of every test
        elif kind in ASKED and a not in own.written and not self.project.foreign(a):
            own.parts.add((a, ASKED[kind]))
            if kind == kinds.WHOLE or (kind == kinds.READ and a in self._seen.edges):  # it was read and run, and imported something
                own.seeds.add(a)

    def unseen(self, argv: Sequence[str], place: str) -> set[str]:
        """Python files that a silent Python may have run: what its command line names, and what a text on it imports. A program of which
        nothing is known (a script from elsewhere, with the project on its path) may run any."""
        here = self.project.relative(place) or ""
        programs = texts(argv)
        found = {path for path in project_files.named(argv[1:], self.project, here, python=True) if path.endswith(".py")}
        if not programs and not found and not VERSION.intersection(argv):
            return set(self.project.python())
        for text in programs:
            try:
                tree = ast.parse(text)
            except BROKEN:
                return set(self.project.python())
            found |= resolve(f"{here}/-c" if here else "-c", imports(tree), self.project)
        return found

    def finish(self, own: Own) -> frozenset[Part]:
        """The set of a context: its parts, what may have run before on their behalf, and whole files where it is blind."""
        parts = set(own.parts)
        for part in own.parts:
            parts.update(self.closures.behind(part))
        if own.untraced:
            parts.update(self.closures.wholes(own.untraced))
        if own.blind:
            parts.update(self.closures.wholes(own.seeds | {path for path, _ in own.parts if path.endswith(".py")}))
        return frozenset(parts)

    def sends(self, part: Part) -> bool:
        facts = self._digests.facts(part[0]) if part[0].endswith(".py") else None
        return bool(facts and facts.remote and (part[1] in facts.remote or part[1] == WHOLE))

    def simple(self, number: int) -> Version | None:
        """The block of a number, if it brings nothing but itself."""
        if number not in self._simple:
            part = self._files.part(number)
            plain = part is not None and not self.sends(part) and not self.closures.behind(part)
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
        if path in self._around:
            return self._around[path]
        seeds = {path} if path in self.project.stamps else set()
        parts: set[Part] = {(path, WHOLE)} if path and not path.endswith(".py") else set()
        directory = path
        while directory:
            directory = directory.rpartition("/")[0]
            for name in ("conftest.py", "__init__.py"):
                file = f"{directory}/{name}" if directory else name
                if file not in self.project.stamps:
                    parts.add((file, WHOLE))
                elif name == "conftest.py":
                    seeds.add(file)
        found = self._around[path] = frozenset(seed for seed in seeds if seed.endswith(".py")), frozenset(parts)
        return found

    @functools.cached_property
    def common(self) -> frozenset[Version]:
        inputs = frozenset((path, WHOLE) for path in self.project.matching(self._inputs))
        found = {*self.versions(inputs), *self._given}
        # Modules that lie elsewhere and are not installed; those that a test made for itself, in a temporary place, are its own.
        temporary = os.path.realpath(tempfile.gettempdir()) + "/"
        for path in self._seen.outside:
            then = stamp(Path(path))
            if then is not None and then[1] < self.project.began:
                found.add(self._digests.version(path, WHOLE))
            elif not path.startswith(temporary):
                found.add((path, WHOLE, UNSETTLED))
        return frozenset(found)


OF_EPOCH = frozenset({kinds.LOAD, kinds.SPAWN, kinds.MUTE})


class _Shared(NamedTuple):
    """What tests of one file that use the same contexts have in common; `seeds` need not be followed again."""

    written: set[str]
    blind: bool
    files: frozenset[str]
    seeds: frozenset[str]
    sets: tuple[frozenset[Version], ...]


class ProcessSession:
    def __init__(self, recorder: DependencyRecorder, evidence: Evidence) -> None:
        self._recorder = recorder
        self._evidence = evidence
        self._children = Children(evidence.children, evidence.deeds)
        self._own: dict[int, Own] = {}
        self._sets: dict[int, frozenset[Part]] = {}
        self._shared: dict[tuple[str, tuple[int, ...]], _Shared] = {}

    def outcomes(self) -> list[RecordedOutcome]:
        last: dict[str, list[RanTest]] = {}
        for ran in self._evidence.tests:
            last.setdefault(ran.test, []).append(ran)
        found = []
        for test, runs in last.items():
            if runs[-1].outcome == "left":
                continue  # it did not run: what was known of it stays, and nothing new is
            if runs[-1].outcome == "failed":
                found.append(RecordedOutcome(test, None))
            elif runs[-1].outcome == "skipped":
                found.append(RecordedOutcome(test, (frozenset({SKIPPED}),)))
            else:
                shared, own = self._record(runs[-1])
                before = [one for ran in runs[:-1] for some in self._record(ran) for one in some]
                found.append(RecordedOutcome(test, (*own, *before), shared))
        return found

    @functools.cached_property
    def _base(self) -> tuple[frozenset[Version], ...]:
        own = self._context(BASE, set())
        recorder, collected = self._recorder, self._evidence.collected
        # What was imported for everybody: not the test files, their packages and conftests, which have their own users.
        packages = {init for path in collected for init in packages_above(path, recorder.project)}
        seeds = {seed for seed in own.seeds - collected - packages if not seed.endswith("conftest.py")}
        return recorder.versions(recorder.finish(own)), recorder.versions(recorder.closures.parts(seeds))

    def _record(self, ran: RanTest) -> tuple[tuple[frozenset[Version], ...], list[frozenset[Version]]]:
        """What a test depends on: what it shares with others, and its own."""
        recorder = self._recorder
        shared = self._shared.get((ran.path, ran.uses)) or self._share(ran)
        simple = None if shared.blind or self._evidence.children else self._simple(ran.epoch, shared.seeds)
        if simple is not None:
            return shared.sets, [simple]
        mine = self._context(ran.epoch, shared.written, shared=False)
        if mine.blind or shared.blind:
            mine.parts.update(recorder.closures.wholes(shared.files))
        seeds = sorted(mine.seeds - shared.seeds)
        sets = [recorder.finish(mine), *(recorder.closures.parts([seed]) for seed in seeds)]
        return shared.sets, [recorder.versions(one) for one in sets]

    def _simple(self, epoch: int, known: frozenset[str]) -> frozenset[Version] | None:
        """The quick way for what most tests are: they ran blocks of files that are followed anyway, and nothing stands behind these."""
        if epoch in self._evidence.deeds:
            return None
        found = []
        for number in self._evidence.hits.get(epoch, ()):
            version = self._recorder.simple(number)
            if version is None or version[0] not in known:
                return None
            found.append(version)
        return frozenset(found)

    def _share(self, ran: RanTest) -> _Shared:
        recorder = self._recorder
        # Contexts of the test, with those that stand behind them.
        contexts = sorted(closure(ran.uses, lambda epoch: self._evidence.needs.get(epoch, ())))
        owns = [self._context(epoch, set()) for epoch in contexts]
        files, parts = recorder.around(ran.path)
        reached = recorder.closures.reached(files)
        seeds = set().union(*(own.seeds for own in owns)) - reached
        sets = [recorder.closures.parts(files), parts, *(self._finished(epoch) for epoch in contexts)]
        sets += [recorder.closures.parts([seed]) for seed in sorted(seeds)]
        found = self._shared[ran.path, ran.uses] = _Shared(
            set().union(*(own.written for own in owns)),
            any(own.blind for own in owns),
            files,
            reached | seeds,
            (*self._base, recorder.common, *(recorder.versions(one) for one in sets)),
        )
        return found

    def _finished(self, epoch: int) -> frozenset[Part]:
        if epoch not in self._sets:
            self._sets[epoch] = self._recorder.finish(self._own[epoch])
        return self._sets[epoch]

    def _context(self, epoch: int, written: set[str], *, shared: bool = True) -> Own:
        if epoch in self._own:
            return self._own[epoch]
        own = Own(written)
        deeds = self._children.own(epoch, self._evidence.did(epoch))
        lives, torn = self._children.lives(epoch)
        if shared:
            lives += self._children.born(epoch, deeds)
        for some, before in ((deeds, False), (lives, True)):
            own.named.clear()
            for deed in some:
                # What happened while a module was imported belongs to that module, whoever asked for it first.
                if not deed[2] or deed[0] in OF_EPOCH:
                    self._recorder.take(own, deed)
            if own.named:
                own.untraced |= self._children.unheard(own.named, epoch, before=before)
        for argv, place in silent([*deeds, *lives]):
            own.blind = True
            own.untraced |= self._recorder.unseen(argv, place)
        own.blind = own.blind or torn
        if not own.blind and not self._children.worked(epoch) and any(map(self._recorder.sends, own.parts)):
            own.blind = True
        self._own[epoch] = own
        return own
