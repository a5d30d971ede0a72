"""junit.xml: one testsuite per trial, one testcase per level, one per check, and one for the tests of each repository.

- How verdicts are carried is said in `junit_parts`.
- A missed check of a Blocked level is an error, not a failure: it is no evidence against the change.
- The file is never greener than the report: a result that no level carries gets a testcase of its own.
"""

from __future__ import annotations

import xml.etree.ElementTree as ET

from seatrial.model.record import Report, SideResult
from seatrial.model.verdict import Verdict
from seatrial.report.junit_parts import add_case, add_checks, add_properties, document, new_suite, put_verdict
from seatrial.report.outcome import Outcome, outcomes
from seatrial.report.text import visible


def junit_xml(report: Report) -> str:
    """The report as JUnit XML."""
    trial, levels = report.trial, outcomes(report.trial)
    seconds = sum(outcome.result.seconds for outcome in levels if outcome.result) + sum(side.seconds for side in trial.sides)
    suite = new_suite(trial.id, trial.created, seconds)
    _properties(suite, report)
    prefix = f"seatrial.{visible(trial.plan.loop)}"
    sides = [(side, *_stated(report, side)) for side in trial.sides]
    carried = {*(outcome.verdict for outcome in levels), *(verdict for _, verdict, _ in sides)}
    if report.result is not Verdict.PASS and report.result not in carried:
        put_verdict(add_case(suite, prefix, "result", 0), report.result, None, report.answer, report.answer)
    for side, verdict, reason in sides:
        case = add_case(suite, prefix, side.name, side.seconds)
        put_verdict(case, verdict, side.boundary, reason, "\n".join([reason, *side.notes]))
    for outcome in levels:
        _level(suite, prefix, outcome)
    return document(suite, seconds)


def _stated(report: Report, side: SideResult) -> tuple[Verdict, str]:
    """What the report says of these tests: it may have taken a recorded Pass back, for want of its evidence."""
    line = next((line for line in report.deliverables if line.name == side.name), None)
    if line is None or line.verdict is side.verdict or not isinstance(line.verdict, Verdict):
        return side.verdict, side.reason
    return line.verdict, line.proof


def _properties(suite: ET.Element, report: Report) -> None:
    trial = report.trial
    pairs = [("verdict", str(report.result)), ("answer", report.answer), ("seatrial", trial.seatrial)]
    pairs += [("loop", trial.plan.loop), ("model", report.model)]
    for repo in trial.plan.changes:
        pairs += [(f"{repo.name}.commit", repo.commit), (f"{repo.name}.branch", repo.branch or "detached HEAD")]
        pairs += [(f"{repo.name}.dirty", ", ".join(repo.dirty))] if repo.dirty else []
    if trial.environment is not None:
        pairs.append(("environment.fingerprint", trial.environment.fingerprint))
    add_properties(suite, pairs)


def _level(suite: ET.Element, prefix: str, outcome: Outcome) -> None:
    result = outcome.result
    case = add_case(suite, prefix, f"level {outcome.number}: {outcome.title}", result.seconds if result else 0)
    put_verdict(case, outcome.verdict, outcome.boundary, outcome.reason, _detail(outcome))
    add_checks(suite, f"{prefix}.level{outcome.number}", result.checks if result else (), outcome.verdict)


def _detail(outcome: Outcome) -> str:
    lines = [outcome.reason]
    diagnosis = outcome.result.diagnosis if outcome.result else None
    if diagnosis is not None:
        lines += [diagnosis.cause, *diagnosis.excerpt, diagnosis.advice]
    return "\n".join(line for line in lines if line)
