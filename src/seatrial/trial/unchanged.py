"""The repositories of a change as they were at another revision: detached worktrees, for as long as they are needed.

- Nothing is fetched, no hook runs, and the checkouts under test are not touched. Submodules that are populated there are
  worktrees of the submodule's own repository: `git submodule update` would clone, and write into the shared configuration.
- What is made is removed, whatever happens; what a Seatrial that was killed left behind is taken over.
- Nothing is pruned: that could cost a worktree of the user's own, on a disk that is not mounted.
"""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from seatrial.evidence.git import commit_of, git
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
        # Forced: the place may still be registered, by a Seatrial that was killed.
        git(source, "worktree", "add", "--force", "--detach", str(place), commit)
    except UserError as error:
        raise BlockedError(Boundary.ENVIRONMENT, error.message, error.fix) from error
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


def _remove(source: Path, place: Path) -> None:
    try:
        git(source, "worktree", "remove", "--force", str(place))
    except UserError:  # never added, or no longer registered
        shutil.rmtree(place, ignore_errors=True)
