"""The unchanged side: the same levels without the change, and what each deliverable is in comparison.

- The base of the change is the baseline unless `--baseline` names another one, or nothing can be run (see `base`).
- The trial comes first. What the comparison makes of its verdicts is said by `settle`; its own verdicts are kept.
- A revision is run as a trial of its own, in `RUN/baseline/trial`, only with the levels that came to a verdict; every
  repository of the change stands at that revision meanwhile, companions stay as they are.
  A level of a base that ran before, with everything the same, is taken from the cache (see `base_cache`).
- A recorded trial is only read. Another loop is refused; another model, environment and the like are noted: under other
  conditions nothing is new, and nothing is excused.
- Levels that ran on both sides are compared bit by bit (see `bits`).
- An interrupted baseline leaves the trial unfinished: `resume` runs what is missing.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from seatrial.evidence.git import commit_of, tree_of
from seatrial.evidence.redact import Redactor
from seatrial.evidence.repos import differs
from seatrial.files import read_as, read_table, write_json
from seatrial.launch.interrupt import Interrupted, Interruptible
from seatrial.loops import loop_of
from seatrial.model.errors import BlockedError, UserError
from seatrial.model.record import Baseline, BitComparison, Comparison, Plan, PlannedLevel, RepoState, Trial
from seatrial.model.verdict import Boundary, Verdict
from seatrial.report.outcome import altered_words
from seatrial.report.text import unique
from seatrial.trial import conduct, rundir, verify
from seatrial.trial import settle as settling
from seatrial.trial.base import unbased
from seatrial.trial.base_cache import Key, level_key, load
from seatrial.trial.base_cache import store as keep
from seatrial.trial.bits import compare_levels
from seatrial.trial.contrast import contrast
from seatrial.trial.differences import ahead, arguments_of_change, lacks, other_changes, other_settings, other_surroundings, under_test
from seatrial.trial.finish import FINAL, conclude, store
from seatrial.trial.progress import Compared, Ended, Event, Found, Judged, Listener, Running, SideJudged, SideRunning, Stage
from seatrial.trial.unchanged import discard, unchanged

PLACE, REUSED = "baseline", "reused.json"


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
    options = read_table(stored).get("options") if stored.is_file() else None
    return str(options.get("fault") or "") if isinstance(options, dict) else ""


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
    if wanted is None or trial.status != "done" or trial.alterations:
        return trial
    alone = settling.own(trial)
    with rundir.locked(request.out):
        done: Baseline | None = wanted
        if wanted.absent is None and not _settled(wanted, alone, request.out):
            if wanted.expect:  # until it is compared, what is expected was not shown: a kill must not leave a Pass
                trial = _stored(request.out, trial, _settle(alone, wanted).model_copy(update={"status": "running"}))
            with Interruptible() as stop:
                done = _finished(request, alone, wanted, listener, stop)
        made = trial.model_copy(update={"status": "running"}) if done is None else _settle(alone, done)
        if made.model_copy(update={"ended": trial.ended}) == trial and done is not None:
            return trial
        _stored(request.out, trial, made)
    for before, level in zip(alone.levels, made.levels, strict=True):
        if level.verdict is not before.verdict:
            listener(Judged(level))
    for found in done.bits if done else ():
        listener(Compared(found.level, wanted.source, found))
    listener(Ended(made, str(request.out)))
    return made


def _stored(out: Path, before: Trial, made: Trial) -> Trial:
    """Store a settled trial, and the levels whose result differs from before."""
    for old, level in zip(before.levels, made.levels, strict=True):
        if level.directory and level != old:
            write_json(out / level.directory / "result.json", level)
    store(out, loop_of(made.plan), made)
    return made


def _settle(alone: Trial, done: Baseline) -> Trial:
    """The trial with the verdicts that the comparison leaves."""
    levels, sides = settling.settle(alone, done)
    return conclude(alone.model_copy(update={"baseline": done, "sides": sides}), levels, finished=True)


def _finished(request: conduct.Request, trial: Trial, wanted: Baseline, listener: Listener, stop: Interruptible) -> Baseline | None:
    """The comparison, or why there is none; None when it was interrupted."""
    try:
        return _recorded(trial, wanted, request) if _is_recorded(wanted) else _run(request, trial, wanted, listener, stop)
    except (BlockedError, UserError) as error:
        if stop.signal is not None:  # a terminal interrupts git, too
            return None
        note = f"the {_word(wanted)} is Blocked: {error.message}" + (f"; fix: {error.fix}" if error.fix else "")
        comparisons = _of_interest(contrast(None, request.out, trial, request.out), trial, wanted, _sides_to_run(trial, wanted))
        return wanted.model_copy(update={"comparisons": comparisons, "bits": (), "notes": (note,)})
    except Interrupted:
        return None


def _word(baseline: Baseline) -> str:
    return "base" if baseline.origin == "base" else PLACE


def _settled(wanted: Baseline, trial: Trial, out: Path) -> bool:
    """Whether there is nothing left to compare: what was compared is kept when the baseline is not there any more."""
    now = [(one.deliverable, one.after) for one in contrast(None, out, trial, out)]
    judged = all(one.before in FINAL for one in wanted.comparisons if one.after in FINAL)
    return bool(wanted.comparisons) and judged and now == [(one.deliverable, one.after) for one in wanted.comparisons]


def _is_recorded(baseline: Baseline) -> bool:
    return Path(baseline.source).is_absolute()


def _recorded(trial: Trial, wanted: Baseline, request: conduct.Request) -> Baseline:
    """The comparison with a trial that is only read. Under other conditions nothing is new, and nothing is excused."""
    place = Path(wanted.source)
    before = verify.verified(place, rundir.load(place))
    unequal = [*other_settings(before, trial), *other_surroundings(before, trial)]
    notes = [*unequal, *other_changes(under_test(before.plan), under_test(trial.plan))]
    if before.status != "done":
        notes.append(f"the recorded trial is not finished (status: {before.status})")
    if before.alterations:
        notes.append(f"the recorded trial: {altered_words(before.alterations)}")
    done = _compared(wanted, before, place, trial, request)
    if unequal:
        update = {"comparisons": tuple(_unequal(one) for one in done.comparisons), "bits": _not_bits(done.bits, unequal[0])}
        done = done.model_copy(update=update)
    return done.model_copy(update={"directory": str(place), "notes": tuple(notes)})


def _unequal(one: Comparison) -> Comparison:
    """A comparison under other conditions."""
    if one.word != "newly broken":
        return one.model_copy(update={"excuses": False})
    note = "; ".join(part for part in (f"{one.before} there and {one.after} here, under other conditions", one.note) if part)
    return one.model_copy(update={"word": "not comparable", "excuses": False, "note": note})


def _not_bits(found: Sequence[BitComparison], why: str) -> tuple[BitComparison, ...]:
    return tuple(BitComparison(level=one.level, outcome="not comparable", reason=why) for one in found)


def _compared(wanted: Baseline, before: Trial, place: Path, trial: Trial, request: conduct.Request) -> Baseline:
    old = settling.own(before)
    comparisons = contrast(old, place, trial, request.out)
    bits = _bits(old, place, trial, request.out)
    return wanted.model_copy(update={"comparisons": comparisons, "bits": bits, "changes": under_test(before.plan)})


def _bits(before: Trial, place: Path, trial: Trial, out: Path) -> tuple[BitComparison, ...]:
    """Every level that came to a verdict on both sides, bit by bit."""
    is_clock = loop_of(trial.plan).is_clock
    old = {(level.number, level.name): level for level in before.levels if level.verdict in FINAL and level.directory}
    pairs = [(old.get((level.number, level.name)), level) for level in trial.levels if level.verdict in FINAL and level.directory]
    return tuple(compare_levels(level.number, place / there.directory, out / level.directory, is_clock) for there, level in pairs if there)


def _run(request: conduct.Request, trial: Trial, wanted: Baseline, listener: Listener, stop: Interruptible) -> Baseline:
    """The comparison with a revision, of which a trial is run unless it was run already."""
    place = request.out / PLACE / "trial"
    levels, sides = _with_verdict(trial), _sides_to_run(trial, wanted)
    if not levels and not sides:
        raise BlockedError(Boundary.CONFIG, "nothing of the trial itself came to a verdict, so there is nothing to compare", "")
    before = verify.verified(place, rundir.load(place)) if (place / "trial.json").is_file() else None
    if before is None or not _covers(before, sides, levels):
        listener(Stage(_word(wanted), f"{wanted.source}: levels {', '.join(str(level.number) for level in levels) or 'none'}"))
        before = _trial_of(request, trial, wanted, levels, sides, place, listener, stop)
    else:
        discard(under_test(trial.plan), request.out / PLACE / "src")
    unbuilt = lacks(trial, wanted)
    notes = [
        *(unbased(under_test(trial.plan)) if wanted.origin == "base" else ()),
        *other_surroundings(before, trial),
        *arguments_of_change(trial),
        *ahead(trial, wanted),
        *unbuilt,
    ]
    done = _compared(wanted, before, place, trial, request)
    comparisons = tuple(_not_built(one, before) if unbuilt else one for one in _of_interest(done.comparisons, trial, wanted, sides))
    reused = read_as(place / REUSED, tuple[int, ...]) if (place / REUSED).is_file() else ()
    update = {"directory": str(place.relative_to(request.out)), "notes": unique(notes), "comparisons": comparisons, "reused": reused}
    return done.model_copy(update=update)


def _sides_to_run(trial: Trial, wanted: Baseline) -> tuple[str, ...]:
    """Tests before the levels that the unchanged side runs, too: for a base only those that failed. A gate that failed was
    compared on its own, and one that did not must not keep the levels of the unchanged side from running."""
    judged = [side for side in trial.sides if side.verdict in FINAL and not side.gate]
    return tuple(side.key for side in judged if wanted.origin == "requested" or side.verdict is Verdict.FAIL)


def _not_built(one: Comparison, before: Trial) -> Comparison:
    """A baseline that lacks what a build makes, and never came to a step, tells nothing about the change."""
    level = next((item for item in before.levels if one.deliverable == f"level {item.number} ({item.title})"), None)
    if one.word not in ("fixed", "newly broken") or one.before is Verdict.PASS or (level is not None and level.steps_reached):
        return one
    note = f"the baseline lacks files that a build makes, and never came to a step there; {one.note}"
    return one.model_copy(update={"word": "not comparable", "note": note})


def _of_interest(comparisons: Sequence[Comparison], trial: Trial, wanted: Baseline, sides: Sequence[str]) -> tuple[Comparison, ...]:
    """Of a base: what came to a verdict and was to run there, too."""
    if wanted.origin != "base":
        return tuple(comparisons)
    names = {side.name for side in trial.sides if side.key in sides}
    names |= {f"level {level.number} ({level.title})" for level in trial.levels if level.verdict in FINAL}
    return tuple(one for one in comparisons if one.deliverable in names)


def _with_verdict(trial: Trial) -> tuple[PlannedLevel, ...]:
    final = {result.number for result in trial.levels if result.verdict in FINAL}
    return tuple(level for level in trial.plan.levels if level.number in final)


def _covers(before: Trial, sides: Sequence[str], levels: Sequence[PlannedLevel]) -> bool:
    """Whether a stored baseline has a verdict on all that is to be compared."""
    lost = set(sides) - {side.key for side in before.sides if side.verdict in FINAL}
    left = {level.number for level in levels} - {level.number for level in _with_verdict(before)}
    return before.status == "done" and not lost and not left


def _trial_of(
    request: conduct.Request,
    trial: Trial,
    wanted: Baseline,
    levels: tuple[PlannedLevel, ...],
    sides: tuple[str, ...],
    place: Path,
    listener: Listener,
    stop: Interruptible,
) -> Trial:
    """Run the unchanged side, or finish its trial. What of it ran before, under the same conditions, is taken from the cache."""
    commits = {repo.name: repo.commit for repo in wanted.changes}
    changes = under_test(trial.plan)
    keys = {level.number: level_key(request.plan, trial, wanted.changes, level, request.out / "evidence") for level in levels}
    with unchanged([(repo, commits[repo.name]) for repo in changes], request.out / PLACE / "src") as states:
        stop.check()
        plan = _plan(request.plan, levels, states)
        tell = _aside(listener, _word(wanted))
        if (place / "trial.json").is_file():
            if {level.number for level in levels} <= {level.number for level in rundir.load(place).plan.levels}:
                return _kept(_whole(conduct.resume(place, tell)), place, keys)
            place.rename(place.with_name(f"trial-{len(list(place.parent.glob('trial*')))}"))
        shutil.rmtree(place, ignore_errors=True)  # what a Seatrial that was killed left of a copy from the cache
        rundir.named_directory(place)
        roots = {state.name: state.path for state in states}
        found = [load(keys[level.number], level, rundir.level_directory(place, level), roots) for level in levels]
        known = tuple(result for result in found if result is not None)
        write_json(place / REUSED, [result.number for result in known])
        if known:
            listener(Stage(_word(wanted), f"levels {', '.join(str(result.number) for result in known)} ran before: taken from the cache"))
        python = request.python or _own_python(trial)
        options = {name: value for name, value in request.options.items() if name != "fault"}  # it stands for a bug of the change
        unlike = replace(request, plan=plan, out=place, python=python, baseline=None, options=options, sides=sides, base=True)
        return _kept(_whole(conduct.start(unlike, tell, known)), place, keys)


def _kept(trial: Trial, place: Path, keys: Mapping[int, Key]) -> Trial:
    """The trial of the unchanged side, with the levels that ran put into the cache."""
    reused = set(read_as(place / REUSED, tuple[int, ...])) if (place / REUSED).is_file() else set()
    for level in trial.levels:
        if level.number in keys and level.number not in reused and level.directory:
            keep(keys[level.number], level, place / level.directory, trial.plan.changes)
    return trial


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


def _aside(listener: Listener, word: str) -> Listener:
    """Tells of the unchanged side's trial so that nobody takes it for the trial itself."""

    def tell(event: Event) -> None:
        if isinstance(event, Running):
            listener(replace(event, title=f"{event.title}, {word}"))
        elif isinstance(event, SideRunning):
            listener(replace(event, name=f"{event.name}, {word}"))
        elif isinstance(event, Judged):
            listener(Stage(word, f"level {event.result.number}: {event.result.verdict}, {event.result.reason}"))
        elif isinstance(event, SideJudged):
            listener(Stage(word, f"{event.result.name}: {event.result.verdict}, {event.result.reason}"))
        elif isinstance(event, Found):
            listener(event)

    return tell
