"""Runs the same levels without the change, and settles what each deliverable is in comparison.

- The base of the change is the baseline unless `--baseline` names another one, or nothing can be run (see `base_worktrees`).
- The trial comes first. Its own verdicts are kept beside the settled ones.
- A Fail that the base has too is Blocked: it says nothing about the change.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from seatrial.core.errors import BlockedError, UserError
from seatrial.core.files import read_as, read_table, write_json
from seatrial.core.records import (
    Baseline,
    BitComparison,
    Comparison,
    LevelResult,
    OwnVerdict,
    Plan,
    PlannedLevel,
    RepoState,
    SideResult,
    Trial,
)
from seatrial.core.records import replace as replace_record
from seatrial.core.text import unique
from seatrial.core.verdict import Boundary, Verdict
from seatrial.evidence.git import commit_of, tree_of
from seatrial.evidence.redact import Redactor
from seatrial.evidence.repos import differs
from seatrial.loops import loop_of
from seatrial.report.outcomes import altered_words, difference_words
from seatrial.runtime.interrupt import Interrupted, Interruptible
from seatrial.trial import base_worktrees as worktrees
from seatrial.trial import run_dir, runner, verify
from seatrial.trial.base_cache import Key, level_key, load
from seatrial.trial.base_cache import store as keep
from seatrial.trial.compare import boundary_of, compare_levels, contrast
from seatrial.trial.conclude import FINAL, conclude, store
from seatrial.trial.progress import Compared, Ended, Event, Found, Judged, Listener, Running, SideJudged, SideRunning, Stage

IMPORTS = ("ImportError", "ModuleNotFoundError")
"""What code raises that was written for other versions of its packages, or of our shims."""
NAME_BASE = "name the state before the change, so that it is run beside it: --base REV"
Result = TypeVar("Result", LevelResult, SideResult)


def own(trial: Trial) -> Trial:
    """The trial with the verdicts that its runs came to by themselves."""
    levels = tuple(_restored(level) for level in trial.levels)
    return replace_record(trial, levels=levels, sides=tuple(_restored(side) for side in trial.sides))


def settle(trial: Trial, baseline: Baseline) -> tuple[tuple[LevelResult, ...], tuple[SideResult, ...]]:
    """Levels and tests of a trial (see `own`) with their verdicts beside the base."""
    words = {one.deliverable: one for one in baseline.comparisons}
    bits = {one.level: one for one in baseline.bits}
    changes = worktrees.under_test(trial.plan)
    levels = []
    for level in trial.levels:
        one = words.get(f"level {level.number} ({level.title})")
        made = _level(level, one, baseline, changes)
        levels.append(_expected(made, one.word if one else "", bits.get(level.number), baseline))
    return tuple(levels), tuple(_side(side, words.get(side.name), baseline) for side in trial.sides)


def _restored(result: Result) -> Result:
    if result.own is None:
        return result
    before = result.own
    return replace_record(result, verdict=before.verdict, reason=before.reason, boundary=before.boundary, own=None)


def _overruled(result: Result, verdict: Verdict, reason: str, boundary: Boundary | None) -> Result:
    before = result.own or OwnVerdict(verdict=result.verdict, reason=result.reason, boundary=result.boundary)
    return replace_record(result, verdict=verdict, reason=reason, boundary=boundary, own=before)


def _level(level: LevelResult, found: Comparison | None, baseline: Baseline, changes: Sequence[RepoState]) -> LevelResult:
    if level.verdict is not Verdict.FAIL:
        return level
    if found is not None and found.excuses:
        reason = f"the base ({baseline.source}) fails in the same way, so this says nothing about the change: {level.reason}"
        return _overruled(level, Verdict.BLOCKED, reason, level.boundary)
    if found is not None and found.word != "not comparable":
        return level
    why = _not_the_changes(level, baseline, changes)
    if why is None:
        return level
    blocked = _overruled(level, Verdict.BLOCKED, f"{why}: {level.reason}", level.boundary)
    fix = NAME_BASE if baseline.absent == "unknown" else "run it again with its base"
    follow = level.follow_ups if baseline.absent == "same files" or fix in level.follow_ups else (*level.follow_ups, fix)
    return replace_record(blocked, follow_ups=follow)


def _not_the_changes(level: LevelResult, baseline: Baseline, changes: Sequence[RepoState]) -> str | None:
    """Why a failure that was not compared cannot be held against the change; None when it may be the change's."""
    found = level.diagnosis
    unfit = found is not None and found.exception in IMPORTS
    match baseline.absent:
        case "switched off" | "fault":
            return None
        case "same files":
            return "nothing differs from the base, so there is no change to hold this against"
        case "unknown":
            if not level.steps_reached:
                return "failed before the first training step, and no base is known to compare with"
            return "an import does not fit, and no base is known to compare with" if unfit else None
    if not unfit or level.steps_reached or found is None or _touches(found.excerpt, changes):
        return None
    return "an import does not fit in files that the change does not touch, and the base was not compared"


def _touches(excerpt: Sequence[str], changes: Sequence[RepoState]) -> bool:
    files = [f'File "{root}/{file}"' for repo in changes for file in repo.changed for root in (repo.path, repo.synced) if root]
    return any(file in line for file in files for line in excerpt)


def _side(side: SideResult, found: Comparison | None, baseline: Baseline) -> SideResult:
    """Tests before the levels; a gate was compared with the base when it failed (see `pre_tests`)."""
    if side.verdict is not Verdict.FAIL or side.gate:
        return side
    if found is not None and found.excuses:
        reason = f"the base ({baseline.source}) fails in the same way, so this says nothing about the change: {side.reason}"
        return _overruled(side, Verdict.BLOCKED, reason, side.boundary)
    if baseline.absent == "same files":
        return _overruled(side, Verdict.BLOCKED, f"nothing differs from the base, so there is no change: {side.reason}", side.boundary)
    if baseline.absent == "unknown" and not side.passed:
        why = "no test passed, and no base is known to compare with"
        return _overruled(side, Verdict.BLOCKED, f"{why} ({NAME_BASE}): {side.reason}", side.boundary)
    return side


def _expected(level: LevelResult, word: str, found: BitComparison | None, baseline: Baseline) -> LevelResult:
    ran = level.own.verdict if level.own else level.verdict
    if baseline.expect != "identical" or ran not in (Verdict.PASS, Verdict.FAIL):
        return level
    if word == "fixed" and level.verdict is Verdict.PASS:
        reason = "--expect identical: the base itself fails, so there is nothing to be identical to"
        return _overruled(level, Verdict.BLOCKED, reason, Boundary.ENVIRONMENT)
    if found is not None and found.difference is not None:
        if level.verdict is Verdict.FAIL:
            return level
        reason = f"not identical to the base, as --expect demands: {difference_words(found.difference)}"
        return _overruled(level, Verdict.FAIL, reason, boundary_of(found.difference))
    if found is not None and found.outcome == "identical":
        return level
    if level.verdict is not Verdict.PASS:
        return level
    why = found.reason if found else "; ".join(baseline.notes) or "the base has no such level"
    reason = f"--expect identical: no comparison with the base was possible: {why}"
    return _overruled(level, Verdict.BLOCKED, reason, Boundary.ENVIRONMENT)


PLACE, REUSED = "baseline", "reused.json"


def requested(text: str, plan: Plan, here: bool = True) -> Baseline:
    """The baseline that a user named: a run directory, or a revision of every change, which is pinned to its commit.

    On a cluster, where not `here`, a job runs one trial: there only a recorded one can be compared with.
    """
    directory = Path(text).absolute()
    if (directory / "trial.json").is_file():
        recorded = run_dir.load(directory)
        if recorded.plan.loop != plan.loop:
            message = f"--baseline {text}: a trial of {recorded.plan.loop}, this one is of {plan.loop}"
            raise UserError(message, "name a trial of the same loop, or a revision")
        fault = _fault(directory)
        if fault:
            message = f"--baseline {text}: a fault was injected into that trial ({fault}), so its failures excuse nothing"
            raise UserError(message, "name a trial without --fault")
        if _same(worktrees.under_test(recorded.plan), worktrees.under_test(plan), directory / "evidence"):
            raise UserError(f"--baseline {text}: a trial of what is under test", "name a trial of the state before the change")
        return Baseline(source=str(directory))
    if not here:
        fix = "run the baseline as a trial of its own, then give its run directory"
        raise UserError(f"--baseline {text}: with --on only a recorded trial can be compared with", fix)
    changes = worktrees.under_test(plan)
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
    return evidence is not None and differs(replace_record(old, path=new.path), evidence, Redactor(os.environ)) is None


def finish(request: runner.Request, trial: Trial, listener: Listener) -> Trial:
    """The trial with its comparison, stored; as it is when none was asked for, when it has no verdict yet, or when every
    verdict has been compared already. The directory is held meanwhile: a second Seatrial would take the worktrees away."""
    wanted = trial.baseline
    if wanted is None or trial.status != "done" or trial.alterations:
        return trial
    alone = own(trial)
    with run_dir.locked(request.out):
        done: Baseline | None = wanted
        if wanted.absent is None and not _settled(wanted, alone, request.out):
            if wanted.expect:  # until it is compared, what is expected was not shown: a kill must not leave a Pass
                trial = _stored(request.out, trial, replace_record(_settle(alone, wanted), status="running"))
            with Interruptible() as stop:
                done = _finished(request, alone, wanted, listener, stop)
        made = replace_record(trial, status="running") if done is None else _settle(alone, done)
        if replace_record(made, ended=trial.ended) == trial and done is not None:
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
    levels, sides = settle(alone, done)
    return conclude(replace_record(alone, baseline=done, sides=sides), levels, finished=True)


def _finished(request: runner.Request, trial: Trial, wanted: Baseline, listener: Listener, stop: Interruptible) -> Baseline | None:
    """The comparison, or why there is none; None when it was interrupted."""
    try:
        return _recorded(trial, wanted, request) if Path(wanted.source).is_absolute() else _run(request, trial, wanted, listener, stop)
    except (BlockedError, UserError) as error:
        if stop.signal is not None:  # a terminal interrupts git, too
            return None
        note = f"the {_word(wanted)} is Blocked: {error.message}" + (f"; fix: {error.fix}" if error.fix else "")
        comparisons = _of_interest(contrast(None, request.out, trial, request.out), trial, wanted, _sides_to_run(trial, wanted))
        return replace_record(wanted, comparisons=comparisons, bits=(), notes=(note,))
    except Interrupted:
        return None


def _word(baseline: Baseline) -> str:
    return "base" if baseline.origin == "base" else PLACE


def _settled(wanted: Baseline, trial: Trial, out: Path) -> bool:
    """Whether there is nothing left to compare: what was compared is kept when the baseline is not there any more."""
    now = [(one.deliverable, one.after) for one in contrast(None, out, trial, out)]
    judged = all(one.before in FINAL for one in wanted.comparisons if one.after in FINAL)
    return bool(wanted.comparisons) and judged and now == [(one.deliverable, one.after) for one in wanted.comparisons]


def _recorded(trial: Trial, wanted: Baseline, request: runner.Request) -> Baseline:
    """The comparison with a trial that is only read. Under other conditions nothing is new, and nothing is excused."""
    place = Path(wanted.source)
    before = verify.verified(place, run_dir.load(place))
    unequal = [*worktrees.other_settings(before, trial), *worktrees.other_surroundings(before, trial)]
    notes = [*unequal, *worktrees.other_changes(worktrees.under_test(before.plan), worktrees.under_test(trial.plan))]
    if before.status != "done":
        notes.append(f"the recorded trial is not finished (status: {before.status})")
    if before.alterations:
        notes.append(f"the recorded trial: {altered_words(before.alterations)}")
    done = _compared(wanted, before, place, trial, request)
    if unequal:
        update = {"comparisons": tuple(_unequal(one) for one in done.comparisons), "bits": _not_bits(done.bits, unequal[0])}
        done = replace_record(done, **update)
    return replace_record(done, directory=str(place), notes=tuple(notes))


def _unequal(one: Comparison) -> Comparison:
    """A comparison under other conditions."""
    if one.word != "newly broken":
        return replace_record(one, excuses=False)
    note = "; ".join(part for part in (f"{one.before} there and {one.after} here, under other conditions", one.note) if part)
    return replace_record(one, word="not comparable", excuses=False, note=note)


def _not_bits(found: Sequence[BitComparison], why: str) -> tuple[BitComparison, ...]:
    return tuple(BitComparison(level=one.level, outcome="not comparable", reason=why) for one in found)


def _compared(wanted: Baseline, before: Trial, place: Path, trial: Trial, request: runner.Request) -> Baseline:
    old = own(before)
    comparisons = contrast(old, place, trial, request.out)
    bits = _bits(old, place, trial, request.out)
    return replace_record(wanted, comparisons=comparisons, bits=bits, changes=worktrees.under_test(before.plan))


def _bits(before: Trial, place: Path, trial: Trial, out: Path) -> tuple[BitComparison, ...]:
    """Every level that came to a verdict on both sides, bit by bit."""
    is_clock = loop_of(trial.plan).measures.is_clock
    old = {(level.number, level.name): level for level in before.levels if level.verdict in FINAL and level.directory}
    pairs = [(old.get((level.number, level.name)), level) for level in trial.levels if level.verdict in FINAL and level.directory]
    return tuple(compare_levels(level.number, place / there.directory, out / level.directory, is_clock) for there, level in pairs if there)


def _run(request: runner.Request, trial: Trial, wanted: Baseline, listener: Listener, stop: Interruptible) -> Baseline:
    """The comparison with a revision, of which a trial is run unless it was run already."""
    place = request.out / PLACE / "trial"
    levels, sides = _with_verdict(trial), _sides_to_run(trial, wanted)
    if not levels and not sides:
        raise BlockedError(Boundary.CONFIG, "nothing of the trial itself came to a verdict, so there is nothing to compare", "")
    before = verify.verified(place, run_dir.load(place)) if (place / "trial.json").is_file() else None
    if before is None or not _covers(before, sides, levels):
        listener(Stage(_word(wanted), f"{wanted.source}: levels {', '.join(str(level.number) for level in levels) or 'none'}"))
        before = _trial_of(request, trial, wanted, levels, sides, place, listener, stop)
    else:
        worktrees.discard(worktrees.under_test(trial.plan), request.out / PLACE / "src")
    unbuilt = worktrees.lacks(trial, wanted)
    notes = [
        *(worktrees.unbased(worktrees.under_test(trial.plan)) if wanted.origin == "base" else ()),
        *worktrees.other_surroundings(before, trial),
        *worktrees.arguments_of_change(trial),
        *worktrees.ahead(trial, wanted),
        *unbuilt,
    ]
    done = _compared(wanted, before, place, trial, request)
    comparisons = tuple(_not_built(one, before) if unbuilt else one for one in _of_interest(done.comparisons, trial, wanted, sides))
    reused = read_as(place / REUSED, tuple[int, ...]) if (place / REUSED).is_file() else ()
    update = {"directory": str(place.relative_to(request.out)), "notes": unique(notes), "comparisons": comparisons, "reused": reused}
    return replace_record(done, **update)


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
    return replace_record(one, word="not comparable", note=note)


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
    request: runner.Request,
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
    changes = worktrees.under_test(trial.plan)
    keys = {level.number: level_key(request.plan, trial, wanted.changes, level, request.out / "evidence") for level in levels}
    with worktrees.unchanged([(repo, commits[repo.name]) for repo in changes], request.out / PLACE / "src") as states:
        stop.check()
        plan = _plan(request.plan, levels, states)
        tell = _aside(listener, _word(wanted))
        if (place / "trial.json").is_file():
            if {level.number for level in levels} <= {level.number for level in run_dir.load(place).plan.levels}:
                return _kept(_whole(runner.resume(place, tell)), place, keys)
            place.rename(place.with_name(f"trial-{len(list(place.parent.glob('trial*')))}"))
        shutil.rmtree(place, ignore_errors=True)  # what a Seatrial that was killed left of a copy from the cache
        run_dir.named_directory(place)
        roots = {state.name: state.path for state in states}
        found = [load(keys[level.number], level, run_dir.level_directory(place, level), roots) for level in levels]
        known = tuple(result for result in found if result is not None)
        write_json(place / REUSED, [result.number for result in known])
        if known:
            listener(Stage(_word(wanted), f"levels {', '.join(str(result.number) for result in known)} ran before: taken from the cache"))
        python = request.python or _own_python(trial)
        options = {name: value for name, value in request.options.items() if name != "fault"}  # it stands for a bug of the change
        unlike = replace(request, plan=plan, out=place, python=python, baseline=None, options=options, sides=sides, base=True)
        return _kept(_whole(runner.start(unlike, tell, known)), place, keys)


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
    moved = {repo.path: state.path for repo, state in zip(worktrees.under_test(plan), states, strict=True)}
    options = {name: moved.get(value, value) for name, value in plan.options.items()}
    changes = (*states, *(repo for repo in plan.changes if repo.companion))
    made = replace_record(plan, levels=levels, changes=changes, options=options, unmatched=())
    return replace_record(made, changes=loop_of(made).placed(changes))


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
