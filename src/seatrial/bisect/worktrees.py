"""The tree of one point: all repositories and submodules at their commits, then patches, then edits.

- Every part is a worktree of a store, so the user's repositories do not know of it. A tree that cannot be made whole is a TreeError.
- GNU sed runs each edit in its sandbox; a patch that is in already is noted. A tree is thrown away after its run.
"""

from __future__ import annotations

import os
import posixpath
import re
import shlex
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from seatrial.bisect.bisect_records import Edit, Pin, SkipKind
from seatrial.bisect.git_stores import GitStore, Stores, TreeError, machine_or_tree
from seatrial.core.errors import UserError
from seatrial.core.files import delete, is_lfs_pointer
from seatrial.core.guarded import real_path
from seatrial.evidence.git import commit_of, fields, git, is_ancestor, line, pointers, text
from seatrial.evidence.repos import gitlinks
from seatrial.runtime.command import NoAnswerError, run_command

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
    stores: Stores
    root: Path
    main: Pin
    others: dict[str, Pin]
    """By place; those that are not in the tree yet."""
    notes: list[str] = field(default_factory=list)

    def populate(self, store: GitStore, commit: str, path: str) -> None:
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


def _add(stores: Stores, store: GitStore, commit: str, place: Path) -> None:
    with stores.lock:
        # Only the entry is made here: several trees are filled at once.
        git(store.git_dir, "worktree", "add", "--force", "--force", "--no-checkout", "--detach", str(place), commit)
    git(place, "reset", "--quiet", "--hard", seconds=CHECKOUT_S, own=True)


def _refuse_pointers(store: GitStore, place: Path, commit: str) -> None:
    """A pointer is fine where the user's own checkout has one, too."""
    lost = [path for path in pointers(place) if not any(is_lfs_pointer(source / path) for source in store.sources)]
    if lost:
        message = f"{len(lost)} files of Git LFS are pointers in a tree of {store.name} at {commit[:12]}, such as {lost[0]}"
        fix = "; ".join(f"git -C {shlex.quote(str(source))} lfs fetch origin {commit}" for source in store.sources[:1]) or "git lfs fetch"
        raise TreeError(SkipKind.TREE, message, f"{fix}, and let Git LFS smudge (git lfs install)")


SED_S = 60.0
_IO_ERROR = 4
"""What GNU sed exits with when the disk fails it."""
_IN = "is in already"
_MODES = re.compile(r"^ (?:mode change|create mode 100755) ", re.MULTILINE)


def check_edits(edits: Sequence[Edit]) -> None:
    """Refuse clauses that sed does not understand, and files that cannot be in a tree, before anything runs."""
    for edit in edits:
        parts = edit.file.split("/")
        if not edit.file or edit.file.startswith("/") or ".." in parts or ".git" in parts:
            raise UserError(f"--edit {edit.file}: not a file of the tree", "give its path from the top of the repository")
        _sed(edit, "--quiet", "/dev/null")


def apply_edits(tree: Path, edits: Sequence[Edit]) -> tuple[str, ...]:
    """Edit files of the tree in place; those in which an edit changed nothing."""
    check_edits(edits)
    idle = []
    for edit in edits:
        file = real_path(tree / edit.file)  # sed would replace a link by a file
        inside = file.is_relative_to(real_path(tree)) and ".git" not in file.relative_to(real_path(tree)).parts
        if not inside:
            raise TreeError(SkipKind.TREE, f"{edit.file}: a symbolic link of this commit leads out of the tree", "edit another file")
        if not file.is_file():
            raise TreeError(SkipKind.UNEDITED, f"{edit.file}, which is to be edited, does not exist at this commit")
        before = file.read_bytes()
        _sed(edit, "--in-place", str(file))
        if file.read_bytes() == before:
            idle.append(edit.file)
    return tuple(idle)


def unchanged(file: str) -> str:
    return f"--edit {file}: changed nothing at this commit"


def apply_patches(stores: Stores, tree: Path, main: str, patches: Sequence[str], commit: str) -> tuple[str, ...]:
    """Apply patches (commits of `main`, or absolute paths of files) to its tree at `commit`; notes on those that are in already."""
    notes = []
    for patch in patches:
        links = gitlinks(tree)
        file = Path(patch)
        left_out = _apply_file(tree, file) if file.is_absolute() else _pick(stores.git_dir(main), tree, patch, commit)
        if left_out:
            notes.append(f"--patch {file.name}: {left_out} at {commit[:12]}")
        if gitlinks(tree) != links:
            message = f"--patch {patch}: moves a submodule, and the tree holds the submodules as {commit[:12]} records them"
            raise TreeError(SkipKind.TREE, message, "give a patch that leaves submodules alone")
    return tuple(notes)


def _pick(git_dir: Path, tree: Path, patch: str, commit: str) -> str:
    """Cherry-pick; why nothing changed, or an empty string."""
    found = commit_of(git_dir, patch)
    if found is None:
        raise UserError(
            f"--patch {patch}: neither a file nor a commit of the main repository", "git log --oneline --all, and give the commit"
        )
    parents = line(git(git_dir, "rev-list", "--parents", "--max-count=1", found)).split()[1:]
    if not parents and (git_dir / "shallow").exists():
        raise UserError(f"--patch {patch}: the clone is shallow, and what the commit changed is not known", "git fetch --unshallow")
    before = _staged(tree)
    try:
        git(tree, "cherry-pick", "--no-commit", *(("--mainline", "1") if len(parents) > 1 else ()), found, own=True)
    except UserError as error:
        told = _refused(patch, commit, error)
        if told.kind is not SkipKind.TREE or not is_ancestor(git_dir, found, commit):
            raise told from error
        said = f"--grep=This reverts commit {found}"  # in the words of `git revert`
        if git(git_dir, "rev-list", "--max-count=1", "--fixed-strings", said, f"{found}..{commit}"):
            raise told from error
        git(tree, "read-tree", "--reset", "-u", before, own=True)
        return "is in its history, what it changed was changed again, and it was left out"
    return _IN if _staged(tree) == before else ""


def _staged(tree: Path) -> str:
    return line(git(tree, "write-tree"))


def _apply_file(tree: Path, patch: Path) -> str:
    """Apply a file; why nothing changed, or an empty string."""
    try:
        summary = text(git(tree, "apply", "--summary", str(patch)))
    except UserError as error:
        raise UserError(f"--patch {patch}: not a patch: {error.message}", "make one by: git diff --binary > FILE") from error
    # The check looks at contents only: it takes a file whose mode is to be changed for one that is changed already.
    if not _MODES.search(summary):
        try:
            git(tree, "apply", "--check", "--reverse", "--whitespace=nowarn", str(patch), own=True)
            return _IN
        except UserError:
            pass  # it could not be taken out, so it is not in
    before = _staged(tree)
    try:
        git(tree, "apply", "--3way", "--whitespace=nowarn", str(patch), own=True)
    except UserError as error:
        raise _refused(patch.name, line(git(tree, "rev-parse", "HEAD")), error) from error
    return _IN if _staged(tree) == before else ""


def _refused(patch: str, commit: str, error: UserError) -> TreeError:
    told = machine_or_tree(error)
    # Git's hints are for somebody who sits in that tree.
    said = " ".join(line for line in told.message.splitlines() if not line.startswith("hint:"))
    return TreeError(told.kind, f"--patch {patch}: does not apply to {commit[:12]}: {said}", _SINCE)


_SINCE = "give a patch for this range, or apply it only from the commit on that broke the other thing: --patch REV@SINCE"


def _sed(edit: Edit, mode: str, file: str) -> None:
    with tempfile.TemporaryDirectory(prefix="seatrial-sed-") as directory:
        script = Path(directory) / "clauses"
        script.write_text(edit.clauses + "\n", encoding="utf-8", errors="surrogateescape")
        # One locale for all machines: what a dot matches depends on it.
        env = {**os.environ, "LC_ALL": "C.UTF-8"}
        env.pop("POSIXLY_CORRECT", None)
        try:
            command = ["sed", "--sandbox", mode, "--file", str(script), "--", file]
            done = run_command(command, SED_S, env=env)
        except NoAnswerError as error:
            if error.late:
                raise UserError(f"--edit {edit.file}: sed did not end within {SED_S:.0f} s", "do the clauses loop?") from error
            raise UserError(f"--edit {edit.file}: sed is not installed, or not on PATH", "install GNU sed") from error
    said = done.error.strip().replace(f"sed: file {script} ", "")
    if done.code == _IO_ERROR:
        raise TreeError(SkipKind.ENVIRONMENT, f"--edit {edit.file}: {said}", "see whether the disk is full")
    if done.code:
        fix = "install GNU sed" if "unrecognized option" in said or "illegal option" in said else "correct the clauses; see: info sed"
        raise UserError(f"--edit {edit.file}: sed does not accept {edit.clauses!r}: {said or 'no message'}", fix)
