"""What the comparison with the base makes of a trial's own verdicts. Pure functions of stored results.

- A Fail that the base has too is Blocked: it says nothing about the change.
- Without a comparison a Fail stays one, but for what cannot be the change's as far as anybody knows: any failure where
  nothing differs from the base; where no base is known, a failure before the first training step or an import that does
  not fit; where the base did not run, such an import in files that the change does not touch.
- `--expect identical` makes any difference from the base a Fail, and a missing comparison Blocked.
- Nothing here makes a Pass. What a run came to by itself is kept in `own`, and settling twice is settling once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from seatrial.model.record import Baseline, BitComparison, Comparison, LevelResult, OwnVerdict, RepoState, SideResult, Trial
from seatrial.model.verdict import Boundary, Verdict
from seatrial.report.bits import difference_words
from seatrial.trial.bits import boundary_of
from seatrial.trial.differences import under_test

IMPORTS = ("ImportError", "ModuleNotFoundError")
"""What code raises that was written for other versions of its packages, or of our shims."""
NAME_BASE = "name the state before the change, so that it is run beside it: --base REV"
Result = TypeVar("Result", LevelResult, SideResult)


def own(trial: Trial) -> Trial:
    """The trial with the verdicts that its runs came to by themselves."""
    levels = tuple(_restored(level) for level in trial.levels)
    return trial.model_copy(update={"levels": levels, "sides": tuple(_restored(side) for side in trial.sides)})


def settle(trial: Trial, baseline: Baseline) -> tuple[tuple[LevelResult, ...], tuple[SideResult, ...]]:
    """Levels and tests of a trial (see `own`) with their verdicts beside the base."""
    words = {one.deliverable: one for one in baseline.comparisons}
    bits = {one.level: one for one in baseline.bits}
    changes = under_test(trial.plan)
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
    return result.model_copy(update={"verdict": before.verdict, "reason": before.reason, "boundary": before.boundary, "own": None})


def _overruled(result: Result, verdict: Verdict, reason: str, boundary: Boundary | None) -> Result:
    """The result with another verdict; its own is kept."""
    before = result.own or OwnVerdict(verdict=result.verdict, reason=result.reason, boundary=result.boundary)
    return result.model_copy(update={"verdict": verdict, "reason": reason, "boundary": boundary, "own": before})


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
    return blocked.model_copy(update={"follow_ups": follow})


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
    """Whether the decisive lines name a changed file."""
    files = [f'File "{root}/{file}"' for repo in changes for file in repo.changed for root in (repo.path, repo.synced) if root]
    return any(file in line for file in files for line in excerpt)


def _side(side: SideResult, found: Comparison | None, baseline: Baseline) -> SideResult:
    """Tests before the levels; a gate was compared with the base when it failed (see `gate_base`)."""
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
    """The level under `--expect identical`."""
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
