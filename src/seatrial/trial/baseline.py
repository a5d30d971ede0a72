"""The unchanged side: the same levels without the change, and what each deliverable is in comparison.

- The trial comes first and keeps its verdict, whatever the baseline shows: a failure that was there before is still one.
- A revision is run as a trial of its own, in `RUN/baseline/trial`, only with the levels that came to a verdict; every
  repository of the change stands at that revision meanwhile, companions stay as they are.
- A recorded trial is only read. Another loop is refused; another model, environment and the like are noted.
- An interrupted baseline leaves the trial unfinished: `resume` runs what is missing.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from seatrial.evidence.git import commit_of, tree_of
from seatrial.evidence.redact import Redactor
from seatrial.evidence.repos import differs
from seatrial.files import read_json
from seatrial.launch.interrupt import Interrupted, Interruptible
from seatrial.loops import loop_of
from seatrial.model.errors import BlockedError, UserError
from seatrial.model.record import Baseline, Comparison, Plan, PlannedLevel, RepoState, Trial
from seatrial.model.verdict import Boundary
from seatrial.trial import conduct, rundir
from seatrial.trial.contrast import contrast
from seatrial.trial.differences import ahead, arguments_of_change, lacks, other_changes, other_settings, other_surroundings, under_test
from seatrial.trial.finish import FINAL, store
from seatrial.trial.progress import Ended, Event, Found, Judged, Listener, Running, SideJudged, SideRunning, Stage
from seatrial.trial.unchanged import discard, unchanged

PLACE = "baseline"


def requested(text: str, plan: Plan, here: bool = True) -> Baseline:
    """The baseline that a user named: a run directory, or a revision of every change, which is pinned to its commit.

    On a cluster, where not `here`, a job runs one trial: there only a recorded one can be compared with.
    """
    directory = Path(text).absolute()
    if (directory / "trial.json").is_file():
        recorded = rundir.load(directory)
        if recorded.plan.loop != plan.loop:
            message = f"--baseline {text}: a trial of {recorded.plan.loop}, this one is of {plan.loop}"
            raise UserError(message, "name a trial of the same loop, or a revision")
        fault = _fault(directory)
        if fault:
            message = f"--baseline {text}: a fault was injected into that trial ({fault}), so its failures excuse nothing"
            raise UserError(message, "name a trial without --fault")
        if _same(under_test(recorded.plan), under_test(plan), directory / "evidence"):
            raise UserError(f"--baseline {text}: a trial of what is under test", "name a trial of the state before the change")
        return Baseline(source=str(directory))
    if not here:
        fix = "run the baseline as a trial of its own, then give its run directory"
        raise UserError(f"--baseline {text}: with --on only a recorded trial can be compared with", fix)
    changes = under_test(plan)
    if not changes:
        raise UserError(f"--baseline {text}: a revision needs a change", "name the checkout under test with --change PATH")
    pinned = []
    for repo in changes:
        commit = commit_of(Path(repo.path), text)
        if commit is None:
            message = f"--baseline {text}: neither a run directory nor a revision of {repo.path}"
            raise UserError(message, "name a directory that `seatrial run` made, or a revision that every change has")
        pinned.append(RepoState(name=repo.name, path=repo.path, commit=commit, branch=None))
    if _same(pinned, changes):
        raise UserError(f"--baseline {text}: that is what is under test", "name the revision before the change")
    return Baseline(source=text, changes=tuple(pinned))


def _fault(directory: Path) -> str:
    """The fault that was injected into a recorded trial."""
    stored = directory / "evidence" / "request.json"
    return str(read_json(stored).get("options", {}).get("fault") or "") if stored.is_file() else ""


def _same(before: Sequence[RepoState], after: Sequence[RepoState], evidence: Path | None = None) -> bool:
    """Whether two sides hold the same files: such a baseline would excuse any failure. `evidence` has the patches of `before`."""
    old = {repo.name: repo for repo in before}
    return bool(after) and set(old) == {repo.name for repo in after} and all(_alike(old[repo.name], repo, evidence) for repo in after)


def _alike(old: RepoState, new: RepoState, evidence: Path | None) -> bool:
    """Whether two states of one repository hold the same files: another commit may, and uncommitted work may be the same."""
    if not old.dirty and not new.dirty:
        trees = {tree_of(Path(new.path), repo.commit) or repo.commit for repo in (old, new)}
        return len(trees) == 1
    return evidence is not None and differs(old.model_copy(update={"path": new.path}), evidence, Redactor(os.environ)) is None


def finish(request: conduct.Request, trial: Trial, listener: Listener) -> Trial:
    """The trial with its comparison, stored; as it is when none was asked for, when it has no verdict yet, or when every
    verdict has been compared already. The directory is held meanwhile: a second Seatrial would take the worktrees away."""
    wanted = trial.baseline
    if wanted is None or trial.status != "done" or _settled(wanted, trial, request.out):
        return trial
    with rundir.locked(request.out):
        with Interruptible() as stop:
            done = _finished(request, trial, wanted, listener, stop)
        if done == wanted:
            return trial
        update = {"status": "running"} if done is None else {"baseline": done}
        trial = trial.model_copy(update=update)
        store(request.out, loop_of(trial.plan), trial)
    listener(Ended(trial, str(request.out)))
    return trial


def _finished(request: conduct.Request, trial: Trial, wanted: Baseline, listener: Listener, stop: Interruptible) -> Baseline | None:
    """The comparison, or why there is none; None when it was interrupted."""
    try:
        return _recorded(trial, wanted, request) if _is_recorded(wanted) else _run(request, trial, wanted, listener, stop)
    except (BlockedError, UserError) as error:
        if stop.signal is not None:  # a terminal interrupts git, too
            return None
        note = f"the baseline is Blocked: {error.message}" + (f"; fix: {error.fix}" if error.fix else "")
        comparisons = contrast(None, request.out, trial, request.out)
        return wanted.model_copy(update={"comparisons": comparisons, "notes": (note,)})
    except Interrupted:
        return None


def _settled(wanted: Baseline, trial: Trial, out: Path) -> bool:
    """Whether there is nothing left to compare: what was compared is kept when the baseline is not there any more."""
    now = [(one.deliverable, one.after) for one in contrast(None, out, trial, out)]
    judged = all(one.before in FINAL for one in wanted.comparisons if one.after in FINAL)
    return bool(wanted.comparisons) and judged and now == [(one.deliverable, one.after) for one in wanted.comparisons]


def _is_recorded(baseline: Baseline) -> bool:
    return Path(baseline.source).is_absolute()


def _recorded(trial: Trial, wanted: Baseline, request: conduct.Request) -> Baseline:
    """The comparison with a trial that is only read."""
    place = Path(wanted.source)
    before = rundir.load(place)
    notes = [*other_settings(before, trial), *other_surroundings(before, trial)]
    notes += other_changes(under_test(before.plan), under_test(trial.plan))
    if before.status != "done":
        notes.append(f"the recorded trial is not finished (status: {before.status})")
    return _compared(wanted, before, place, trial, request).model_copy(update={"directory": str(place), "notes": tuple(notes)})


def _compared(wanted: Baseline, before: Trial, place: Path, trial: Trial, request: conduct.Request) -> Baseline:
    comparisons = contrast(before, place, trial, request.out)
    return wanted.model_copy(update={"comparisons": comparisons, "changes": under_test(before.plan)})


def _run(request: conduct.Request, trial: Trial, wanted: Baseline, listener: Listener, stop: Interruptible) -> Baseline:
    """The comparison with a revision, of which a trial is run unless it was run already."""
    place = request.out / PLACE / "trial"
    levels = _with_verdict(trial)
    if not levels and not any(side.verdict in FINAL for side in trial.sides):
        raise BlockedError(Boundary.CONFIG, "nothing of the trial itself came to a verdict, so there is nothing to compare", "")
    before = rundir.load(place) if (place / "trial.json").is_file() else None
    if before is None or not _covers(before, trial, levels):
        listener(Stage(PLACE, f"{wanted.source}: levels {', '.join(str(level.number) for level in levels) or 'none'}"))
        before = _trial_of(request, trial, wanted, levels, place, listener, stop)
    else:
        discard(under_test(trial.plan), request.out / PLACE / "src")
    unbuilt = lacks(trial, wanted)
    notes = [*other_surroundings(before, trial), *arguments_of_change(trial), *ahead(trial, wanted), *unbuilt]
    done = _compared(wanted, before, place, trial, request)
    comparisons = tuple(_not_built(one, before) if unbuilt else one for one in done.comparisons)
    update = {"directory": str(place.relative_to(request.out)), "notes": tuple(notes), "comparisons": comparisons}
    return done.model_copy(update=update)


def _not_built(one: Comparison, before: Trial) -> Comparison:
    """A level is not fixed by the change when its baseline, without what a build makes, never came to a step."""
    level = next((item for item in before.levels if one.deliverable == f"level {item.number} ({item.title})"), None)
    if one.word != "fixed" or (level is not None and level.steps_reached):
        return one
    note = f"the baseline lacks files that a build makes, and never came to a step there; {one.note}"
    return one.model_copy(update={"word": "not comparable", "note": note})


def _with_verdict(trial: Trial) -> tuple[PlannedLevel, ...]:
    final = {result.number for result in trial.levels if result.verdict in FINAL}
    return tuple(level for level in trial.plan.levels if level.number in final)


def _covers(before: Trial, trial: Trial, levels: Sequence[PlannedLevel]) -> bool:
    """Whether a stored baseline has a verdict on all that has one in the trial."""
    sides = {side.key for side in trial.sides if side.verdict in FINAL} - {side.key for side in before.sides if side.verdict in FINAL}
    left = {level.number for level in levels} - {level.number for level in _with_verdict(before)}
    return before.status == "done" and not sides and not left


def _trial_of(
    request: conduct.Request,
    trial: Trial,
    wanted: Baseline,
    levels: tuple[PlannedLevel, ...],
    place: Path,
    listener: Listener,
    stop: Interruptible,
) -> Trial:
    """Run the unchanged side, or finish its trial."""
    commits = {repo.name: repo.commit for repo in wanted.changes}
    changes = under_test(trial.plan)
    with unchanged([(repo, commits[repo.name]) for repo in changes], request.out / PLACE / "src") as states:
        stop.check()
        plan = _plan(request.plan, levels, states)
        tell = _aside(listener)
        if (place / "trial.json").is_file():
            if {level.number for level in levels} <= {level.number for level in rundir.load(place).plan.levels}:
                return _whole(conduct.resume(place, tell))
            place.rename(place.with_name(f"trial-{len(list(place.parent.glob('trial*')))}"))
        rundir.named_directory(place)
        python = request.python or _own_python(trial)
        return _whole(conduct.start(replace(request, plan=plan, out=place, python=python, baseline=None), tell))


def _own_python(trial: Trial) -> Path | None:
    """The Python of a loop that runs in the user's own environment: a worktree of the change has none of its own."""
    ours = loop_of(trial.plan).environment is not None
    return Path(trial.environment.python) if trial.environment and not ours else None


def _whole(trial: Trial) -> Trial:
    """A trial that ran to its end; one that did not was interrupted, and so are we."""
    if trial.status != "done":
        raise Interrupted(signal.SIGINT)
    return trial


def _plan(plan: Plan, levels: tuple[PlannedLevel, ...], states: tuple[RepoState, ...]) -> Plan:
    """The same plan on the unchanged side. An option that names a checkout of the change means the unchanged one there."""
    moved = {repo.path: state.path for repo, state in zip(under_test(plan), states, strict=True)}
    options = {name: moved.get(value, value) for name, value in plan.options.items()}
    changes = (*states, *(repo for repo in plan.changes if repo.companion))
    made = plan.model_copy(update={"levels": levels, "changes": changes, "options": options, "unmatched": ()})
    return made.model_copy(update={"changes": loop_of(made).placed(changes)})


def _aside(listener: Listener) -> Listener:
    """Tells of the baseline's trial so that nobody takes it for the trial itself."""

    def tell(event: Event) -> None:
        if isinstance(event, Running):
            listener(replace(event, title=f"{event.title}, {PLACE}"))
        elif isinstance(event, SideRunning):
            listener(replace(event, name=f"{event.name}, {PLACE}"))
        elif isinstance(event, Judged):
            listener(Stage(PLACE, f"level {event.result.number}: {event.result.verdict}, {event.result.reason}"))
        elif isinstance(event, SideJudged):
            listener(Stage(PLACE, f"{event.result.name}: {event.result.verdict}, {event.result.reason}"))
        elif isinstance(event, Found):
            listener(event)

    return tell
