"""Stores: bare repositories of our own, in which everything happens that would otherwise write into the user's.

- Worktrees, fetched commits and whatever a command under test does with git land in a store (see `borrow`).
- A submodule has a store of its own. A commit that the user's submodule lacks is fetched, once; one that is lost is remembered.
- Threads may share one `Stores`.
"""

from __future__ import annotations

import re
import shlex
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from seatrial.evidence.git import commit_of, git, line
from seatrial.evidence.repos import without_credentials
from seatrial.evidence.worktree import is_checkout
from seatrial.files import write_text
from seatrial.model.errors import UserError
from seatrial.regress.bisect.record import Repo, SkipKind
from seatrial.regress.bisect.trees.borrow import WHOLE, Store, open_store, setting
from seatrial.regress.bisect.trees.fetch import FetchFailed, fetch
from seatrial.regress.bisect.trees.modules import Module, declared, first_link, resolve_url

_MACHINE = re.compile(
    r"No space left|quota exceeded|did not finish within|Read-only file system|Too many open files|Cannot allocate memory|out of memory"
    r"|Permission denied|(?:smudge|external) filter|promisor|[Cc]ould not read from remote|unable to access|unable to write"
)


class TreeError(Exception):
    """The tree of a point cannot be made; a reason to skip it, never a verdict on it."""

    def __init__(self, kind: SkipKind, message: str, fix: str = "") -> None:
        super().__init__(f"{message}\n  fix: {fix}" if fix else message)
        self.kind = kind
        """ENVIRONMENT when another attempt may succeed."""
        self.message = message
        self.fix = fix


class Stores:
    """The stores of one bisect, below `root`."""

    def __init__(self, root: Path, repos: Sequence[Repo], progress: Callable[[str], None]) -> None:
        self.root = root
        self.main = repos[0].name
        self.lock = threading.RLock()
        """Held for a moment: while a store is opened, or its list of worktrees changes."""
        self._progress = progress
        self._repos = {repo.name: repo for repo in repos}
        self._stores: dict[str, Store] = {}
        self._lost: dict[tuple[str, str], TreeError] = {}
        self._top = Path(repos[0].path)

    def open(self) -> None:
        """Open the stores of all repositories now, so that what is wrong with one is said at once."""
        for name in self._repos:
            self.store(name)

    def __contains__(self, name: str) -> bool:
        return name in self._repos

    def store(self, name: str) -> Store:
        """The store of a repository of the plan; opened when it is first asked for."""
        with self.lock:
            if (store := self._stores.get(name)) is None:
                repo = self._repos[name]
                store = self._stores[name] = open_store(self.root, name, _sources(repo, self._top))
        return store

    def git_dir(self, name: str) -> Path:
        """Where its store is."""
        return self.store(name).git_dir

    def submodule(self, main: str, path: str, commit: str, at: str | None = None) -> Path:
        """A store that holds `commit` of a submodule, and its history. `path` is seen from the top of the tree, also where a
        submodule lies in a submodule; `at` is a commit of `main` that has it (default: the bad or the good end)."""
        repo = self._repos[main]
        for start in (at,) if at else (repo.bad, repo.good):
            if holder := self._holder(self.store(main), path, start):
                return self._needed(*holder, commit, history=True).git_dir
        raise TreeError(SkipKind.TREE, f"{path}: no submodule of {main} at {(at or repo.bad)[:12]}", "name a commit that has it")

    def _holder(self, store: Store, path: str, at: str) -> tuple[Store, str, str] | None:
        """The store of the repository that has the submodule as its own, the path in it, and its commit."""
        if (step := first_link(store.git_dir, at, path)) is None:
            return None
        inner, recorded = step
        if inner == path:
            return store, path, at
        return self._holder(self._needed(store, inner, at, recorded), path[len(inner) + 1 :], recorded)

    def child(self, parent: Store, path: str, at: str, commit: str) -> Store | None:
        """The store of the submodule at `path` of the commit `at`, which holds `commit`; None where git is told to leave it out."""
        return self._child(parent, path, at, commit, history=False)

    def _needed(self, parent: Store, path: str, at: str, commit: str, *, history: bool = False) -> Store:
        if (store := self._child(parent, path, at, commit, history=history)) is None:
            raise TreeError(SkipKind.TREE, f"the submodule {path} is left out (submodule.*.update = none)", "set update to checkout")
        return store

    def _child(self, parent: Store, path: str, at: str, commit: str, *, history: bool) -> Store | None:
        module = declared(parent.git_dir, at, path)
        settings = [value for source in parent.sources if (value := setting(source, f"submodule.{module.name}.update"))]
        if settings[0] == "none" if settings else module.left_out:
            return None
        name = f"{parent.name}/{path}"
        with self.lock:
            if (store := self._stores.get(name)) is None:
                store = open_store(self.root, name, _inner_sources(parent.sources, path, module.name), like=parent.git_dir)
                self._stores[name] = store
        with store.lock:
            shallow = history and (store.git_dir / "shallow").exists()
            if shallow or commit_of(store.git_dir, commit) is None:
                self._obtain(parent, store, path, module, commit)
        return store

    def _obtain(self, parent: Store, store: Store, path: str, module: Module, commit: str) -> None:
        """Fetch, from wherever this submodule may come from."""
        if lost := self._lost.get((store.name, commit)):
            raise lost
        shallow = (store.git_dir / "shallow").exists()
        failures: list[FetchFailed] = []
        for url in _urls(parent, store, module):
            self._progress(f"fetching {path} at {commit[:12]} from {without_credentials(url)}")
            try:
                fetch(store.git_dir, url, commit, unshallow=shallow)
            except FetchFailed as error:
                failures.append(error)
                continue
            if shallow:
                write_text(store.git_dir / WHOLE, "")
            return
        refusal = _lost(parent, path, module, commit, failures)
        if refusal.kind is SkipKind.TREE:
            self._lost[store.name, commit] = refusal
        raise refusal


def machine_or_tree(error: UserError) -> TreeError:
    """A failure of git while a tree is made: the machine's, which may pass, or the commit's."""
    machine = _MACHINE.search(error.message)
    return TreeError(SkipKind.ENVIRONMENT if machine else SkipKind.TREE, error.message, error.fix)


def _sources(repo: Repo, main: Path) -> tuple[Path, ...]:
    """The repository itself, and the main one's submodule that it stands for: either may have what the other lacks."""
    places = [Path(repo.path)]
    if repo.place != "." and is_checkout(main, repo.place):
        places.append(main / repo.place)
    return tuple(places)


def _inner_sources(outer: Iterable[Path], path: str, name: str) -> tuple[Path, ...]:
    """The user's copies of a submodule: populated, or left in the superproject's git directory."""
    found: list[Path] = []
    for source in outer:
        places = [source / path] if is_checkout(source, path) else []
        if ".." not in Path(name).parts and not Path(name).is_absolute():
            kept = (line(git(source, "rev-parse", "--git-path", f"modules/{name}")), f"{_common(source)}/modules/{name}")
            places += [source / place for place in kept if (source / place / "HEAD").is_file()]
        found += [place for place in places[:1] if _is_repository(place)]
    return tuple(found)


def _common(source: Path) -> str:
    return line(git(source, "rev-parse", "--git-common-dir"))


def _is_repository(place: Path) -> bool:
    """A submodule whose git directory is gone is not one."""
    try:
        git(place, "rev-parse", "--git-dir")
    except UserError as error:
        if "not a git repository" in error.message:
            return False
        raise
    return True


def _urls(parent: Store, store: Store, module: Module) -> list[str]:
    """Where to fetch a submodule from: what the user's checkout says, then what `.gitmodules` says."""
    found = [setting(source, f"submodule.{module.name}.url") for source in parent.sources]
    found += [setting(source, "remote.origin.url") for source in store.sources]
    if module.url:
        origins = [setting(source, "remote.origin.url") or str(source) for source in parent.sources]
        base = next(iter(origins), "") or setting(parent.git_dir, "remote.origin.url")
        found.append(resolve_url(base, module.url))
    return list(dict.fromkeys(url for url in found if url and not url.startswith("-")))


def _lost(parent: Store, path: str, module: Module, commit: str, failures: Sequence[FetchFailed]) -> TreeError:
    why = "; ".join(failure.message for failure in failures) or f"{module.url or '.gitmodules'} gives no place to fetch it from"
    lost = all(failure.lost for failure in failures)
    top = next((source for source in parent.sources if source.is_dir()), None)
    where = f"git -C {shlex.quote(str(top / path))}" if top else "git"
    fix = f"{where} fetch origin {commit}"
    if top is not None and not is_checkout(top, path):
        fix = f"git -C {shlex.quote(str(top))} submodule update --init -- {shlex.quote(path)} && {fix}"
    if lost:
        fix += f" (if it was force-pushed away: {where} fetch URL_OF_A_FORK {commit}; until then the commits that need it are skipped)"
    message = f"the submodule {path} of {parent.name} does not have {commit}: {why}"
    return TreeError(SkipKind.TREE if lost else SkipKind.ENVIRONMENT, message, fix)
