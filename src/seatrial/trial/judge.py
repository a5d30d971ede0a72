"""From evidence to a verdict: a pure function, the same for a trial, a resume and `seatrial judge`.

The order is the promise. First what makes any evidence worthless (wrong imports), then what ended the run early, then
steps that were not reached, damaged or non-finite metrics, vacuity, missed checks. Pass is what is left, and only if
something was asserted. An exit code of 0 proves nothing by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from seatrial.core.loop import Vacuity
from seatrial.core.records import CheckResult, Diagnosis, PhaseOutcome, ResultCode
from seatrial.core.series import Metrics
from seatrial.core.specs import Milestone
from seatrial.core.verdict import Boundary, Verdict


@dataclass(frozen=True, slots=True)
class Judgement:
    verdict: Verdict
    reason: str
    boundary: Boundary | None = None
    vacuous: bool = False
    code: ResultCode = ""


@dataclass(frozen=True, slots=True)
class Evidence:
    metrics: Metrics
    checks: tuple[CheckResult, ...] = ()
    unproven: str = ""
    """Why there are no proofs: facts, dumps or shadows that cannot be read as what a run writes."""
    diagnosis: Diagnosis | None = None
    phases: tuple[PhaseOutcome, ...] = ()
    wrong_imports: tuple[str, ...] = ()
    steps_expected: int | None = None
    steps_reached: int | None = None
    vacuous: Vacuity | None = None
    change_roots: tuple[str, ...] = ()
    """Checkouts under test: an exception raised in their files is never beside the change."""
    loop_under_test: bool = False
    """The loop itself is under test: that it ran with other settings than it was told to may be its fault."""


def judge(evidence: Evidence, milestones: Sequence[Milestone]) -> Judgement:
    """The verdict, by the first rule that applies."""
    for rule in (_imports, _ended, _crashed, _silent, _steps, _damage, _non_finite, _elsewhere, _survived, _vacuous, _checks, _unproven):
        found = rule(evidence, milestones)
        if found:
            return found
    if not evidence.checks:
        return Judgement(Verdict.BLOCKED, "vacuous: nothing was asserted, so nothing could have failed", Boundary.METRICS, vacuous=True)
    return Judgement(Verdict.PASS, f"{len(evidence.checks)} checks met{_of_steps(evidence)}")


def _unproven(evidence: Evidence, _: Sequence[Milestone]) -> Judgement | None:
    if not evidence.unproven:
        return None
    return Judgement(Verdict.BLOCKED, f"what the level left is damaged or of another version: {evidence.unproven}", Boundary.METRICS)


def _of_steps(evidence: Evidence) -> str:
    if evidence.steps_reached is None:
        return ""
    known = f" of {evidence.steps_expected}" if evidence.steps_expected is not None else ""
    return f", {evidence.steps_reached}{known} steps reached"


def _imports(evidence: Evidence, _: Sequence[Milestone]) -> Judgement | None:
    if not evidence.wrong_imports:
        return None
    reason = f"wrong import: {evidence.wrong_imports[0]}; nothing after it is evidence"
    return Judgement(Verdict.BLOCKED, reason, Boundary.ENVIRONMENT, code="wrong-import")


def _place(evidence: Evidence, milestones: Sequence[Milestone]) -> tuple[Boundary, Verdict, str]:
    """Where the run stood when it ended: by the last milestone it reached."""
    reached = evidence.diagnosis.milestone if evidence.diagnosis else None
    for milestone in milestones:
        if milestone.id == reached:
            return milestone.boundary, milestone.verdict, f"after the milestone {milestone.id!r}"
    return Boundary.ENVIRONMENT, Verdict.BLOCKED, "before any milestone"


def _ended(evidence: Evidence, milestones: Sequence[Milestone]) -> Judgement | None:
    """Seatrial itself ended the run: interrupted, past its deadline, or stalled."""
    for phase in evidence.phases:
        if phase.ended in ("interrupted", "lost"):
            what = "interrupted by a signal" if phase.ended == "interrupted" else "Seatrial was killed while it ran"
            return Judgement(Verdict.BLOCKED, f"{phase.name}: {what} after {phase.seconds:.0f} s", Boundary.ENVIRONMENT)
        if phase.ended in ("deadline", "stalled"):
            boundary, verdict, where = _place(evidence, milestones)
            what = "did not end before its deadline" if phase.ended == "deadline" else "stalled: no log line and no metric"
            return Judgement(verdict, f"{phase.name}: {what} ({phase.seconds:.0f} s), {where}{_why(evidence)}", boundary)
    return None


def _why(evidence: Evidence) -> str:
    found = evidence.diagnosis
    if found is None or found.signature is None or found.verdict is not Verdict.BLOCKED:
        return ""
    return f"; {found.signature}: {found.cause}"


def _crashed(evidence: Evidence, milestones: Sequence[Milestone]) -> Judgement | None:
    """A process exited with another code than 0, or the log shows an exception that ended it."""
    failed = next((phase for phase in evidence.phases if phase.exit_code != 0), None)
    found = evidence.diagnosis
    caused = found is not None and found.verdict is not None and not found.survived
    if failed is None and not (caused and not evidence.phases):
        return None
    how = f"{failed.name}: exit code {failed.exit_code}" if failed else "the log shows a failure"
    if found is not None and found.verdict is not None and not found.survived:
        verdict, boundary = found.verdict, found.boundary or Boundary.ENVIRONMENT
        if verdict is Verdict.SKIPPED:
            return Judgement(verdict if failed is None else Verdict.BLOCKED, f"nothing was run: {found.cause}", boundary)
        if verdict is Verdict.BLOCKED and any(f'File "{root}/' in line for root in evidence.change_roots for line in found.excerpt):
            verdict, boundary = Verdict.FAIL, Boundary.PROVIDER
        return Judgement(verdict, f"{how}{_after_all(evidence)}: {found.cause}", boundary)
    boundary, verdict, where = _place(evidence, milestones)
    return Judgement(verdict, f"{how}{_after_all(evidence)}, {where}, without an exception in the log", boundary)


def _after_all(evidence: Evidence) -> str:
    """Of a crash after the last step: what was measured all the same."""
    expected, reached = evidence.steps_expected, evidence.steps_reached
    if not evidence.phases or not evidence.checks or expected is None or reached is None or reached < expected:
        return ""
    met = sum(check.passed for check in evidence.checks)
    return f" after all {expected} steps ({met} of {len(evidence.checks)} checks met)"


def _silent(evidence: Evidence, _: Sequence[Milestone]) -> Judgement | None:
    """A failure that leaves the exit code at 0."""
    found = evidence.diagnosis
    if found is None or found.verdict is None or found.survived:
        return None
    verdict = Verdict.BLOCKED if found.verdict is Verdict.SKIPPED else found.verdict  # its process ran, whatever it did
    return Judgement(verdict, f"exit code 0, yet: {found.cause}", found.boundary)


def _steps(evidence: Evidence, milestones: Sequence[Milestone]) -> Judgement | None:
    expected, reached = evidence.steps_expected, evidence.steps_reached
    if reached is None and not evidence.metrics.damage:  # damage explains it, and is the next rule
        return _no_step(evidence, milestones)
    if expected is not None and reached is not None and reached < expected:
        return Judgement(Verdict.FAIL, f"reached step {reached} of {expected}", Boundary.METRICS)
    return None


def _no_step(evidence: Evidence, milestones: Sequence[Milestone]) -> Judgement:
    """Nothing shows a training step. Of a run whose exit code nobody knows, the log says where it stopped."""
    reason = "no training step is shown by any metric or log line"
    last = evidence.diagnosis.milestone if evidence.diagnosis else None
    if evidence.phases or last == milestones[-1].id:
        return Judgement(Verdict.FAIL, reason, Boundary.METRICS)
    boundary, verdict, where = _place(evidence, milestones)
    return Judgement(verdict, f"{reason}; the log stops {where}", boundary)


def _damage(evidence: Evidence, _: Sequence[Milestone]) -> Judgement | None:
    if not evidence.metrics.damage:
        return None
    return Judgement(Verdict.FAIL, f"metrics are damaged: {evidence.metrics.damage[0]}", Boundary.METRICS)


def _non_finite(evidence: Evidence, _: Sequence[Milestone]) -> Judgement | None:
    for tag, series in sorted(evidence.metrics.series.items()):
        steps = series.non_finite()
        if steps:
            shown = ", ".join(map(str, steps[:5])) + (" …" if len(steps) > 5 else "")
            return Judgement(Verdict.FAIL, f"{tag} is not finite at step {shown}", Boundary.METRICS)
    return None


def _elsewhere(evidence: Evidence, _: Sequence[Milestone]) -> Judgement | None:
    """What one run of a level missed is not excused by another that was vacuous or had other settings."""
    names = {phase.name for phase in evidence.phases}
    runs = ((check, check.run.partition("/")[0]) for check in evidence.checks if not check.passed)
    missed = [(check, run if run in names else "") for check, run in runs]
    excused = {run for check, run in missed if check.boundary is Boundary.CONFIG}
    excused |= {evidence.vacuous.run.partition("/")[0]} if evidence.vacuous else set()
    others = [check for check, run in missed if run and run not in excused and check.boundary is not Boundary.CONFIG]
    return _missed(others[0], len(others)) if others and any(excused) else None


def _survived(evidence: Evidence, _: Sequence[Milestone]) -> Judgement | None:
    """Errors that the run got over more often than it may: what it measured is inconclusive. A missed check says more."""
    found = evidence.diagnosis
    missed = any(not check.passed and check.boundary is not Boundary.CONFIG for check in evidence.checks)
    if found is None or not found.survived or missed:
        return None
    often = f" ({found.times} times)" if found.times > 1 else ""
    return Judgement(Verdict.BLOCKED, f"inconclusive: the run went on after an error{often}: {found.cause}", found.boundary)


def _vacuous(evidence: Evidence, _: Sequence[Milestone]) -> Judgement | None:
    if not evidence.vacuous:
        return None
    return Judgement(Verdict.BLOCKED, evidence.vacuous.reason, evidence.vacuous.boundary, vacuous=True)


def _checks(evidence: Evidence, _: Sequence[Milestone]) -> Judgement | None:
    missed = [check for check in evidence.checks if not check.passed]
    if not missed:
        return None
    first = missed[0]
    if first.boundary is Boundary.CONFIG and not evidence.loop_under_test:  # nothing that the level is about was run
        reason = f"vacuous: the run was not the one that the level claims: {_told(first, len(missed))}"
        return Judgement(Verdict.BLOCKED, reason, first.boundary, vacuous=True)
    return _missed(first, len(missed))


def _missed(first: CheckResult, count: int) -> Judgement:
    """Fail by one missed check, of so many."""
    return Judgement(Verdict.FAIL, f"missed: {_told(first, count)}", first.boundary)


def _told(first: CheckResult, count: int) -> str:
    detail = f" (measured {first.value})" if first.value is not None and not first.measured else ""
    note = f": {first.message}" if first.message else ""
    more = f", and {count - 1} more" if count > 1 else ""
    return f"{first.name}{detail}{note}{more}"
