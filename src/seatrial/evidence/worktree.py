"""The work tree as it really is, seen through a scratch index.

- The user's index is copied, never written; its time stamp is kept, because git uses it to tell fresh entries from stale ones.
- In the copy nothing hides a change: assume-unchanged and skip-worktree marks are cleared where the file exists,
  conflicts become plain modifications, untracked files become additions.
- Filters do not run (see `git`). A file of Git LFS counts as its pointer, which is made here. A file that git holds in another form,
  through any other filter, and that is not as git last saw it, cannot be compared: it counts as changed, and is named, not read.
- Ignored files are not part of a change. Untracked files beyond `UNTRACKED_LIMIT` bytes in all are named, not read:
  a forgotten checkpoint must not end up in a patch.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from seatrial.evidence.git import fields, filter_drivers, git, joined, line, no_commits, quoted, scratch_directory, waited_for
from seatrial.evidence.lfs import DRIVER, pointer_of
from seatrial.model.errors import UserError
from seatrial.model.guarded import endless

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
        unmerged = _unmerged(root, index)
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


def is_checkout(root: Path, path: str) -> bool:
    """Whether the submodule at `path` of the checkout `root` has been initialised. One behind a symbolic link is none: git does not
    follow it either, and it may lead back to where we are."""
    place = root / path
    return (place / ".git").exists() and Path(os.path.realpath(place)) == Path(os.path.realpath(root)) / path


def _changed_entry(root: Path, kind: str, rest: str, entry: str) -> Iterator[str]:
    """The dirty path of one changed entry."""
    columns = rest.split(" ", 7 if kind == "1" else 9)
    if len(columns) != (8 if kind == "1" else 10):
        _unparsable(root, "status", entry)
    submodule, path = columns[1], columns[-1]
    if submodule != "N..." and (len(submodule) != 4 or not submodule.startswith("S")):
        _unparsable(root, "status", entry)
    yield path


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
