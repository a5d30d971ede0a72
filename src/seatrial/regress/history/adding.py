"""From a path to runs in the store: what was found, what a person stated, trust, and one line for each.

- What is stated fills what a file does not say; it never overrules the file: a contradiction is an error.
- One run that cannot be read stops none of the others, and is told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from seatrial.model.errors import UserError
from seatrial.model.guarded import writable
from seatrial.model.words import counted
from seatrial.regress.history.importers.detect import detect
from seatrial.regress.history.importers.draft import Draft, Tree
from seatrial.regress.history.record import UNKNOWN, Run
from seatrial.regress.history.store import Store
from seatrial.regress.history.trust import why_untrusted
from seatrial.regress.unit.machine import counted as gpus_named
from seatrial.regress.unit.machine import machine_here

T = TypeVar("T")
BATCH = 60_000
"""Points per transaction: few enough to be told of progress, and for other writers to get their turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stated:
    """What a person, or the command that just ran it, says of the runs."""

    project: str | None = None
    name: str | None = None
    machine: str | None = None
    commit: str | None = None
    branch: str | None = None
    clean: bool | None = None
    passed: bool | None = None
    here: bool = False
    """They ran on this machine, for files that do not say."""
    repo: Path | None = None
    """A checkout in which commits can be looked up."""


@dataclass(frozen=True, slots=True)
class Added:
    """One run, or one path that could not be read."""

    path: Path
    run: Run | None = None
    new: bool = False
    points: int = 0
    error: UserError | None = None

    def line(self) -> str:
        """What happened, for a person."""
        if self.run is None:
            return f"{self.path}: not imported: {self.error.message if self.error else 'unknown'}"
        what = f"run {self.run.id}" if self.new else f"there already as run {self.run.id}"
        trust = "trusted" if self.run.trusted else f"not trusted: {self.run.why_untrusted}"
        return f"{self.path}: {what}: {self.run.kind} {self.run.project} {self.run.name}, {counted(self.points, 'point')}, {trust}"


def add(store: Store, path: Path, stated: Stated, trusted: tuple[str, ...], *, restate: bool = False) -> Iterator[Added]:
    """Import every run at `path`; raises a UserError when there is none. `restate`: what is stated holds also for runs that are there.

    Runs are written several at a time and told once they are in the store: what was told survives a kill.
    """
    batch, points = list[Ready](), 0
    for place, read in detect(path):
        for one in _ready(place, read, stated, trusted):
            if isinstance(one, Added):
                yield one
                continue
            batch.append(one)
            points += len(one.draft.points)
            if points >= BATCH:
                yield from _written(store, batch, restate=restate)
                batch, points = [], 0
    if batch:
        yield from _written(store, batch, restate=restate)


@dataclass(frozen=True, slots=True)
class Ready:
    """A run that was read and is not yet written."""

    path: Path
    run: Run
    draft: Draft


def _ready(place: Path, read: Callable[[], list[Draft]], stated: Stated, trusted: tuple[str, ...]) -> Iterator[Ready | Added]:
    """The runs of one item; an Added for each that cannot be read."""
    try:
        drafts = read()
    except UserError as error:
        yield Added(place, error=error)
        return
    for draft in drafts:
        try:
            yield Ready(place, run_of(completed(draft, stated), stated, trusted), draft)
        except UserError as error:
            yield Added(place, error=error)


def _written(store: Store, batch: Sequence[Ready], *, restate: bool) -> list[Added]:
    """Write a batch in one transaction, then what was stated of runs that were there."""
    new = store.add_all([(one.run, one.draft.points, one.draft.again) for one in batch])
    told = []
    for one, is_new in zip(batch, new, strict=True):
        if restate and not is_new:
            store.restate(one.run)
        told.append(Added(one.path, store.by_digest(one.run.digest), is_new, len(one.draft.points)))
    return told


def completed(draft: Draft, stated: Stated) -> Draft:
    """The draft with what was stated; UserError where the file says otherwise."""
    trees = draft.trees or ((Tree(path=stated.repo),) if stated.commit or stated.branch else ())
    if trees:
        first = trees[0]
        commit = _one(draft, "commit", first.commit, stated.commit)
        branch = _one(draft, "branch", first.branch, stated.branch)
        dirty = first.dirty if stated.clean is None else _one(draft, "clean tree", first.dirty, not stated.clean)
        trees = (replace(first, commit=commit, branch=branch, dirty=dirty, path=stated.repo or first.path), *trees[1:])
    passed = draft.passed if stated.passed is None else _one(draft, "passed", draft.passed, stated.passed)
    return replace(draft, trees=trees, passed=passed)


def _one(draft: Draft, what: str, found: T | None, said: T | None) -> T | None:
    """Either of the two, which must not contradict each other; a short commit agrees with the long one."""
    if found is None or said is None:
        return said if found is None else found
    same = found == said or (isinstance(found, str) and isinstance(said, str) and what == "commit" and found.startswith(said))
    if not same:
        raise UserError(f"{draft.source}: {what}: the file says {found!r}, and {said!r} was stated", "leave the option out")
    return found


def run_of(draft: Draft, stated: Stated, trusted: tuple[str, ...]) -> Run:
    """The run as it is kept."""
    why = why_untrusted(draft, trusted)
    first = draft.trees[0] if draft.trees else Tree()
    return Run(
        project=writable(stated.project or draft.project or _project(stated.repo or draft.source)),
        kind=draft.kind,
        name=writable(stated.name or draft.name),
        commit=first.commit,
        branch=first.branch,
        dirty=any(tree.dirty is not False for tree in draft.trees),
        time=draft.time,
        machine=stated.machine or draft.machine or (machine_here(draft.gpus) if stated.here else gpus_named(draft.gpus) or UNKNOWN),
        passed=draft.passed,
        trusted=not why,
        why_untrusted=why,
        source=writable(str(draft.source.absolute())),
        digest=draft.digest,
    )


def _project(source: Path) -> str:
    """The name of the checkout that the file lies in, by its origin; else that of its directory."""
    from seatrial.evidence.git import top_level
    from seatrial.evidence.repos import origin_url

    folder = source if source.is_dir() else source.parent
    try:
        root = top_level(folder)
        url = origin_url(root) or ""
    except UserError:
        return folder.absolute().name or "project"
    return url.rstrip("/").rsplit("/", 1)[-1].removesuffix(".git") or root.name
