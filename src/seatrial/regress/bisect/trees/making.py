"""The tree of one point: the main repository, its submodules and the other repositories, each at its commit.

- Every part is a worktree of one of our own stores: the user's repositories are not touched, and do not know of it.
- Submodules are populated at the commits that are recorded, also inside submodules. A pin with a place replaces what is recorded
  there; a place that is no submodule gets the repository all the same. `../beside/NAME` lies beside the tree.
- A tree is whole, or it is not there: what cannot be made is a TreeError, and leaves nothing behind.
- `remove_tree` works on whatever a killed Seatrial left.
"""

from __future__ import annotations

import os
import posixpath
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from seatrial.evidence.git import fields, git, line
from seatrial.evidence.lfs import pointers
from seatrial.evidence.worktree import gitlinks
from seatrial.files import is_lfs_pointer
from seatrial.model.errors import BlockedError, UserError
from seatrial.model.guarded import real_path
from seatrial.model.verdict import Boundary
from seatrial.regress.bisect.record import Pin, SkipKind
from seatrial.regress.bisect.trees.borrow import Store
from seatrial.regress.bisect.trees.stores import Stores, TreeError, machine_or_tree

BESIDE = "beside"
"""The directory beside a tree for repositories that lie outside it."""
CHECKOUT_S = 900.0


def make_tree(stores: Stores, pins: Sequence[Pin], place: Path) -> tuple[str, ...]:
    """Make the tree at `place`; what the reader should know about it. The first pin is the main repository's."""
    main, others = pins[0], {pin.place: pin for pin in pins[1:]}
    if main.place != "." or len(others) != len(pins) - 1:
        raise ValueError(f"not one pin for each place: {', '.join(pin.place for pin in pins)}")
    for pin in others.values():
        _check_place(pin)
    remove_tree(stores, place)
    making = _Making(stores, place, main, others)
    try:
        making.populate(stores.store(main.repo), main.commit, "")
        while others:  # those for which no submodule is recorded
            making.beside(others.pop(min(others)))
    except UserError as error:
        remove_tree(stores, place)
        raise machine_or_tree(error) from error
    except BaseException:
        remove_tree(stores, place)
        raise
    return tuple(making.notes)


def remove_tree(stores: Stores, place: Path) -> None:
    """Remove the tree at `place` and what lies beside it, in whatever state they are; a BlockedError when the machine refuses."""
    gone = [place, place.parent / BESIDE]
    for path in gone:
        delete(path)
    resolved = [real_path(path.parent) / path.name for path in gone]
    with stores.lock:
        # No `git worktree prune`: it spares what a killed git left locked.
        for entry in stores.root.glob("*.git/worktrees/*"):
            known = entry / "gitdir"
            holder = Path(os.fsdecode(known.read_bytes()).rstrip("\n")).parent if known.is_file() else None
            if holder is None or any(holder.is_relative_to(path) for path in resolved):
                delete(entry)


def moved_submodules(git_dir: Path, commit: str) -> tuple[tuple[str, str | None, str], ...]:
    """The submodules that a commit moves against its first parent: path, commit before (None: it is new), commit after."""
    parents = line(git(git_dir, "rev-list", "--parents", "--max-count=1", commit)).split()[1:]
    if not parents:
        return ()
    options = ("--raw", "-r", "-z", "--no-renames", "--abbrev=64", "--ignore-submodules=none")
    words = fields(git(git_dir, "diff-tree", *options, parents[0], commit))
    moves = []
    for stamp, path in zip(words[::2], words[1::2], strict=True):
        old_mode, new_mode, old, new, _ = stamp.removeprefix(":").split(" ")
        if new_mode == "160000":
            moves.append((path, old if old_mode == "160000" else None, new))
    return tuple(moves)


@dataclass
class _Making:
    """A tree under way."""

    stores: Stores
    root: Path
    main: Pin
    others: dict[str, Pin]
    """By place; those that are not in the tree yet."""
    notes: list[str] = field(default_factory=list)

    def populate(self, store: Store, commit: str, path: str) -> None:
        """Put a commit of `store` at `path` of the tree, and its submodules into it."""
        place = self.root / path
        _add(self.stores, store, commit, place)
        _refuse_pointers(store, place, commit)
        for link in gitlinks(place):
            inner = posixpath.join(path, link.path)
            pin = self.others.pop(inner, None)
            if pin is not None and pin.repo in self.stores:
                self.populate(self.stores.store(pin.repo), pin.commit, inner)
                continue
            wanted = pin.commit if pin is not None else link.commit
            child = self.stores.child(store, link.path, commit, wanted)
            if child is None:
                self.notes.append(f"the submodule {inner} is left empty: its configuration says `update = none`")
            else:
                self.populate(child, wanted, inner)

    def beside(self, pin: Pin) -> None:
        """Put a repository where no submodule is recorded."""
        place = self.root / pin.place
        place.parent.mkdir(parents=True, exist_ok=True)
        limit = self.root.parent / BESIDE if pin.place.startswith("..") else self.root
        if not real_path(place.parent).is_relative_to(real_path(limit)) or place.is_symlink():
            raise TreeError(SkipKind.TREE, f"{pin.place}: a symbolic link of this commit leads out of the tree", "choose another place")
        if place.exists() and (not place.is_dir() or any(place.iterdir())):
            message = f"{pin.place}: this commit has files of its own where {pin.repo} is to lie"
            raise TreeError(SkipKind.TREE, message, f"choose another place for {pin.repo}")
        if pin.repo in self.stores:
            self.populate(self.stores.store(pin.repo), pin.commit, pin.place)
        else:
            raise TreeError(SkipKind.TREE, f"{self.main.commit[:12]} has no submodule {pin.place}", "")


def _check_place(pin: Pin) -> None:
    parts = pin.place.split("/")
    inside = parts[2:] if parts[:2] == ["..", BESIDE] else parts
    if not inside or any(part in ("", ".", "..", ".git") for part in inside):
        message = f"{pin.repo}: {pin.place!r} is no place in the tree"
        raise UserError(message, f"name a directory inside the tree, or ../{BESIDE}/NAME")


def _add(stores: Stores, store: Store, commit: str, place: Path) -> None:
    with stores.lock:
        # Only the entry is made here: several trees are filled at once.
        git(store.git_dir, "worktree", "add", "--force", "--force", "--no-checkout", "--detach", str(place), commit)
    git(place, "reset", "--quiet", "--hard", seconds=CHECKOUT_S, own=True)


def _refuse_pointers(store: Store, place: Path, commit: str) -> None:
    """A pointer is fine where the user's own checkout has one, too."""
    lost = [path for path in pointers(place) if not any(is_lfs_pointer(source / path) for source in store.sources)]
    if lost:
        message = f"{len(lost)} files of Git LFS are pointers in a tree of {store.name} at {commit[:12]}, such as {lost[0]}"
        fix = "; ".join(f"git -C {shlex.quote(str(source))} lfs fetch origin {commit}" for source in store.sources[:1]) or "git lfs fetch"
        raise TreeError(SkipKind.TREE, message, f"{fix}, and let Git LFS smudge (git lfs install)")


def delete(path: Path) -> None:
    """Remove a file or a directory, also one with read-only directories in it; a BlockedError when the machine refuses."""
    try:
        if path.is_symlink() or path.is_file():
            path.unlink()
        elif path.exists():
            _delete_directory(path)
    except OSError as error:
        message = f"{path}: cannot remove: {error.strerror or error} ({error.filename})"
        raise BlockedError(Boundary.ENVIRONMENT, message, f"remove it yourself: rm -rf {shlex.quote(str(path))}") from error


def _delete_directory(path: Path) -> None:
    try:
        shutil.rmtree(path)
    except PermissionError:
        # Directories that a build made read-only.
        path.chmod(0o700)
        for parent, names, _ in os.walk(path):
            for name in names:
                if not (directory := Path(parent, name)).is_symlink():
                    directory.chmod(0o700)
        shutil.rmtree(path)
