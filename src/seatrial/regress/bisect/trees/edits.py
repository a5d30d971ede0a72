"""Changes on the fly: what is different in a tree from its commit. First patches, then edits.

- An edit is run by GNU sed itself, in its sandbox (no commands, no other files), without a shell, on one file inside the tree.
- A patch is a commit of the main repository, cherry-picked without a commit, or a file. Whether its change is in already is seen by
  trying, not by ancestry: what was landed may have been reverted. Only where a commit of the history itself cannot be picked, because
  what it changed was changed again and no commit says to revert it, ancestry decides; the note says so.
- A tree is thrown away after its run, so nothing is ever to be restored. A TreeError leaves the tree unusable.
- What was asked wrongly is a UserError; what one commit cannot take is a TreeError.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from seatrial.evidence.git import commit_of, git, is_ancestor, line, text
from seatrial.evidence.worktree import gitlinks
from seatrial.model.errors import UserError
from seatrial.model.guarded import real_path
from seatrial.regress.bisect.record import Edit, SkipKind
from seatrial.regress.bisect.trees.stores import Stores, TreeError, machine_or_tree

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
    """Edit files of the tree in place; notes on edits that changed nothing."""
    check_edits(edits)
    notes = []
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
            notes.append(unchanged(edit.file))
    return tuple(notes)


def unchanged(file: str) -> str:
    """The note on an edit that changed nothing."""
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
        if told.kind is not SkipKind.TREE or not is_ancestor(git_dir, found, commit) or _reverted(git_dir, found, commit):
            raise told from error
        git(tree, "read-tree", "--reset", "-u", before, own=True)
        return "is in its history, what it changed was changed again, and it was left out"
    return _IN if _staged(tree) == before else ""


def _reverted(git_dir: Path, patch: str, commit: str) -> bool:
    """Whether a commit since then says, in the words of `git revert`, that it takes the patch out."""
    said = f"--grep=This reverts commit {patch}"
    return bool(git(git_dir, "rev-list", "--max-count=1", "--fixed-strings", said, f"{patch}..{commit}"))


def _staged(tree: Path) -> str:
    """The tree object of what is staged."""
    return line(git(tree, "write-tree"))


def _apply_file(tree: Path, patch: Path) -> str:
    """Apply a file; why nothing changed, or an empty string."""
    try:
        summary = text(git(tree, "apply", "--summary", str(patch)))
    except UserError as error:
        raise UserError(f"--patch {patch}: not a patch: {error.message}", "make one by: git diff --binary > FILE") from error
    # The check looks at contents only: it takes a file whose mode is to be changed for one that is changed already.
    if not _MODES.search(summary) and _could_be_taken_out(tree, patch):
        return _IN
    before = _staged(tree)
    try:
        git(tree, "apply", "--3way", "--whitespace=nowarn", str(patch), own=True)
    except UserError as error:
        raise _refused(patch.name, line(git(tree, "rev-parse", "HEAD")), error) from error
    return _IN if _staged(tree) == before else ""


def _could_be_taken_out(tree: Path, patch: Path) -> bool:
    try:
        git(tree, "apply", "--check", "--reverse", "--whitespace=nowarn", str(patch), own=True)
    except UserError:
        return False
    return True


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
            done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, env=env, timeout=SED_S, check=False)
        except FileNotFoundError as error:
            raise UserError(f"--edit {edit.file}: sed is not installed, or not on PATH", "install GNU sed") from error
        except subprocess.TimeoutExpired as error:
            raise UserError(f"--edit {edit.file}: sed did not end within {SED_S:.0f} s", "do the clauses loop?") from error
    said = done.stderr.decode("utf-8", "replace").strip().replace(f"sed: file {script} ", "")
    if done.returncode == _IO_ERROR:
        raise TreeError(SkipKind.ENVIRONMENT, f"--edit {edit.file}: {said}", "see whether the disk is full")
    if done.returncode:
        fix = "install GNU sed" if "unrecognized option" in said or "illegal option" in said else "correct the clauses; see: info sed"
        raise UserError(f"--edit {edit.file}: sed does not accept {edit.clauses!r}: {said or 'no message'}", fix)
