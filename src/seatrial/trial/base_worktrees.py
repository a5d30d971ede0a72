"""The state before a change: which commits, their detached worktrees, and what else differs from the baseline.

- The base of a repository is its merge base with the main branch, the merge base with `--base`, or HEAD where the work is uncommitted.
- Worktrees live as long as they are needed. Nothing is fetched, no hook and no filter runs, and the checkouts under test are not
  touched.
"""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from seatrial.core.errors import BlockedError, UserError
from seatrial.core.files import is_lfs_pointer
from seatrial.core.records import Baseline, NoBase, Plan, RepoState, Trial, replace
from seatrial.core.verdict import Boundary
from seatrial.evidence.git import DRIVER, commit_of, fields, git, is_ancestor, joined, pointers, smudge, smudge_drivers, tree_of
from seatrial.evidence.repos import gitlinks, is_checkout, repo_state


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
            states.append(replace(state, changed=tuple(file for file in repo.changed if (place / file).is_file())))
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


def under_test(plan: Plan) -> tuple[RepoState, ...]:
    """The repositories of the change, without those that are only driven."""
    return tuple(repo for repo in plan.changes if not repo.companion)


def other_settings(before: Trial, after: Trial) -> list[str]:
    old, new = before.plan, after.plan
    notes = [f"another model: {old.model}, here {new.model}"] if old.model != new.model else []
    differing = [name for name in sorted({*old.options, *new.options}) if old.options.get(name) != new.options.get(name)]
    notes += [f"another option {name}: {old.options.get(name)}, here {new.options.get(name)}" for name in differing]
    if old.arguments != new.arguments:
        notes.append(f"other loop arguments: {' '.join(old.arguments) or 'none'}, here {' '.join(new.arguments) or 'none'}")
    return notes


def other_changes(before: Sequence[RepoState], after: Sequence[RepoState]) -> list[str]:
    """What a recorded trial tested, where that is not simply an earlier state of the same repositories."""
    if {repo.name for repo in before} != {repo.name for repo in after}:
        names = [", ".join(repo.name for repo in side) or "none" for side in (before, after)]
        return [f"other repositories under test: {names[0]}, here {names[1]}"]
    states = {repo.name: repo.commit for repo in before}
    return [f"{repo.name} is at the same commit, only uncommitted work differs" for repo in after if states[repo.name] == repo.commit]


def other_surroundings(before: Trial, after: Trial) -> list[str]:
    """What was different beside the change: the environment, the checkouts that are only driven, Seatrial itself."""
    notes = []
    if before.environment and after.environment and before.environment.fingerprint != after.environment.fingerprint:
        notes.append(f"another environment: {before.environment.fingerprint[:12]}, here {after.environment.fingerprint[:12]}")
    driven = {repo.name: (repo.commit, repo.dirty) for repo in before.plan.changes if repo.companion}
    for repo in after.plan.changes:
        if repo.companion and driven.get(repo.name) != (repo.commit, repo.dirty):
            notes.append(
                f"another state of {repo.name}, which is driven: {driven.get(repo.name, ('none',))[0][:12]}, here {repo.commit[:12]}"
            )
    return notes + ([f"judged by Seatrial {before.seatrial}, here {after.seatrial}"] if before.seatrial != after.seatrial else [])


def arguments_of_change(trial: Trial) -> list[str]:
    """Arguments are passed on verbatim, also where they name a file of the change."""
    paths = [repo.path for repo in under_test(trial.plan)]
    named = [word for word in trial.plan.arguments if any(path in word for path in paths)]
    return [f"a loop argument names a file of the change on both sides: {word}" for word in named]


def lacks(trial: Trial, wanted: Baseline) -> list[str]:
    """What the checkouts hold beside what git keeps, and a worktree of a revision does not."""
    commits = {repo.name: repo.commit for repo in wanted.changes}
    found = {repo.name: ignored(repo, commits[repo.name]) for repo in under_test(trial.plan)}
    return [
        f"{name} holds {len(files)} files that git ignores and that the baseline lacks, such as {files[0]}: what cannot be imported "
        "there did not fail for want of the change"
        for name, files in found.items()
        if files
    ]


def ahead(trial: Trial, wanted: Baseline) -> list[str]:
    """Where the baseline has commits that the change does not hold: what differs may be theirs."""
    commits = {repo.name: repo.commit for repo in wanted.changes}
    beyond = [repo for repo in under_test(trial.plan) if not is_ancestor(Path(repo.path), commits[repo.name], repo.commit)]
    return [
        f"{wanted.source} holds commits that {repo.name} does not: a difference may be theirs; compare with "
        f"$(git merge-base {wanted.source} HEAD) to leave them out"
        for repo in beyond
    ]


MEANINGS: dict[NoBase, str] = {
    "unknown": "the base is not known: nothing is uncommitted, and HEAD is on the main branch or has no history. "
    "Name the state before the change: --base REV",
    "same files": "the base holds the same files as the checkout: there is no change",
    "switched off": "no base was run (--no-base): a failure may be older than the change",
    "fault": "no base runs beside an injected fault",
    "cluster": "no base was run: a Slurm job runs one trial. Run the base as a trial of its own, then name it: --baseline RUN",
}


def base_of(plan: Plan, *, run: bool, here: bool, fault: bool) -> Baseline | None:
    """The base of the change as a baseline; None when nothing is under test. It runs `here`, not as a Slurm job."""
    changes = under_test(plan)
    if not changes:
        return None
    absent = _absent(changes, run=run, here=here, fault=fault)
    if absent is not None:
        return Baseline(source="", origin="base", absent=absent, notes=(MEANINGS[absent],))
    pinned = tuple(RepoState(name=repo.name, path=repo.path, commit=repo.base or repo.commit, branch=None) for repo in changes)
    return Baseline(source=shown(pinned), origin="base", changes=pinned, notes=unbased(changes))


def unbased(changes: Sequence[RepoState]) -> tuple[str, ...]:
    return tuple(f"{repo.name} is the same on both sides: its base is not known" for repo in changes if not repo.base)


def _absent(changes: Sequence[RepoState], *, run: bool, here: bool, fault: bool) -> NoBase | None:
    if not run:
        return "switched off"
    if fault:
        return "fault"
    if not any(repo.base for repo in changes):
        return "unknown"
    if same_files(changes):
        return "same files"
    return None if here else "cluster"


def same_files(changes: Sequence[RepoState]) -> bool:
    """Whether a base is known, and every checkout holds what its base holds."""
    return any(repo.base for repo in changes) and all(_unchanged(repo) for repo in changes)


def _unchanged(repo: RepoState) -> bool:
    if repo.base is None:
        return True
    root = Path(repo.path)
    return not repo.dirty and (tree_of(root, repo.base) or repo.base) == (tree_of(root, repo.commit) or repo.commit)


def shown(states: Sequence[RepoState]) -> str:
    return ", ".join(f"{repo.name} {repo.commit[:12]}" for repo in states)
