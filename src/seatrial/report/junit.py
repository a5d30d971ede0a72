"""junit.xml: one testsuite per trial, one testcase per level, one per check, and one for the tests of each repository.

- Pass is empty, Fail a `<failure type=boundary>`, Blocked an `<error type="blocked.boundary">`, Skipped a `<skipped>`.
- A missed check of a Blocked level is an error, not a failure: it is no evidence against the change.
- The file is never greener than the report: a result that no level carries gets a testcase of its own.
- Characters that XML forbids are written out (`\\x00`), so any log text gives a valid file.
"""

from __future__ import annotations

import xml.etree.ElementTree as ET

from seatrial.model.record import CheckResult, Report, SideResult
from seatrial.model.verdict import Boundary, Verdict
from seatrial.report.deliverables import check_words
from seatrial.report.outcome import Outcome, outcomes
from seatrial.report.text import one_line, ranges, visible


def junit_xml(report: Report) -> str:
    """The report as JUnit XML."""
    trial, levels = report.trial, outcomes(report.trial)
    seconds = sum(outcome.result.seconds for outcome in levels if outcome.result) + sum(side.seconds for side in trial.sides)
    suite = ET.Element("testsuite", {"name": visible(trial.id), "timestamp": visible(trial.created), "time": f"{seconds:.3f}"})
    _properties(suite, report)
    prefix = f"seatrial.{visible(trial.plan.loop)}"
    sides = [(side, *_stated(report, side)) for side in trial.sides]
    carried = {*(outcome.verdict for outcome in levels), *(verdict for _, verdict, _ in sides)}
    if report.result is not Verdict.PASS and report.result not in carried:
        case = _case(suite, prefix, "result", 0)
        _verdict(case, report.result, None, report.answer, report.answer)
    for side, verdict, reason in sides:
        _verdict(_case(suite, prefix, side.name, side.seconds), verdict, side.boundary, reason, "\n".join([reason, *side.notes]))
    for outcome in levels:
        _level(suite, prefix, outcome)
    counts = {
        "tests": len(suite.findall("testcase")),
        "failures": len(suite.findall("testcase/failure")),
        "errors": len(suite.findall("testcase/error")),
        "skipped": len(suite.findall("testcase/skipped")),
    }
    for name, count in counts.items():
        suite.set(name, str(count))
    root = ET.Element("testsuites", {"name": "seatrial", "time": f"{seconds:.3f}"} | {name: str(count) for name, count in counts.items()})
    root.append(suite)
    ET.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ET.tostring(root, encoding="unicode") + "\n"


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
    node = ET.SubElement(suite, "properties")
    for name, value in pairs:
        ET.SubElement(node, "property", {"name": one_line(name), "value": one_line(value)})


def _case(suite: ET.Element, classname: str, name: str, seconds: float) -> ET.Element:
    return ET.SubElement(suite, "testcase", {"classname": classname, "name": one_line(name), "time": f"{seconds:.3f}"})


def _level(suite: ET.Element, prefix: str, outcome: Outcome) -> None:
    result = outcome.result
    case = _case(suite, prefix, f"level {outcome.number}: {outcome.title}", result.seconds if result else 0)
    _verdict(case, outcome.verdict, outcome.boundary, outcome.reason, _detail(outcome))
    for check in result.checks if result else ():
        case = _case(suite, f"{prefix}.level{outcome.number}", check.name, 0)
        if not check.passed:
            verdict = Verdict.BLOCKED if outcome.verdict is Verdict.BLOCKED else Verdict.FAIL
            _verdict(case, verdict, check.boundary, check.message or check_words(check), _check_detail(check))


def _verdict(case: ET.Element, verdict: Verdict, boundary: Boundary | None, message: str, detail: str) -> None:
    """Add the element that carries a verdict other than Pass."""
    place = str(boundary) if boundary else "unattributed"
    if verdict is Verdict.SKIPPED:
        ET.SubElement(case, "skipped", {"message": one_line(message)})
    elif verdict is Verdict.FAIL:
        ET.SubElement(case, "failure", {"type": place, "message": one_line(message)}).text = visible(detail)
    elif verdict is Verdict.BLOCKED:
        ET.SubElement(case, "error", {"type": f"blocked.{place}", "message": one_line(message)}).text = visible(detail)


def _detail(outcome: Outcome) -> str:
    lines = [outcome.reason]
    diagnosis = outcome.result.diagnosis if outcome.result else None
    if diagnosis is not None:
        lines += [diagnosis.cause, *diagnosis.excerpt, diagnosis.advice]
    return "\n".join(line for line in lines if line)


def _check_detail(check: CheckResult) -> str:
    lines = [check_words(check), check.message]
    lines += [f"steps used: {ranges(check.steps)}"] if check.steps else []
    lines += [f"steps without a finite point: {ranges(check.missing)}"] if check.missing else []
    return "\n".join(line for line in lines if line)
