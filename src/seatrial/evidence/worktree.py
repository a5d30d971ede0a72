"""The work tree as it really is, seen through a scratch index.

- The user's index is copied, never written; its time stamp is kept, because git uses it to tell fresh entries from stale ones.
- In the copy nothing hides a change: assume-unchanged and skip-worktree marks are cleared where the file exists,
  conflicts become plain modifications, untracked files become additions.
- Ignored files are not part of a change. Untracked files beyond `UNTRACKED_LIMIT` bytes in all are named, not read:
  a forgotten checkpoint must not end up in a patch.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from seatrial.evidence.git import fields, git, joined, line, no_commits, scratch_directory
from seatrial.model.errors import UserError

UNTRACKED_LIMIT = 64 * 1024 * 1024


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


@contextmanager
def worktree(root: Path) -> Iterator[Worktree]:
    """Open the checkout at `root` with a scratch index, for `git diff` against any commit."""
    with _honest_index(root) as index:
        untracked = fields(git(root, "ls-files", "-z", "--others", "--exclude-standard", index=index))
        unmerged = _unmerged(root, index)
        if unmerged:
            git(root, "update-index", "-z", "--force-remove", "--stdin", index=index, stdin=joined(unmerged))
        taken, left_out = _within_limit(root, [*untracked, *(path for path in unmerged if (root / path).is_file())])
        if taken:
            options = ("--intent-to-add", "--force", "--pathspec-from-file=-", "--pathspec-file-nul")
            git(root, "add", *options, index=index, stdin=joined(taken))
        yield Worktree(root=root, index=index, left_out=left_out)


def read_status(root: Path) -> Status:
    """Commit, branch and dirty paths of the checkout at `root`, submodules included."""
    with _honest_index(root) as index:
        options = ("--porcelain=v2", "--branch", "-z", "--untracked-files=all", "--ignore-submodules=none")
        entries = fields(git(root, "status", *options, index=index))
    head: dict[str, str] = {}
    dirty: list[str] = []
    for entry in entries:
        kind, _, rest = entry.partition(" ")
        if kind == "#":
            key, _, value = rest.partition(" ")
            head[key] = value
        elif kind == "?":
            dirty.append(rest)
        elif kind in ("1", "u"):
            dirty.extend(_changed_entry(root, kind, rest, entry))
        else:
            _unparsable(root, "status", entry)
    if "branch.oid" not in head or "branch.head" not in head:
        _unparsable(root, "status", f"no branch among {len(entries)} fields")
    if head["branch.oid"] == "(initial)":
        raise no_commits(root)
    branch = head["branch.head"]
    return Status(head["branch.oid"], None if branch == "(detached)" else branch, tuple(sorted(set(dirty))))


def gitlinks(root: Path, index: Path | None = None) -> tuple[Gitlink, ...]:
    """The submodules that the index names (also those that .gitmodules forgot), sorted by path."""
    found: dict[str, Gitlink] = {}
    for entry in fields(git(root, "ls-files", "-z", "--stage", index=index)):
        stamp, tab, path = entry.partition("\t")
        parts = stamp.split(" ")
        if not tab or len(parts) != 3:
            _unparsable(root, "ls-files", entry)
        mode, commit, stage = parts
        if mode == "160000":
            found[path] = Gitlink(path, commit, conflict=stage != "0")
    return tuple(found[path] for path in sorted(found))


def is_checkout(path: Path) -> bool:
    """Whether a submodule at `path` has been initialised."""
    return (path / ".git").exists()


def _changed_entry(root: Path, kind: str, rest: str, entry: str) -> Iterator[str]:
    """The dirty paths of one changed entry; a submodule with changes of its own lists them."""
    columns = rest.split(" ", 7 if kind == "1" else 9)
    if len(columns) != (8 if kind == "1" else 10):
        _unparsable(root, "status", entry)
    submodule, path = columns[1], columns[-1]
    if submodule == "N...":
        yield path
        return
    if len(submodule) != 4 or not submodule.startswith("S"):
        _unparsable(root, "status", entry)
    inside = read_status(root / path).dirty if is_checkout(root / path) else ()
    if submodule[1] == "C" or not inside:
        yield path
    yield from (f"{path}/{inner}" for inner in inside)


@contextmanager
def _honest_index(root: Path) -> Iterator[Path]:
    """A copy of the index without the marks that hide changes."""
    own = root / line(git(root, "rev-parse", "--git-path", "index"))
    with scratch_directory() as directory:
        index = Path(directory) / "index"
        try:
            if own.exists():
                shutil.copy2(own, index)
        except OSError as error:
            raise UserError(f"{own}: cannot read: {error.strerror or error}", f"make it readable for you: ls -la {own}") from error
        marked = []
        for entry in fields(git(root, "ls-files", "-z", "-v", index=index)):
            tag, _, path = entry.partition(" ")
            # Lower case: assume-unchanged. S: skip-worktree; absent files are a sparse checkout, not deletions.
            if tag.islower() or (tag == "S" and (root / path).exists()):
                marked.append(path)
        for flag in ("--no-assume-unchanged", "--no-skip-worktree") if marked else ():
            git(root, "update-index", flag, "-z", "--stdin", index=index, stdin=joined(marked))
        yield index


def _unmerged(root: Path, index: Path) -> list[str]:
    """Paths with a merge conflict."""
    entries = fields(git(root, "ls-files", "-z", "--unmerged", index=index))
    return sorted({entry.partition("\t")[2] for entry in entries})


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
        raise UserError(f"{path}: cannot read: {error.strerror or error}", "make it readable, or list it in .gitignore") from error


def _unparsable(root: Path, command: str, entry: str) -> NoReturn:
    raise UserError(f"{root}: cannot parse what `git {command}` printed: {entry!r}", "update git (2.30 or newer), or report this line")
