"""The repositories of a change as they were at another revision: detached worktrees, for as long as they are needed.

- Nothing is fetched, no hook runs, and the checkouts under test are not touched. Submodules that are populated there are
  worktrees of the submodule's own repository: `git submodule update` would clone, and write into the shared configuration.
- What is made is removed, whatever happens; what a Seatrial that was killed left behind is taken over, or discarded.
- Nothing is pruned: that could cost a worktree of the user's own, on a disk that is not mounted.
"""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from seatrial.evidence.git import commit_of, fields, git
from seatrial.evidence.lfs import is_pointer, pointers
from seatrial.evidence.repos import repo_state
from seatrial.evidence.worktree import gitlinks, is_checkout
from seatrial.model.errors import BlockedError, UserError
from seatrial.model.record import RepoState
from seatrial.model.verdict import Boundary


@contextmanager
def unchanged(changes: Sequence[tuple[RepoState, str]], root: Path) -> Iterator[tuple[RepoState, ...]]:
    """Each change at a commit, below `root`, under its own name. A BlockedError says what cannot be had here."""
    made: list[tuple[Path, Path]] = []
    try:
        states = []
        root.mkdir(parents=True, exist_ok=True)
        for repo, commit in changes:
            place = root / repo.name
            shutil.rmtree(place, ignore_errors=True)
            _populate(Path(repo.path), commit, place, made)
            state = repo_state(place, repo.name)
            states.append(state.model_copy(update={"changed": tuple(file for file in repo.changed if (place / file).is_file())}))
        yield tuple(states)
    finally:
        for source, place in reversed(made):
            _remove(source, place)


def _populate(source: Path, commit: str, place: Path, made: list[tuple[Path, Path]]) -> None:
    """A worktree of the checkout at `source`, and of every submodule that is populated there."""
    made.append((source, place))
    try:
        # Forced: the place may still be registered, by a Seatrial that was killed; twice: and locked, by a git that was.
        git(source, "worktree", "add", "--force", "--force", "--detach", str(place), commit)
    except UserError as error:
        raise BlockedError(Boundary.ENVIRONMENT, error.message, error.fix) from error
    _refuse_pointers(source, place, commit)
    here = {link.path for link in gitlinks(source)}
    for link in gitlinks(place):
        inner = source / link.path
        if is_checkout(inner) and commit_of(inner, link.commit):
            _populate(inner, link.commit, place / link.path, made)
        elif is_checkout(inner):
            message = f"{inner}: this submodule does not hold {link.commit}, at which it stood in {commit[:12]}"
            raise BlockedError(Boundary.ENVIRONMENT, message, f"git -C {shlex.quote(str(inner))} fetch origin {link.commit}")
        elif link.path not in here:
            message = f"{source}: the submodule {link.path} of {commit[:12]} is not part of the change, so it is not here"
            fix = "make a checkout of that revision with its submodules, run it as a trial of its own, and give its run directory"
            raise BlockedError(Boundary.ENVIRONMENT, message, fix)


def _refuse_pointers(source: Path, place: Path, commit: str) -> None:
    """Git LFS that skips its downloads leaves pointers, which are no contents: what then fails would look like the revision's."""
    lost = [path for path in pointers(place) if (source / path).is_file() and not is_pointer(source / path)]
    if lost:
        message = f"{source}: {len(lost)} files of Git LFS are pointers in a worktree of {commit[:12]}, such as {lost[0]}"
        fix = f"git -C {shlex.quote(str(source))} lfs fetch origin {commit}, and let Git LFS smudge (git lfs install --force)"
        raise BlockedError(Boundary.ENVIRONMENT, message, fix)


def _remove(source: Path, place: Path) -> None:
    try:
        git(source, "worktree", "remove", "--force", "--force", str(place))
    except UserError:  # never added, or no longer registered
        shutil.rmtree(place, ignore_errors=True)


def discard(changes: Sequence[RepoState], root: Path) -> None:
    """Remove what a Seatrial that was killed left below `root`, when nothing is to be run there any more."""
    for repo in changes:
        _discard(Path(repo.path), root / repo.name)


def _discard(source: Path, place: Path) -> None:
    if is_checkout(place):
        for link in gitlinks(place):
            _discard(source / link.path, place / link.path)
        _remove(source, place)


def ignored(repo: RepoState, commit: str) -> tuple[str, ...]:
    """Files that packages of the checkout may import and that git ignores, so that a worktree of `commit` lacks them:
    compiled extensions, and what a build generates."""
    if repo.import_root is None:
        return ()
    root, places = Path(repo.path), [Path(repo.import_root, *package.split(".")) for package in repo.packages]
    inside = [str(place.relative_to(root)) for place in places if place.is_dir() and place.is_relative_to(root)]
    if not inside:
        return ()
    found = fields(git(root, "ls-files", "-z", "--others", "--ignored", "--exclude-standard", "--", *inside))
    held = set(fields(git(root, "ls-tree", "-r", "-z", "--name-only", commit, "--", *inside)))
    return tuple(sorted(path for path in found if path.endswith((".py", ".so")) and path not in held))
