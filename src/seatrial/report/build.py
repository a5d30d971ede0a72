"""The report of a trial: deliverables, evidence, limitations, follow-ups and one result.

- A function of the trial record and of which evidence files exist in the run directory; it writes nothing.
- The result is the worst of the recorded verdict and of every requested deliverable. Where they disagree the answer
  says so. A trial without a verdict (killed, or still running) is at best Blocked.
- A Blocked result always states that it is not evidence against the change.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from seatrial.model.knowledge import Level
from seatrial.model.record import BitComparison, Deliverable, Report, Trial
from seatrial.model.verdict import Verdict, worst
from seatrial.report.deliverables import deliverables, requested
from seatrial.report.notes import evidence, follow_ups, limitations
from seatrial.report.outcome import NOT_EVIDENCE, Outcome, outcomes, side_name


def build_report(trial: Trial, loop_title: str, run_dir: Path, ladder: Sequence[Level]) -> Report:
    """The report of `trial` as it stands; `ladder` is every level of its loop."""
    levels = outcomes(trial)
    lines = deliverables(trial, loop_title, run_dir, ladder, levels)
    result = worst([trial.verdict or Verdict.BLOCKED, *(verdict for _, verdict in requested(lines))])
    return Report(
        result=result,
        answer=_answer(trial, result, levels, lines),
        requested_coverage=_coverage(trial, loop_title, levels),
        model=trial.plan.model,
        deliverables=lines,
        evidence=evidence(trial, levels),
        limitations=limitations(trial, levels),
        follow_ups=follow_ups(trial, levels),
        trial=trial.model_copy(update={"seal": ""}),  # it seals trial.json alone
    )


def _coverage(trial: Trial, loop_title: str, levels: Sequence[Outcome]) -> str:
    names = ", ".join(outcome.label for outcome in levels) or "no level"
    arguments = f"; loop arguments: {' '.join(trial.plan.arguments)}" if trial.plan.arguments else ""
    return f"{loop_title} {names}{arguments}"


def _answer(trial: Trial, result: Verdict, levels: Sequence[Outcome], lines: Sequence[Deliverable]) -> str:
    """One sentence that says whether the requested deliverables passed."""
    against = _against(trial)
    if result is Verdict.PASS:
        changes = ", ".join(f"{repo.name} {repo.commit[:12]}{' (dirty)' if repo.dirty else ''}" for repo in trial.plan.changes)
        where = f"with {changes}" if changes else "without a change"
        return f"every requested deliverable passed {where}: {', '.join(outcome.label for outcome in levels)}{against}."
    words = _why(trial, result, levels, lines).rstrip(".") + against
    return f"{words}; {NOT_EVIDENCE}." if result is Verdict.BLOCKED and NOT_EVIDENCE not in words else f"{words}."


def _against(trial: Trial) -> str:
    """What differs from the baseline, in a few words; nothing without one."""
    if trial.baseline is None or not trial.baseline.comparisons:
        return ""
    words = [f"{one.deliverable} {one.word}" for one in trial.baseline.comparisons if one.word != "pass"]
    bits = [f"level {one.level} {_bits(one)}" for one in trial.baseline.bits if one.outcome != "not comparable"]
    return f"; against the {side_name(trial.baseline)}: {', '.join([*(words or ['pass on both sides']), *bits])}"


def _bits(found: BitComparison) -> str:
    if found.difference is None:
        return found.outcome
    step, stage = found.difference.step, found.difference.stage
    return "differs" + (f" from step {step}" if step is not None else "") + (f", stage {stage}" if stage else "")


def _why(trial: Trial, result: Verdict, levels: Sequence[Outcome], lines: Sequence[Deliverable]) -> str:
    level = next((outcome for outcome in levels if outcome.verdict is result), None)
    line = next((line for line, verdict in requested(lines) if verdict is result), None)
    if trial.verdict is result and trial.reason:
        return trial.reason
    if level is not None:
        cause = f"{level.label} is {result}{f' at {level.boundary}' if level.boundary else ''}: {level.reason}"
    elif line is not None:
        cause = f"{line.name} is {result}: {line.proof}"
    else:
        cause = trial.reason or "it was interrupted or is still running"
    if trial.verdict is None:
        return f"the trial has no verdict (status: {trial.status}): {cause}"
    return cause if trial.verdict is result else f"the trial recorded {trial.verdict}, but {cause}"
