"""The repositories of a change as they were at another revision: detached worktrees, for as long as they are needed.

- Nothing is fetched, no hook and no filter runs, and the checkouts under test are not touched. Submodules that are populated there are
  worktrees of the submodule's own repository: `git submodule update` would clone, and write into the shared configuration.
- Contents of Git LFS come from where the checkout keeps them. A tree with files behind another filter is refused: without it they
  would not be what the checkout has.
- What is made is removed, whatever happens; what a Seatrial that was killed left behind is taken over, or discarded.
- Nothing is pruned: that could cost a worktree of the user's own, on a disk that is not mounted.
"""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from seatrial.evidence.git import commit_of, fields, git, joined, smudge_drivers
from seatrial.evidence.lfs import DRIVER, pointers, smudge
from seatrial.evidence.repos import repo_state
from seatrial.evidence.worktree import gitlinks, is_checkout
from seatrial.files import is_lfs_pointer
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
    smudge(source, place)
    _refuse_pointers(source, place, commit)
    _refuse_filtered(source, place, commit)
    here = {link.path for link in gitlinks(source)}
    for link in gitlinks(place):
        inner = source / link.path
        if is_checkout(source, link.path) and commit_of(inner, link.commit):
            _populate(inner, link.commit, place / link.path, made)
        elif is_checkout(source, link.path):
            message = f"{inner}: this submodule does not hold {link.commit}, at which it stood in {commit[:12]}"
            raise BlockedError(Boundary.ENVIRONMENT, message, f"git -C {shlex.quote(str(inner))} fetch origin {link.commit}")
        elif link.path not in here:
            message = f"{source}: the submodule {link.path} of {commit[:12]} is not part of the change, so it is not here"
            fix = "make a checkout of that revision with its submodules, run it as a trial of its own, and give its run directory"
            raise BlockedError(Boundary.ENVIRONMENT, message, fix)


def _refuse_pointers(source: Path, place: Path, commit: str) -> None:
    """Git LFS that skips its downloads leaves pointers, which are no contents: what then fails would look like the revision's."""
    lost = [path for path in pointers(place) if (source / path).is_file() and not is_lfs_pointer(source / path)]
    if lost:
        message = f"{source}: {len(lost)} files of Git LFS are pointers in a worktree of {commit[:12]}, such as {lost[0]}"
        fix = f"git -C {shlex.quote(str(source))} lfs fetch origin {commit}"
        raise BlockedError(Boundary.ENVIRONMENT, message, fix)


def _refuse_filtered(source: Path, place: Path, commit: str) -> None:
    """Files that a filter of the checkout would have changed on their way out of git."""
    drivers = smudge_drivers(source) - {DRIVER}
    if not drivers:
        return
    columns = fields(git(place, "check-attr", "-z", "--stdin", "filter", stdin=joined(fields(git(place, "ls-files", "-z")))))
    held = [(path, name) for path, name in zip(columns[::3], columns[2::3], strict=True) if name in drivers]
    if held:
        message = f"{source}: {len(held)} files of {commit[:12]} need the filter {held[0][1]}, such as {held[0][0]}; no filter is run"
        fix = "make a checkout of that revision yourself, run it as a trial of its own, and give its run directory"
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
    if (place / ".git").exists():
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
