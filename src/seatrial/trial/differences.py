"""What differs between a trial and its baseline beside the change itself, in sentences for the Limitations.

None of it changes a verdict: whoever reads a comparison must know what else may explain it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from seatrial.evidence.git import is_ancestor
from seatrial.model.record import Baseline, Plan, RepoState, Trial
from seatrial.trial.unchanged import ignored


def under_test(plan: Plan) -> tuple[RepoState, ...]:
    """The repositories of the change, without those that are only driven."""
    return tuple(repo for repo in plan.changes if not repo.companion)


def other_settings(before: Trial, after: Trial) -> list[str]:
    """What was asked for in another way."""
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
