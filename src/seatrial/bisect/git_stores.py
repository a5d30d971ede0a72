"""Bare repositories of a bisect that borrow the objects of the user's repositories, fetch missing commits and know submodules.

- The user's repositories are only read. Worktrees, fetched commits and whatever a tested command does with git stay in a store.
- Opening a store again repairs one that a killed Seatrial left half made. Threads may share one `Stores`.
"""

from __future__ import annotations

import hashlib
import re
import shlex
import threading
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from seatrial.bisect.bisect_records import Repo, SkipKind
from seatrial.core.errors import UserError
from seatrial.core.files import read_text, write_bytes, write_text
from seatrial.evidence.git import NotARepositoryError, command_line, commit_of, environment, fields, git, line, quoted
from seatrial.evidence.redact import Redactor
from seatrial.evidence.repos import is_checkout, without_credentials
from seatrial.runtime.interrupt import check_stop
from seatrial.runtime.process import STAMP_LENGTH, ProcessSpec, run

WHOLE = "seatrial-whole"
"""A file in a store that was unshallowed: where the user's clone ends is no longer its end."""


@dataclass(frozen=True, slots=True)
class GitStore:
    """One repository of our own."""

    name: str
    git_dir: Path
    sources: tuple[Path, ...]
    """The user's repositories that it borrows from: checkouts, or git directories of submodules."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Held while something is fetched into it."""


def open_store(root: Path, name: str, sources: tuple[Path, ...], like: Path | None = None) -> GitStore:
    """The store of that name below `root`, made if it is not there. Without sources it is `like` another repository."""
    store = GitStore(name, root / f"{file_name(name)}.git", sources)
    store.git_dir.mkdir(parents=True, exist_ok=True)
    model = sources[0] if sources else like
    kind = line(git(model, "rev-parse", "--show-object-format")) if model else "sha1"
    for left in store.git_dir.glob("*.lock"):  # by a git that was killed: nobody else works in the stores of this bisect
        left.unlink(missing_ok=True)
    git(store.git_dir, "init", "--quiet", "--bare", "--template=", f"--object-format={kind}", ".")
    # Nothing names the fetched commits, and a clean-up would drop them.
    git(store.git_dir, "config", "gc.auto", "0")
    objects = (source / line(git(source, "rev-parse", "--git-path", "objects")) for source in sources)
    write_bytes(store.git_dir / "objects" / "info" / "alternates", b"".join(map(quoted, objects)))
    _copy_tags(store)
    _copy_shallow(store)
    for source in sources[:1]:
        _copy_remotes(store, source)
    return store


def _copy_tags(store: GitStore) -> None:
    tags: dict[str, str] = {}
    for source in store.sources:
        for row in line(git(source, "for-each-ref", "--format=%(refname) %(objectname)", "refs/tags")).splitlines():
            name, _, target = row.partition(" ")
            tags.setdefault(name, target)
    text = "".join(f"{target} {name}\n" for name, target in sorted(tags.items()))
    write_bytes(store.git_dir / "packed-refs", text.encode("utf-8", "surrogateescape"))


def _copy_shallow(store: GitStore) -> None:
    if (store.git_dir / WHOLE).exists():
        return
    files = [source / line(git(source, "rev-parse", "--git-path", "shallow")) for source in store.sources]
    ends = sorted({end for file in files if file.is_file() for end in file.read_text(encoding="ascii").split()})
    if ends:
        write_text(store.git_dir / "shallow", "".join(f"{end}\n" for end in ends))
    else:
        (store.git_dir / "shallow").unlink(missing_ok=True)


def _copy_remotes(store: GitStore, source: Path) -> None:
    """Where relative URLs start, and where a partial clone gets what it left out; without credentials."""
    wanted = r"^remote\..*\.(url|promisor|partialclonefilter)$"
    entries = [entry.partition("\n") for entry in fields(git(source, "config", "-z", "--get-regexp", wanted, ok=(0, 1)))]
    promisors = {key.removesuffix(".promisor") for key, _, value in entries if key.endswith(".promisor") and value == "true"}
    for key, _, value in entries:
        if key.rpartition(".")[0] in promisors or key == "remote.origin.url":
            git(store.git_dir, "config", key, without_credentials(value))


def setting(source: Path, key: str) -> str:
    return line(git(source, "config", "--get", key, ok=(0, 1)))


def file_name(name: str) -> str:
    """A name for a file; what had to be changed carries a hash, so that it stays unique."""
    if re.fullmatch(r"\w[\w.-]{0,80}", name, re.ASCII):
        return name
    return re.sub(r"[^\w.-]+", "_", name, flags=re.ASCII)[-60:].lstrip(".-") + "-" + hashlib.sha256(name.encode()).hexdigest()[:8]


DEADLINE_S = 900.0
_OPTIONS = ("--no-tags", "--no-write-fetch-head", "--no-auto-maintenance", "--no-recurse-submodules")
_GONE = re.compile(r"not our ref|unadvertised object|couldn't find remote ref|did not send all necessary objects")


class FetchFailed(Exception):
    """A commit that could not be fetched."""

    def __init__(self, message: str, *, lost: bool, unnamed: bool = False) -> None:
        super().__init__(message)
        self.message = message
        self.lost = lost
        """The remote answered, and does not have it: trying again is of no use."""
        self.unnamed = unnamed
        """The remote gives only what it names, such as branches and tags."""


def fetch(git_dir: Path, url: str, commit: str, *, unshallow: bool, deadline_s: float = DEADLINE_S) -> None:
    """Bring `commit` from `url` into the store, and what a shallow clone cut off if told to; else FetchFailed."""
    try:
        _fetch(git_dir, url, (commit,), ("--unshallow",) if unshallow else (), deadline_s)
    except FetchFailed as error:
        if not error.lost or not error.unnamed:
            raise
        # An old server gives only what it names: then everything that it names.
        _fetch(git_dir, url, ("+refs/heads/*:refs/fetched/heads/*", "+refs/tags/*:refs/fetched/tags/*"), (), deadline_s)
    if commit_of(git_dir, commit) is None:
        raise FetchFailed(f"{without_credentials(url)} does not have {commit}", lost=True)


def _fetch(git_dir: Path, url: str, wanted: tuple[str, ...], options: tuple[str, ...], deadline_s: float) -> None:
    log = git_dir / "fetch.log"
    log.unlink(missing_ok=True)
    # Our own fetch of a local repository is what the user asked for; git forbids it in submodules only.
    words = command_line(git_dir, "-c", "protocol.file.allow=always", "fetch", *_OPTIONS, *options, "--", url, *wanted)
    env = environment(git_dir, own=True)
    spec = ProcessSpec(
        argv=tuple(words),
        env=env,
        cwd=git_dir,
        log=log,
        run_id=f"fetch-{uuid.uuid4().hex[:12]}",
        deadline_s=deadline_s,
        stall_s=deadline_s,
        line_filter=Redactor(env).lines().line,
    )
    outcome = run(spec)
    if outcome.ended == "interrupted":
        check_stop()
    if outcome.ended != "exited":
        raise FetchFailed(f"fetching from {without_credentials(url)} did not end within {deadline_s:.0f} s", lost=False)
    if outcome.exit_code:
        said = [line[STAMP_LENGTH:].strip() for line in read_text(log).splitlines()]
        told = "; ".join(line for line in said if line.startswith(("fatal:", "error:", "remote:"))) or (said or ["no message"])[-1]
        raise FetchFailed(
            f"fetching from {without_credentials(url)}: {told}", lost=bool(_GONE.search(told)), unnamed="unadvertised" in told
        )


@dataclass(frozen=True, slots=True)
class Module:
    """A submodule as `.gitmodules` declares it."""

    name: str
    url: str
    left_out: bool
    """`update = none`: git does not populate it unless it is told to."""


def declared(git_dir: Path, commit: str, path: str) -> Module:
    """The submodule at `path` of a commit; one that `.gitmodules` forgot has its path for a name."""
    options = ("config", "--blob", f"{commit}:.gitmodules", "-z", "--list")
    entries = fields(git(git_dir, *options)) if git(git_dir, "ls-tree", "--full-tree", "-z", commit, "--", ".gitmodules") else []
    values: dict[tuple[str, str], str] = {}
    for entry in entries:
        key, _, value = entry.partition("\n")
        name, _, variable = key.removeprefix("submodule.").rpartition(".")  # the name may hold dots
        values[name, variable] = value
    name = next((key[0] for key, value in values.items() if key[1] == "path" and value.rstrip("/") == path), path)
    return Module(name, values.get((name, "url"), ""), values.get((name, "update")) == "none")


def resolve_url(base: str, url: str) -> str:
    """A URL of `.gitmodules`; one that starts with `./` or `../` is meant from the superproject's own URL, as in git."""
    if not url.startswith(("./", "../")):
        return url
    base, separator = base.rstrip("/"), "/"
    while url.startswith(("./", "../")):
        if url.startswith("../"):
            at = base.rfind("/") if "/" in base else base.rfind(":")
            separator = base[at] if at >= 0 else "/"
            base = base[: max(at, 0)]
        url = url.partition("/")[2]
    return f"{base}{separator}{url}".rstrip("/")


def gitlink(git_dir: Path, commit: str, path: str) -> str | None:
    for entry in fields(git(git_dir, "ls-tree", "--full-tree", "-z", commit, "--", path)):
        stamp, _, name = entry.partition("\t")
        mode, _, found = stamp.split(" ")
        if mode == "160000" and name == path:
            return found
    return None


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
        self._stores: dict[str, GitStore] = {}
        self._lost: dict[tuple[str, str], TreeError] = {}
        self._top = Path(repos[0].path)

    def open(self) -> None:
        for name in self._repos:
            self.store(name)

    def __contains__(self, name: str) -> bool:
        return name in self._repos

    def store(self, name: str) -> GitStore:
        """The store of a repository of the plan; opened when it is first asked for."""
        with self.lock:
            if (store := self._stores.get(name)) is None:
                repo = self._repos[name]
                places = [Path(repo.path)]
                if repo.place != "." and is_checkout(self._top, repo.place):
                    # The submodule of the main repository that it stands for: either may have what the other lacks.
                    places.append(self._top / repo.place)
                store = self._stores[name] = open_store(self.root, name, tuple(places))
        return store

    def git_dir(self, name: str) -> Path:
        return self.store(name).git_dir

    def submodule(self, main: str, path: str, commit: str, at: str | None = None) -> Path:
        """A store that holds `commit` of a submodule, and its history. `path` is seen from the top of the tree, also where a
        submodule lies in a submodule; `at` is a commit of `main` that has it (default: the bad or the good end)."""
        repo = self._repos[main]
        for start in (at,) if at else (repo.bad, repo.good):
            if holder := self._holder(self.store(main), path, start):
                return self._needed(*holder, commit, history=True).git_dir
        raise TreeError(SkipKind.TREE, f"{path}: no submodule of {main} at {(at or repo.bad)[:12]}", "name a commit that has it")

    def _holder(self, store: GitStore, path: str, at: str) -> tuple[GitStore, str, str] | None:
        """The store of the repository that has the submodule as its own, the path in it, and its commit."""
        parts = path.split("/")
        ways = ["/".join(parts[: count + 1]) for count in range(len(parts))]  # the outermost submodule on the way comes first
        step = next(((way, found) for way in ways if (found := gitlink(store.git_dir, at, way))), None)
        if step is None:
            return None
        inner, recorded = step
        if inner == path:
            return store, path, at
        return self._holder(self._needed(store, inner, at, recorded), path[len(inner) + 1 :], recorded)

    def _needed(self, parent: GitStore, path: str, at: str, commit: str, *, history: bool = False) -> GitStore:
        if (store := self.child(parent, path, at, commit, history=history)) is None:
            raise TreeError(SkipKind.TREE, f"the submodule {path} is left out (submodule.*.update = none)", "set update to checkout")
        return store

    def child(self, parent: GitStore, path: str, at: str, commit: str, *, history: bool = False) -> GitStore | None:
        """The store of the submodule at `path` of the commit `at`, which holds `commit`; None where git is told to leave it out."""
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

    def _obtain(self, parent: GitStore, store: GitStore, path: str, module: Module, commit: str) -> None:
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


def _inner_sources(outer: Iterable[Path], path: str, name: str) -> tuple[Path, ...]:
    """The user's copies of a submodule: populated, or left in the superproject's git directory."""
    found: list[Path] = []
    for source in outer:
        places = [source / path] if is_checkout(source, path) else []
        if ".." not in Path(name).parts and not Path(name).is_absolute():
            common = line(git(source, "rev-parse", "--git-common-dir"))
            kept = (line(git(source, "rev-parse", "--git-path", f"modules/{name}")), f"{common}/modules/{name}")
            places += [source / place for place in kept if (source / place / "HEAD").is_file()]
        found += [place for place in places[:1] if _is_repository(place)]
    return tuple(found)


def _is_repository(place: Path) -> bool:
    """A submodule whose git directory is gone is not one."""
    try:
        git(place, "rev-parse", "--git-dir")
    except NotARepositoryError:
        return False
    return True


def _urls(parent: GitStore, store: GitStore, module: Module) -> list[str]:
    """Where to fetch a submodule from: what the user's checkout says, then what `.gitmodules` says."""
    found = [setting(source, f"submodule.{module.name}.url") for source in parent.sources]
    found += [setting(source, "remote.origin.url") for source in store.sources]
    if module.url:
        origins = [setting(source, "remote.origin.url") or str(source) for source in parent.sources]
        base = next(iter(origins), "") or setting(parent.git_dir, "remote.origin.url")
        found.append(resolve_url(base, module.url))
    return list(dict.fromkeys(url for url in found if url and not url.startswith("-")))


def _lost(parent: GitStore, path: str, module: Module, commit: str, failures: Sequence[FetchFailed]) -> TreeError:
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
