"""Which state stands before a change, and why a trial has none.

- The base of a repository is its merge base with the main branch, the merge base with `--base`, or HEAD where the work is
  uncommitted. A repository without a known base stays as it is on both sides, as long as another one has a base.
- A trial with a change always has a Baseline: where nothing can be run beside it, `absent` says why.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from seatrial.evidence.git import tree_of
from seatrial.model.record import Baseline, NoBase, Plan, RepoState
from seatrial.trial.differences import under_test

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
    """A note for each repository that stays as it is."""
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
    """The commits of a base, in a few letters."""
    return ", ".join(f"{repo.name} {repo.commit[:12]}" for repo in states)
