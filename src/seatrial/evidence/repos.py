"""The repositories under test: their exact state, their packages, and the patch that restores them.

- Reading writes nothing into a repository: the work tree is read through a scratch index, in which nothing hides a change.
- The patch turns a clean checkout of the recorded commit into the tree under test: staged, unstaged, untracked and binary files, and
  the same of every submodule.
- `write_repos` leaves `repos.json` and one `<name>.patch` per dirty repository in the evidence directory. Names are unique.
- `src/<package>/__init__.py` makes `src` the import root; otherwise the checkout itself is.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from seatrial.core.errors import UserError
from seatrial.core.files import write_bytes, write_json
from seatrial.core.guarded import endless, read_file
from seatrial.core.records import RepoState, SubmoduleState, replace
from seatrial.core.text import word_set
from seatrial.evidence.git import (
    DIFF,
    DRIVER,
    commit_of,
    digest_of,
    fields,
    filter_drivers,
    git,
    joined,
    line,
    no_commits,
    pointer_of,
    printable,
    quoted,
    scratch_directory,
    text,
    top_level,
    unparsable,
    waited_for,
)
from seatrial.evidence.redact import Redactor

_NOT_PRODUCTS = word_set(
    "test tests testing doc docs example examples script scripts bench benchmark benchmarks tool tools build dist "
    "ci docker vendor third_party thirdparty node_modules site venv env outputs results logs data wandb experiments"
)


def provided(root: Path) -> tuple[str | None, tuple[str, ...]]:
    """The import root and the packages of the checkout at `root`."""
    source = root / "src"
    if source.is_dir() and not (source / "__init__.py").is_file():
        ordinary, namespaces = _scan(source)
        if ordinary or namespaces:
            return str(source), tuple(sorted(ordinary + namespaces))
    ordinary, namespaces = _scan(root)
    packages = tuple(sorted(ordinary or namespaces))
    return (str(root), packages) if packages else (None, ())


def _scan(root: Path) -> tuple[list[str], list[str]]:
    """Ordinary packages below `root`, and packages one level down in namespaces."""
    ordinary: list[str] = []
    namespaces: list[str] = []
    for directory in _directories(root):
        if directory.name in _NOT_PRODUCTS:
            continue
        if (directory / "__init__.py").is_file():
            ordinary.append(directory.name)
        else:
            namespaces += [f"{directory.name}.{inner.name}" for inner in _directories(directory) if (inner / "__init__.py").is_file()]
    return ordinary, namespaces


def _directories(root: Path) -> list[Path]:
    """Directories whose name can be imported; private ones are no products, and from unreadable ones nothing can be imported."""
    try:
        entries = sorted(root.iterdir())
    except PermissionError:
        return []
    return [entry for entry in entries if entry.name.isidentifier() and not entry.name.startswith("_") and entry.is_dir()]


UNTRACKED_LIMIT = 64 * 1024 * 1024
_READ_EVERYWHERE = (".gitattributes", ".gitignore")
_MOST_FILES = 500_000
"""So many files are looked at for pipes; behind them the deadline of git must do."""


@dataclass(frozen=True, slots=True)
class Gitlink:
    """A submodule as the index records it."""

    path: str
    commit: str
    conflict: bool


@dataclass(frozen=True, slots=True)
class Status:
    """Where HEAD is and what differs from it."""

    commit: str
    branch: str | None
    dirty: tuple[str, ...]
    """Paths that differ from HEAD or are untracked; those inside a submodule carry its path in front."""


@dataclass(frozen=True, slots=True)
class Worktree:
    """A checkout with a scratch index in which every untracked file within the limit is an addition."""

    root: Path
    index: Path
    left_out: tuple[str, ...]
    """Untracked paths that are not in the index: beyond the limit, or repositories of their own."""
    unfiltered: tuple[str, ...] = ()
    """Tracked paths that were touched, and whose filter was not run: they may differ, and no diff shows how."""


@contextmanager
def worktree(root: Path) -> Iterator[Worktree]:
    """Open the checkout at `root` with a scratch index, for `git diff` against any commit."""
    with _honest_index(root) as (index, unfiltered):
        untracked = fields(git(root, "ls-files", "-z", "--others", "--exclude-standard", index=index))
        unmerged = sorted({entry.partition("\t")[2] for entry in fields(git(root, "ls-files", "-z", "--unmerged", index=index))})
        if unmerged:
            git(root, "update-index", "-z", "--force-remove", "--stdin", index=index, stdin=joined(unmerged))
        taken, left_out = _within_limit(root, [*untracked, *(path for path in unmerged if (root / path).is_file())])
        filters = _filters(root, index, taken)
        large = [path for path in taken if filters.get(path) == DRIVER]
        taken = [path for path in taken if path not in filters or path in large]
        left_out = tuple(sorted({*left_out, *filters} - set(large)))
        if taken:
            options = ("--intent-to-add", "--force", "--pathspec-from-file=-", "--pathspec-file-nul")
            git(root, "add", *options, index=index, stdin=joined(taken))
        _put_pointers(root, index, large)
        yield Worktree(root=root, index=index, left_out=left_out, unfiltered=unfiltered)


def read_status(root: Path) -> Status:
    """Commit, branch and dirty paths of the checkout at `root`, submodules included."""
    with _honest_index(root) as (index, unfiltered):
        # What is dirty inside a submodule is not for git to find out: it would go there with this repository's settings.
        options = ("--porcelain=v2", "--branch", "-z", "--untracked-files=all", "--ignore-submodules=dirty")
        entries = fields(git(root, "status", *options, index=index))
        links = gitlinks(root, index)
    head: dict[str, str] = {}
    dirty: list[str] = list(unfiltered)
    for link in links:
        if is_checkout(root, link.path):
            dirty += (f"{link.path}/{inner}" for inner in read_status(root / link.path).dirty)
    for entry in entries:
        kind, _, rest = entry.partition(" ")
        if kind == "#":
            key, _, value = rest.partition(" ")
            head[key] = value
        elif kind == "?":
            dirty.append(rest)
        elif kind in ("1", "u"):
            columns = rest.split(" ", 7 if kind == "1" else 9)
            if len(columns) != (8 if kind == "1" else 10) or not re.fullmatch(r"N\.\.\.|S...", columns[1]):
                raise unparsable(root, "status", entry)
            dirty.append(columns[-1])
        else:
            raise unparsable(root, "status", entry)
    if "branch.oid" not in head or "branch.head" not in head:
        raise unparsable(root, "status", f"no branch among {len(entries)} fields")
    if head["branch.oid"] == "(initial)":
        raise no_commits(root)
    branch = None if head["branch.head"] == "(detached)" else head["branch.head"]
    return Status(head["branch.oid"], branch, tuple(sorted(set(dirty))))


def gitlinks(root: Path, index: Path | None = None) -> tuple[Gitlink, ...]:
    """The submodules that the index names (also those that .gitmodules forgot), sorted by path."""
    found: dict[str, Gitlink] = {}
    for entry in fields(git(root, "ls-files", "-z", "--stage", index=index)):
        stamp, tab, path = entry.partition("\t")
        parts = stamp.split(" ")
        if not tab or len(parts) != 3:
            raise unparsable(root, "ls-files", entry)
        mode, commit, stage = parts
        if mode == "160000":
            found[path] = Gitlink(path, commit, conflict=stage != "0")
    return tuple(found[path] for path in sorted(found))


def is_checkout(root: Path, path: str) -> bool:
    """Whether the submodule at `path` of the checkout `root` has been initialised. One behind a symbolic link is none: git does not
    follow it either, and it may lead back to where we are."""
    place = root / path
    return (place / ".git").exists() and Path(os.path.realpath(place)) == Path(os.path.realpath(root)) / path


@contextmanager
def _honest_index(root: Path) -> Iterator[tuple[Path, tuple[str, ...]]]:
    """A copy of the index without the marks that hide changes; and the paths that cannot be compared, for lack of their filter."""
    own = root / line(git(root, "rev-parse", "--git-path", "index"))
    with scratch_directory() as directory:
        index = Path(directory) / "index"
        try:
            if own.exists():
                shutil.copy2(own, index)
        except OSError as error:
            raise UserError(f"{own}: cannot read: {error.strerror or error}", f"make it readable for you: ls -la {own}") from error
        marked, attributes = [], [root / line(git(root, "rev-parse", "--git-path", "info/attributes"))]
        entries = [entry.partition(" ") for entry in fields(git(root, "ls-files", "-z", "-v", index=index))]
        _refuse_pipes(root, {path.rpartition("/")[0] for _, _, path in entries})
        for tag, _, path in entries:
            if path.rpartition("/")[2] == ".gitattributes":
                attributes.append(root / path)
            # Lower case: assume-unchanged. S: skip-worktree; absent files are a sparse checkout, not deletions.
            if tag.islower() or (tag == "S" and (root / path).exists()):
                marked.append(path)
        for flag in ("--no-assume-unchanged", "--no-skip-worktree") if marked else ():
            git(root, "update-index", flag, "-z", "--stdin", index=index, stdin=joined(marked))
        yield index, _without_filters(root, index) if any(map(_names_filter, attributes)) else ()


def _refuse_pipes(root: Path, directories: set[str]) -> None:
    """Git reads these files wherever it goes, untracked directories included, and waits for ever at a pipe."""
    places = [root / directory / name for directory in sorted(directories | {""}) for name in _READ_EVERYWHERE]
    places += [root / ".gitmodules", root / ".mailmap"]
    places += [root / line(git(root, "rev-parse", "--git-path", f"info/{name}")) for name in ("exclude", "attributes", "sparse-checkout")]
    configured = fields(git(root, "config", "--type=path", "-z", "--get-regexp", r"^core\.(attributes|excludes)file$", ok=(0, 1)))
    places += [root / entry.partition("\n")[2] for entry in configured]
    for place in (*places, *_pipes_below(root)):
        if endless(place):
            raise waited_for(place)


def _pipes_below(root: Path) -> Iterator[Path]:
    """Files that git reads in any directory, where they are no regular file. Other repositories are left out, as git does."""
    seen = 0
    for directory, inner, names in os.walk(root):
        seen += len(names)
        if seen > _MOST_FILES:
            return
        inner[:] = [name for name in inner if name != ".git" and not (Path(directory, name, ".git")).exists()]
        for name in _READ_EVERYWHERE:
            if name in names:
                yield Path(directory, name)


def _names_filter(attributes: Path) -> bool:
    """Whether a file of attributes may choose a filter. One that cannot be read may."""
    try:
        return attributes.is_file() and b"filter" in attributes.read_bytes()
    except OSError:
        return True


def _without_filters(root: Path, index: Path) -> tuple[str, ...]:
    """Settle files with a filter that were touched since git saw them: those of Git LFS by their pointers. Returns the others."""
    touched = fields(git(root, "diff-files", "-z", "--name-only", "--diff-filter=M", "--ignore-submodules=all", index=index))
    filters = _filters(root, index, touched)
    _put_pointers(root, index, [path for path, name in filters.items() if name == DRIVER])
    others = sorted(path for path, name in filters.items() if name != DRIVER)
    _hold(root, index, others)
    return tuple(others)


def _filters(root: Path, index: Path, paths: Iterable[str]) -> dict[str, str]:
    """The filter of each regular file that has one that matters: that of Git LFS, or one for which a command is configured."""
    files = [path for path in paths if (root / path).is_file() and not (root / path).is_symlink()]
    if not files:
        return {}
    columns = fields(git(root, "check-attr", "-z", "--stdin", "filter", index=index, stdin=joined(files)))
    known = {DRIVER, *filter_drivers(root)}
    return {path: name for path, name in zip(columns[::3], columns[2::3], strict=True) if name in known}


def _put_pointers(root: Path, index: Path, paths: Iterable[str]) -> None:
    """Stage files of Git LFS as their pointers, in a store of objects beside the scratch index."""
    rows = []
    for path in paths:
        if (pointer := pointer_of(root / path)) is None:
            continue
        objects = index.parent / "objects"
        if not objects.is_dir():
            real = os.path.realpath(root / line(git(root, "rev-parse", "--git-path", "objects")))
            (objects / "info").mkdir(parents=True)
            (objects / "info" / "alternates").write_bytes(quoted(Path(real)))
        name = line(git(root, "hash-object", "-w", "--no-filters", "--stdin", index=index, stdin=pointer))
        mode = "100755" if (root / path).stat().st_mode & 0o100 else "100644"
        rows.append((path, f"{mode} {name}\t{path}"))
    if rows:
        git(root, "update-index", "-z", "--add", "--index-info", index=index, stdin=joined(row for _, row in rows))
        _hold(root, index, [path for path, _ in rows])


def _hold(root: Path, index: Path, paths: list[str]) -> None:
    """Let git take these paths of the scratch index for what is in the work tree."""
    if paths:
        git(root, "update-index", "--assume-unchanged", "-z", "--stdin", index=index, stdin=joined(paths))


def _within_limit(root: Path, paths: list[str]) -> tuple[list[str], tuple[str, ...]]:
    """Split untracked paths into those read and those only named; small files first."""
    sized = sorted((_size(root / path), path) for path in paths if not path.endswith("/"))
    total = 0
    taken: list[str] = []
    left_out = [path for path in paths if path.endswith("/")]  # a repository of its own
    for size, path in sized:
        total += size
        (taken if total <= UNTRACKED_LIMIT else left_out).append(path)
    return taken, tuple(sorted(left_out))


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size
    except FileNotFoundError:
        return 0
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> UserError:
    return UserError(f"{path}: cannot read: {error.strerror or error}", "make it readable, or list it in .gitignore")


_HUNK = re.compile(r"@@ -\d+(?:,\d+)? \+\d+(?:,\d+)? @@ ?")
_KEY_FILE = re.compile(
    r"(?i)\.(?:p12|pfx|jks|keystore|kdbx?|pem|key|der|ppk|gpg|asc)$|/id_(?:rsa|dsa|ecdsa|ed25519)[^/]*$|/(?:private|secret)[^/]*$"
)
# In program text the right side of `token = …` is an expression; only literals can be secrets there.
_PROGRAM = re.compile(r"\.(?:py|pyi|pyx|c|cc|cpp|cu|cuh|h|hpp|rs|go|js|ts|tsx|java)$")


def make_patch(root: Path, redactor: Redactor) -> bytes:
    """The full patch of the checkout at `root` against its HEAD, redacted."""
    notes: list[str] = []
    body: list[str] = []
    redacted = 0
    for piece in _pieces(root, "", notes):
        for before, after in _redact(piece, redactor, notes):
            redacted += before != after
            body.append(after)
    if redacted:
        notes.append(f"{redacted} lines are redacted; where they stand this patch differs from the tree under test")
    head = "".join(f"# seatrial: {redactor.text(note)}\n" for note in notes)
    return (head + "".join(body)).encode("utf-8", "surrogateescape")


def _pieces(root: Path, prefix: str, notes: list[str]) -> Iterator[str]:
    """The diff of a checkout, then those of its submodules; what is left out is added to `notes`."""
    with worktree(root) as tree, tempfile.TemporaryFile() as sink:
        sides = (f"--src-prefix=a/{prefix}", f"--dst-prefix=b/{prefix}")
        options = ("--binary", "--full-index", "--no-renames", "--ignore-submodules=dirty", *sides)
        git(root, *DIFF, *options, "HEAD", "--", index=tree.index, into=sink)
        sink.seek(0)
        notes += [_left_out(root, prefix, path) for path in tree.left_out]
        notes += [f"{_left_out(root, prefix, path)}; no filter of a checkout is run, so it may differ" for path in tree.unfiltered]
        yield text(sink.read())
        submodules = gitlinks(root, tree.index)
    for link in submodules:
        if is_checkout(root, link.path):
            yield from _pieces(root / link.path, f"{prefix}{link.path}/", notes)


def _left_out(root: Path, prefix: str, path: str) -> str:
    name = repr(prefix + path)
    if path.endswith("/"):
        return f"left out {name}: a git repository of its own"
    try:
        digest, size = digest_of(root / path)
        return f"left out {name}: {size} bytes, sha256 {digest}"
    except OSError as error:
        raise _unreadable(root / path, error) from error


def _redact(patch: str, redactor: Redactor, notes: list[str]) -> Iterator[tuple[str, str]]:
    """Each line of a patch before and after redaction. All lines of a file belong together: a key block may begin in one hunk and
    end in the next, and git repeats a line of the file behind `@@`."""
    file: list[str] = []
    for row in io.StringIO(patch, newline="\n"):  # a carriage return is content, not the end of a line
        if row.startswith("diff --git ") and file:
            yield from _redact_file(file, redactor, notes)
            file = []
        file.append(row)
    yield from _redact_file(file, redactor, notes)


def _redact_file(rows: list[str], redactor: Redactor, notes: list[str]) -> Iterator[tuple[str, str]]:
    """The lines of one file: its header holds names, its hunks hold text; a binary hunk is left as it is, or left out."""
    first = next((at for at, row in enumerate(rows) if row.startswith(("@@ ", "GIT binary patch"))), len(rows))
    header, body = rows[:first], rows[first:]
    name = next((row for row in header if row.startswith("+++ ")), header[0] if header else "").rstrip('\t\n"')
    if body and body[0].startswith("GIT binary patch") and _KEY_FILE.search(name):
        notes.append(f"left out {name.partition(' b/')[2]!r}: a binary file that holds keys by its name")
        return
    yield from ((row, redactor.text(row)) for row in header)
    if body and body[0].startswith("GIT binary patch"):
        yield from ((row, row) for row in body)
        return
    # Git's own of a line of a hunk: the sign, or the place of the hunk.
    cuts = [place.end() if (place := _HUNK.match(row)) else 1 for row in body]
    texts = redactor.rows([row[cut:] for row, cut in zip(body, cuts, strict=True)], program=_PROGRAM.search(name) is not None)
    yield from ((row, row[:cut] + text) for row, cut, text in zip(body, cuts, texts, strict=True))


REPOS_FILE = "repos.json"
_SHAPES = Redactor({})
_LATER = {"patch": None, "changed": (), "base": None, "companion": False, "synced": None}
"""Fields that are not read from the checkout alone, as `repo_state` has them."""


def repo_state(path: Path, name: str | None = None) -> RepoState:
    """The exact state of the checkout that `path` lies in."""
    root = top_level(path)
    if printable(str(root)) != str(root):
        raise UserError(f"{printable(str(root))}: the path is not valid UTF-8", "rename the directory")
    status, clear = read_status(root), Redactor(os.environ).text
    if _SHAPES.tokens(str(root)) != str(root):
        raise UserError(f"{clear(str(root))}: the path holds a secret", "rename the directory: its name is stored and shown")
    import_root, packages = provided(root)
    return RepoState(
        name=re.sub(r"[^\w.-]+", "_", name or root.name).strip(".") or "repository",
        path=str(root),
        commit=status.commit,
        branch=status.branch and clear(status.branch),
        dirty=tuple(clear(printable(path)) for path in status.dirty),
        submodules=tuple(replace(item, path=clear(item.path)) for item in _submodules(root, "")),
        packages=packages,
        import_root=import_root,
        origin=origin_url(root),
    )


def repo_states(paths: Sequence[Path]) -> tuple[RepoState, ...]:
    """The states of several checkouts; those with the same directory name get distinct names."""
    states: list[RepoState] = []
    for path in paths:
        state = repo_state(path)
        if any(other.path == state.path for other in states):
            raise UserError(f"{path}: the repository {state.path} is given twice", "name each repository of the change once")
        taken = {other.name.casefold() for other in states}
        number, name = 2, state.name
        while name.casefold() in taken:
            name = f"{state.name}-{number}"
            number += 1
        states.append(replace(state, name=name))
    return tuple(states)


def write_repos(states: Sequence[RepoState], evidence_dir: Path, redactor: Redactor) -> tuple[RepoState, ...]:
    """Write repos.json and the patches; returns the states with the name of their patch.

    Each repository is read again: if it moved since its state was taken, the evidence would not be of what runs.
    """
    names = [state.name.casefold() for state in states]
    if len(set(names)) != len(names):
        raise UserError(f"two repositories of the change have the same name: {', '.join(sorted(names))}", "give them distinct names")
    written = []
    for state in states:
        root = Path(state.path)
        patch = make_patch(root, redactor) if state.dirty else None
        if repo_state(root, state.name) != replace(state, **dict(_LATER)):
            raise UserError(f"{root}: the repository changed while its state was recorded", "leave it alone and start again")
        if patch is not None:
            write_bytes(evidence_dir / f"{state.name}.patch", patch)
        written.append(replace(state, patch=None if patch is None else f"{state.name}.patch"))
    write_json(evidence_dir / REPOS_FILE, redactor.value([state.model_dump(mode="json") for state in written]))
    return tuple(written)


def differs(recorded: RepoState, evidence_dir: Path, redactor: Redactor) -> str | None:
    """How the checkout differs now from what `write_repos` recorded; None when it is the same to the byte."""
    root = Path(recorded.path)
    state = repo_state(root, recorded.name)
    for field, what in (("commit", "another commit"), ("submodules", "other submodules"), ("dirty", "other dirty files")):
        if getattr(state, field) != getattr(recorded, field):
            return what
    if recorded.patch and make_patch(root, redactor) != read_file(evidence_dir / recorded.patch):
        return "other contents of changed files"
    return None


def _submodules(root: Path, prefix: str) -> Iterator[SubmoduleState]:
    """Every submodule with the commit that is checked out (the recorded one when it is not initialised)."""
    for link in gitlinks(root):
        directory = root / link.path
        head = commit_of(directory, "HEAD") if is_checkout(root, link.path) else None
        state: Literal["clean", "uninitialised", "other-commit", "conflict"]
        state = "clean" if head == link.commit else "other-commit" if head else "uninitialised"
        state = "conflict" if link.conflict else state
        yield SubmoduleState(path=printable(prefix + link.path), commit=head or link.commit, state=state)
        if head is not None:
            yield from _submodules(directory, f"{prefix}{link.path}/")


def origin_url(root: Path) -> str | None:
    """The URL of origin without credentials."""
    url = without_credentials(line(git(root, "config", "--get", "remote.origin.url", ok=(0, 1))))
    return Redactor(os.environ).text(url) or None


def without_credentials(url: str) -> str:
    """A URL that can be stored; `ssh://git@host` keeps its user, which is no secret."""
    stripped = re.sub(r"^(ssh://[^/@:]+):[^/@]*@", r"\1@", url)
    return re.sub(r"^((?!ssh)[a-z][a-z0-9+.-]*://)[^/]*@", r"\1", stripped)
