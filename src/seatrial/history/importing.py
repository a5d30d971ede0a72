"""Imports runs from a path: detects what it holds, adds what the user states, decides trust, writes into the store or not."""

from __future__ import annotations

import fnmatch
import functools
import importlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import orjson

from seatrial.core.errors import UserError
from seatrial.core.guarded import BadValue, parse_json, writable
from seatrial.core.text import counted
from seatrial.history import import_results, store
from seatrial.history.import_results import Draft, DraftTree, gpu_counts, machine_here, read_bytes, require_valid
from seatrial.history.store import UNKNOWN, RunValue, Store, StoredRun, Take

NOT_PASSED = "it did not pass"


def why_untrusted(draft: Draft, trusted: Sequence[str]) -> str:
    """The reason, or empty for a run that is trusted."""
    if draft.passed is None:
        return "no outcome is known"
    if not draft.passed:
        return f"{NOT_PASSED}: {draft.flaws[0]}" if draft.flaws else NOT_PASSED
    if draft.flaws:
        return f"not all of it could be read: {draft.flaws[0]}"
    if not draft.trees:
        return "no commit is known"
    return next((reason for tree in draft.trees if (reason := _tree(tree, trusted))), "")


def _tree(tree: DraftTree, trusted: Sequence[str]) -> str:
    if tree.commit is None:
        return "no commit is known"
    if tree.dirty is None:
        return "it is not known whether the tree was clean"
    if tree.dirty:
        return "the tree was not clean"
    if tree.branch is None:
        return "no branch is known"
    if not any(fnmatch.fnmatchcase(tree.branch, pattern) for pattern in trusted):
        return f"the branch {tree.branch} is not one of {', '.join(trusted) or '(none)'}"
    return _on_branch(tree.path, tree.commit, tree.branch) if tree.path else ""


def _on_branch(folder: Path, commit: str, branch: str) -> str:
    """Why the repository at hand does not vouch for the commit; empty when it does, or where there is no repository."""
    from seatrial.evidence.git import commit_of, is_ancestor, top_level

    folder = folder.absolute()
    if not any((above / ".git").exists() for above in (folder, *folder.parents)):
        return ""
    try:
        root = top_level(folder)
        known = commit_of(root, commit)
        tips = [tip for name in (f"refs/heads/{branch}", f"refs/remotes/origin/{branch}") if (tip := commit_of(root, name))]
        if known is None:
            return f"the commit {commit[:12]} is not known in {root}, where the file lies"
        if not tips:
            return f"there is no branch {branch} in {root} that could hold the commit {commit[:12]}"
        if any(is_ancestor(root, known, tip) for tip in tips):
            return ""
    except UserError as error:
        return f"git cannot tell whether the commit {commit[:12]} is on {branch}: {error.message}"
    return f"the commit {commit[:12]} is not on the branch {branch} of {root}"


LOOKED_FOR = (
    "unit_results.json (and dated copies of it), the run directory of a trial (trial.json), the directory of a campaign (manifest.json), "
    "JSON lines of benchmarks, JSON of pytest-benchmark, and metrics (metrics.json, metrics.jsonl, event files, trainer_state.json)"
)
_LATEST = "unit_results.json"
_DATED = re.compile(r"(\d{8}_\d{6})(?:-(\d+))?\.json")
"""The first of a second has no number, the next one is `-2`."""
_METRICS = re.compile(r"metrics\.jsonl?|trainer_state\.json|events.*tfevents.*")
_TORN = re.compile(rb'"(exit_status|start_time|machine_info|benchmarks)"')
"""Keys of results: JSON that cannot be read and has one of them was results."""
_PASSED_OVER = {".git", "node_modules", "__pycache__", ".venv"}

Item = tuple[Path, Callable[[], list[Draft]]]
"""Where it is, and how it is read."""


def detect_runs(path: Path) -> list[Item]:
    """The runs at a path; a UserError when there are none."""
    if not path.exists():
        raise UserError(f"{path}: no such file or directory", f"looked for: {LOOKED_FOR}")
    if path.is_dir():
        found = list(_search(path))
    else:
        item = _file(path, asked=True)
        found = [item] if item else []
    if not found:
        raise UserError(f"{path}: nothing that history can hold", f"looked for: {LOOKED_FOR}")
    return [(place, functools.partial(_guarded, place, read)) for place, read in found]


def _guarded(place: Path, read: Callable[[], list[Draft]]) -> list[Draft]:
    """What an importer read; a file of another shape is a UserError that names it."""
    try:
        drafts = read()
        for draft in drafts:
            require_valid(draft)
    except (LookupError, TypeError, AttributeError, ValueError, OverflowError) as error:
        raise UserError(f"{place}: not as results are written: {repr(error)[:200]}", "restore the file, or leave it out") from error
    return drafts


def in_order(paths: Sequence[Path]) -> list[Path]:
    """Paths as they were given (a shell puts `-2` before the plain name), but dated results of a folder in the order of their making."""
    dated = iter(sorted((path for path in paths if _DATED.fullmatch(path.name)), key=lambda path: (str(path.parent), _made(path))))
    return [next(dated) if _DATED.fullmatch(path.name) else path for path in paths]


def _made(path: Path) -> tuple[str, int, str]:
    """What sorts the files of a folder: dated results by stamp and then number, others by name."""
    found = _DATED.fullmatch(path.name)
    return (found[1], int(found[2] or 1), path.name) if found else (path.name, 0, path.name)


def _named(path: Path) -> bool:
    return path.name == _LATEST or _DATED.fullmatch(path.name) is not None


def _search(folder: Path, *, metrics: bool = True) -> Iterator[Item]:
    """Runs below a directory; `metrics` is off below metric files, which were read with all that belongs to them."""
    if (folder / "trial.json").is_file():
        yield folder, lambda: [_reading().read_trial(folder)]
        return
    if (folder / "manifest.json").is_file() and (folder / "inputs.jsonl").is_file():
        yield folder, lambda: [_reading().read_campaign(folder)]
        return
    entries = sorted(folder.iterdir(), key=_made)
    if metrics and any(_METRICS.fullmatch(entry.name) for entry in entries):
        yield folder, lambda: [_reading().read_metric_files(folder)]
        metrics = False
    yield from _files(entry for entry in entries if entry.name != _LATEST)
    for entry in entries:
        if entry.is_dir() and not entry.is_symlink() and entry.name not in _PASSED_OVER:
            yield from _search(entry, metrics=metrics)
    yield from _files(entry for entry in entries if entry.name == _LATEST)


def _files(entries: Iterable[Path]) -> Iterator[Item]:
    """Those of a folder that are runs."""
    for entry in entries:
        if entry.suffix in (".json", ".jsonl") and entry.is_file():
            try:
                item = _file(entry, asked=False)
            except UserError as error:
                item = entry, functools.partial(_refused, error)
            if item is not None:
                yield item


def _refused(error: UserError) -> list[Draft]:
    """What cannot be read is told when its turn comes, and stops none of the others."""
    raise error


def _reading() -> ModuleType:
    """The readers of what needs much of Seatrial: imported only where such a path is found."""
    return importlib.import_module("seatrial.history.import_runs")


def _asked(path: Path) -> list[Draft]:
    """A file that was named, and that is metrics or nothing."""
    try:
        return [_reading().read_metric_files(path)]
    except UserError as error:
        raise UserError(error.message, f"looked for: {LOOKED_FOR}") from error


def _loaded(content: bytes) -> Any:
    """JSON, only to see what it is: keys that stand twice are found when it is read."""
    try:
        return orjson.loads(content)
    except orjson.JSONDecodeError:
        return parse_json(content)  # NaN, which the fast reader does not know


def _file(path: Path, *, asked: bool) -> Item | None:
    """A file by its content. Without a name of results, one that is no JSON is none of ours."""
    if path.suffix == ".jsonl":
        first = next((line for line in read_bytes(path).split(b"\n") if line.strip()), b"")
        try:
            ours = import_results.looks_line(parse_json(first))
        except BadValue:
            ours = False
        if ours:
            return path, lambda: import_results.read_lines(path)
        return (path, lambda: _asked(path)) if asked else None
    content = read_bytes(path) if path.suffix == ".json" else b""
    try:
        data = _loaded(content) if content else None
    except BadValue:
        results = asked or _named(path) or bool(_TORN.search(content))
        return (path, lambda: [import_results.read_unit_results(path, content)]) if results else None
    if import_results.looks_unit(data):
        return path, lambda: [import_results.read_unit_results(path, content)]
    if import_results.looks_pytest(data):
        return path, lambda: [import_results.read_pytest(path)]
    if _named(path):
        return path, lambda: [import_results.read_unit_results(path, content)]
    return (path, lambda: _asked(path)) if asked else None


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
    run: StoredRun | None = None
    new: bool = False
    points: int = 0
    error: UserError | None = None

    def line(self) -> str:
        if self.run is None:
            return f"{self.path}: not imported: {self.error.message if self.error else 'unknown'}"
        what = f"run {self.run.id}" if self.new else f"there already as run {self.run.id}"
        trust = "trusted" if self.run.trusted else f"not trusted: {self.run.why_untrusted}"
        return f"{self.path}: {what}: {self.run.kind} {self.run.project} {self.run.name}, {counted(self.points, 'point')}, {trust}"


ReadyRun = tuple[Path, StoredRun, Draft]
"""A run that was read and is not yet written."""


def add(store: Store, path: Path, stated: Stated, trusted: tuple[str, ...], *, restate: bool = False) -> Iterator[Added]:
    """Import every run at `path`; raises a UserError when there is none. `restate`: what is stated holds also for runs that are there. Runs
    are written several at a time and told once they are in the store: what was told survives a kill."""
    batch, points = list[ReadyRun](), 0
    for place, read in detect_runs(path):
        for one in _ready(place, read, stated, trusted):
            if isinstance(one, Added):
                yield one
                continue
            batch.append(one)
            points += len(one[2].points)
            if points >= BATCH:
                yield from _written(store, batch, restate=restate)
                batch, points = [], 0
    if batch:
        yield from _written(store, batch, restate=restate)


def _ready(place: Path, read: Callable[[], list[Draft]], stated: Stated, trusted: tuple[str, ...]) -> Iterator[ReadyRun | Added]:
    """The runs of one item; an Added for each that cannot be read."""
    try:
        drafts = read()
    except UserError as error:
        yield Added(place, error=error)
        return
    for draft in drafts:
        try:
            yield place, run_of(completed(draft, stated), stated, trusted), draft
        except UserError as error:
            yield Added(place, error=error)


def _written(store: Store, batch: Sequence[ReadyRun], *, restate: bool) -> list[Added]:
    """Write a batch in one transaction, then what was stated of runs that were there."""
    new = store.add_all([(run, draft.points, draft.again) for _, run, draft in batch])
    told = []
    for (path, run, draft), is_new in zip(batch, new, strict=True):
        if restate and not is_new:
            store.restate(run)
        told.append(Added(path, store.by_digest(run.digest), is_new, len(draft.points)))
    return told


def completed(draft: Draft, stated: Stated) -> Draft:
    """The draft with what was stated; UserError where the file says otherwise."""
    trees = draft.trees or ((DraftTree(path=stated.repo),) if stated.commit or stated.branch else ())
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


def run_of(draft: Draft, stated: Stated, trusted: tuple[str, ...]) -> StoredRun:
    why = why_untrusted(draft, trusted)
    first = draft.trees[0] if draft.trees else DraftTree()
    return StoredRun(
        project=writable(stated.project or draft.project or _project(stated.repo or draft.source)),
        kind=draft.kind,
        name=writable(stated.name or draft.name),
        commit=first.commit,
        branch=first.branch,
        dirty=any(tree.dirty is not False for tree in draft.trees),
        time=draft.time,
        machine=stated.machine or draft.machine or (machine_here(draft.gpus) if stated.here else gpu_counts(draft.gpus) or UNKNOWN),
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


def read_transient(path: Path, stated: Stated, trusted: tuple[str, ...], take: Take) -> tuple[StoredRun, dict[str, RunValue]]:
    """The one run at `path`, and its metrics."""
    drafts = [draft for _, reading in detect_runs(path) for draft in reading()]
    if len(drafts) != 1:
        raise UserError(
            f"{path}: {len(drafts)} runs, and the gate judges one", "name the file of one run, or import them and give a number"
        )
    run = run_of(completed(drafts[0], stated), stated, trusted)
    _, series = store.rows_of(drafts[0].points)
    values: dict[str, RunValue] = {}
    for metric, (first, last, mean, least, greatest, count, mark) in series.items():
        taken = {"first": first, "last": last, "mean": mean, "min": least, "max": greatest, "count": float(count)}
        values[metric] = RunValue(run=run, value=taken[take], mark=mark, count=count)
    return run, values


def with_known(run: StoredRun, kept: StoredRun, stated: Stated) -> StoredRun:
    """A run as its files tell it, with what the store knows of the same run; what a person states comes first."""
    return replace(
        run,
        id=kept.id,
        project=stated.project or kept.project,
        name=stated.name or kept.name,
        machine=stated.machine or kept.machine,
        commit=run.commit or kept.commit,
        passed=kept.passed if run.passed is None else run.passed,
        why_untrusted=kept.why_untrusted if run.passed is None else run.why_untrusted,
    )
