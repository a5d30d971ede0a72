"""The tests of one pytest process, each with the sets of dependencies that its record names.

- What tests of one file have in common is found once; a test that ran nothing but plain blocks takes a quick way.
- A test that ran several times depends on what any of its runs did; the last one says how it ended.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from seatrial.regress.select.choose import SKIPPED
from seatrial.regress.select.files.digests import Version
from seatrial.regress.select.files.imports import closure
from seatrial.regress.select.gather.children import Children, silent
from seatrial.regress.select.gather.evidence import BASE, Evidence, Ran
from seatrial.regress.select.gather.once import Part
from seatrial.regress.select.gather.records import Own, Recorder
from seatrial.regress.select.state import Outcome
from seatrial.regress.select.trace import events as kinds

OF_EPOCH = frozenset({kinds.LOAD, kinds.SPAWN, kinds.MUTE})


class _Shared(NamedTuple):
    """What tests of one file that use the same contexts have in common; `seeds` need not be followed again."""

    written: set[str]
    blind: bool
    files: frozenset[str]
    seeds: frozenset[str]
    sets: tuple[frozenset[Version], ...]


class Session:
    """One pytest process."""

    def __init__(self, recorder: Recorder, evidence: Evidence) -> None:
        self._recorder = recorder
        self._evidence = evidence
        self._children = Children(evidence.children, evidence.deeds)
        self._every: tuple[frozenset[Version], ...] | None = None
        self._own: dict[int, Own] = {}
        self._sets: dict[int, frozenset[Part]] = {}
        self._shared: dict[tuple[str, tuple[int, ...]], _Shared] = {}

    def outcomes(self) -> list[Outcome]:
        last: dict[str, list[Ran]] = {}
        for ran in self._evidence.tests:
            last.setdefault(ran.test, []).append(ran)
        found = []
        for test, runs in last.items():
            if runs[-1].outcome == "left":
                continue  # it did not run: what was known of it stays, and nothing new is
            if runs[-1].outcome == "failed":
                found.append(Outcome(test, None))
            elif runs[-1].outcome == "skipped":
                found.append(Outcome(test, (frozenset({SKIPPED}),)))
            else:
                shared, own = self._record(runs[-1])
                before = [one for ran in runs[:-1] for some in self._record(ran) for one in some]
                found.append(Outcome(test, (*own, *before), shared))
        return found

    def _base(self) -> tuple[frozenset[Version], ...]:
        if self._every is None:
            self._every = self._find_base()
        return self._every

    def _find_base(self) -> tuple[frozenset[Version], ...]:
        own = self._context(BASE, set())
        seeds = self._recorder.base_seeds(own.seeds, self._evidence.collected)
        parts = self._recorder.finish(own)
        return self._recorder.versions(parts), self._recorder.versions(self._recorder.closures.parts(seeds))

    def _record(self, ran: Ran) -> tuple[tuple[frozenset[Version], ...], list[frozenset[Version]]]:
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

    def _share(self, ran: Ran) -> _Shared:
        recorder = self._recorder
        contexts = self._uses(ran.uses)
        owns = [self._context(epoch, set()) for epoch in contexts]
        files, parts = recorder.around(ran.path)
        reached = recorder.closures.reached(files)
        seeds = set().union(*(own.seeds for own in owns)) - reached
        sets = [recorder.closures.parts(files), parts, *(self._set(epoch) for epoch in contexts)]
        sets += [recorder.closures.parts([seed]) for seed in sorted(seeds)]
        found = self._shared[ran.path, ran.uses] = _Shared(
            set().union(*(own.written for own in owns)),
            any(own.blind for own in owns),
            files,
            reached | seeds,
            (*self._base(), recorder.common(), *(recorder.versions(one) for one in sets)),
        )
        return found

    def _uses(self, epochs: Iterable[int]) -> list[int]:
        """Contexts of a test, with those that stand behind them."""
        needs = self._evidence.needs
        return sorted(closure(epochs, lambda epoch: needs.get(epoch, ())))

    def _set(self, epoch: int) -> frozenset[Part]:
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
