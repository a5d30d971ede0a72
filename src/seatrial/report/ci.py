"""What CI systems read: junit.xml, and the step summary and annotations of GitHub Actions.

- Pass is empty, Fail a `<failure type=boundary>`, Blocked an `<error type="blocked.boundary">`, Skipped a `<skipped>`. Characters that
  XML forbids are written out, so any log text gives a valid file.
- On GitHub the verdict comes first; detail is cut, on a line, to stay under the cap of 1 MiB per step. Fail is an error, Blocked and
  Skipped are warnings.
"""

from __future__ import annotations

import os
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Mapping
from pathlib import Path

from seatrial.core.records import CheckResult, Report, SideResult
from seatrial.core.text import one_line, ranges, visible
from seatrial.core.verdict import Boundary, Verdict
from seatrial.report.markdown import cell, prose
from seatrial.report.outcomes import LevelOutcome, check_words, outcomes


def new_suite(name: str, timestamp: str, seconds: float) -> ET.Element:
    """An empty testsuite."""
    return ET.Element("testsuite", {"name": visible(name), "timestamp": visible(timestamp), "time": f"{seconds:.3f}"})


def add_properties(suite: ET.Element, pairs: Iterable[tuple[str, str]]) -> None:
    """What is true of the whole suite."""
    node = ET.SubElement(suite, "properties")
    for name, value in pairs:
        ET.SubElement(node, "property", {"name": one_line(name), "value": one_line(value)})


def add_case(suite: ET.Element, classname: str, name: str, seconds: float) -> ET.Element:
    """A testcase, which passes until a verdict is put on it."""
    return ET.SubElement(suite, "testcase", {"classname": classname, "name": one_line(name), "time": f"{seconds:.3f}"})


def put_verdict(case: ET.Element, verdict: Verdict, boundary: Boundary | None, message: str, detail: str) -> None:
    """Add the element that carries a verdict other than Pass."""
    place = str(boundary) if boundary else "unattributed"
    if verdict is Verdict.SKIPPED:
        ET.SubElement(case, "skipped", {"message": one_line(message)})
    elif verdict is Verdict.FAIL:
        ET.SubElement(case, "failure", {"type": place, "message": one_line(message)}).text = visible(detail)
    elif verdict is Verdict.BLOCKED:
        ET.SubElement(case, "error", {"type": f"blocked.{place}", "message": one_line(message)}).text = visible(detail)


def put_output(case: ET.Element, text: str) -> None:
    """What a reader of a testcase that passed should know."""
    ET.SubElement(case, "system-out").text = visible(text)


def add_checks(suite: ET.Element, classname: str, checks: Iterable[CheckResult], verdict: Verdict) -> None:
    """A testcase for each check. A missed one of something Blocked is an error: it is no evidence against the change."""
    for check in checks:
        case = add_case(suite, classname, check.name, 0)
        if not check.passed:
            missed = Verdict.BLOCKED if verdict is Verdict.BLOCKED else Verdict.FAIL
            lines = [check_words(check), check.message]
            lines += [f"steps used: {ranges(check.steps)}"] if check.steps else []
            lines += [f"steps without a finite point: {ranges(check.missing)}"] if check.missing else []
            put_verdict(case, missed, check.boundary, check.message or lines[0], "\n".join(filter(None, lines)))


def document(suite: ET.Element, seconds: float) -> str:
    """The whole file, with its counts."""
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


def _level(suite: ET.Element, prefix: str, outcome: LevelOutcome) -> None:
    result = outcome.result
    case = add_case(suite, prefix, f"level {outcome.number}: {outcome.title}", result.seconds if result else 0)
    diagnosis = result.diagnosis if result else None
    told = [diagnosis.cause, *diagnosis.excerpt, diagnosis.advice] if diagnosis is not None else []
    put_verdict(case, outcome.verdict, outcome.boundary, outcome.reason, "\n".join(line for line in (outcome.reason, *told) if line))
    add_checks(suite, f"{prefix}.level{outcome.number}", result.checks if result else (), outcome.verdict)


SUMMARY_LIMIT = 1024 * 1024
ANNOTATION_LIMIT = 10
_MARKS = {Verdict.PASS: "✅", Verdict.FAIL: "❌", Verdict.BLOCKED: "⛔", Verdict.SKIPPED: "⏭️"}


def step_summary(report: Report, limit: int = SUMMARY_LIMIT) -> str:
    """The report as GitHub Markdown, shorter than `limit` bytes."""
    lines = [f"## {_MARKS[report.result]} Seatrial: {report.result} - {prose(report.answer)}", ""]
    lines += [f"**Requested coverage:** {prose(report.requested_coverage)}  ", f"**Model:** {prose(report.model)}", ""]
    lines += ["| Deliverable | Verdict | Proof |", "|---|---|---|"]
    lines += [f"| {cell(line.name)} | {line.verdict} | {cell(line.proof)} |" for line in report.deliverables]
    ran = [outcome for outcome in outcomes(report.trial) if outcome.result]
    missed = [f"level {o.number}: {check_words(check)}" for o in ran if o.result for check in o.result.checks if not check.passed]
    sections = (
        ("Missed checks", missed or ["none"]),
        ("Evidence", report.evidence or ("none",)),
        ("Limitations", report.limitations or ("none",)),
        ("Follow-ups", report.follow_ups or ("none",)),
    )
    for title, bullets in sections:
        lines += ["", f"### {title}", *(f"- {prose(bullet)}" for bullet in bullets)]
    return _cut(lines, limit)


def github_annotations(report: Report) -> list[str]:
    """Workflow commands for everything requested that is not a Pass."""
    errors: list[str] = []
    warnings: list[str] = []
    kind = errors if report.result is Verdict.FAIL else warnings
    if report.result is not Verdict.PASS:
        kind.append(_command(kind is errors, f"Seatrial: {report.result}", report.answer))
    for line in report.deliverables:
        if line.verdict is Verdict.FAIL:
            errors.append(_command(True, line.name, line.proof))
        elif line.verdict in (Verdict.BLOCKED, Verdict.SKIPPED):
            warnings.append(_command(False, f"{line.name}: {line.verdict}", line.proof))
    for outcome in outcomes(report.trial):
        if outcome.verdict is Verdict.FAIL and outcome.result is not None:
            missed = [check for check in outcome.result.checks if not check.passed]
            title = f"Level {outcome.number} missed a check"
            errors += [_command(True, title, f"{check_words(check)}\n{check.message}") for check in missed]
    return _capped(errors, True) + _capped(warnings, False)


def publish(report: Report, environ: Mapping[str, str]) -> list[str]:
    """Inside GitHub Actions: append the step summary and return the lines to print. Elsewhere: nothing."""
    if environ.get("GITHUB_ACTIONS") != "true":
        return []
    lines = github_annotations(report)
    target = environ.get("GITHUB_STEP_SUMMARY")
    if not target:
        return lines
    try:
        with Path(target).open("ab") as stream:
            stream.seek(0, os.SEEK_END)
            text = step_summary(report, SUMMARY_LIMIT - stream.tell())
            stream.write(text.encode("utf-8"))
    except OSError as error:
        # The verdict stands whether or not GitHub can show it, but nobody should look for a summary that is not there.
        lines.append(_command(False, "Seatrial", f"{target}: cannot write the step summary: {error.strerror or error}"))
    return lines


def _cut(lines: list[str], limit: int) -> str:
    text = "\n".join(lines) + "\n"
    if len(text.encode("utf-8")) < limit:
        return text
    note = "\n\nCut here to fit GitHub's limit; report.html in the run directory has everything.\n"
    kept = text.encode("utf-8")[: max(0, limit - len(note.encode("utf-8")) - 1)].decode("utf-8", errors="ignore")
    whole = kept.rpartition("\n")[0] if "\n" in kept else kept
    return whole + note if whole else ""


def _command(error: bool, title: str, message: str) -> str:
    name = _data(one_line(title)).replace(":", "%3A").replace(",", "%2C")
    body = "\n".join(one_line(line) for line in message.splitlines() if line.strip())
    return f"::{'error' if error else 'warning'} title={name}::{_data(body)}"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _capped(commands: list[str], error: bool) -> list[str]:
    if len(commands) <= ANNOTATION_LIMIT:
        return commands
    shown = commands[: ANNOTATION_LIMIT - 1]
    return [*shown, _command(error, "Seatrial", f"{len(commands) - len(shown)} more; see the step summary and report.html")]
