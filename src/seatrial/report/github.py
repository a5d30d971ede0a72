"""What GitHub Actions shows: the step summary and the annotations.

- The verdict comes first; detail is cut, on a line, to stay under GitHub's cap of 1 MiB per step.
- Fail is an error, Blocked and Skipped are warnings (no evidence against the change), each at most 10: GitHub drops
  more than that without a word, so the tenth says how many are left.
- Recorded text is escaped: it can neither start a workflow command nor become markup.
"""

# No `from __future__ import annotations`: a function of this module has that name.
import os
from collections.abc import Mapping
from pathlib import Path

from seatrial.model.record import Report
from seatrial.model.verdict import Verdict
from seatrial.report.deliverables import check_words
from seatrial.report.markdown import cell, prose
from seatrial.report.outcome import outcomes
from seatrial.report.text import one_line

SUMMARY_LIMIT = 1024 * 1024
ANNOTATION_LIMIT = 10
_MARKS = {Verdict.PASS: "✅", Verdict.FAIL: "❌", Verdict.BLOCKED: "⛔", Verdict.SKIPPED: "⏭️"}


def step_summary(report: Report, limit: int = SUMMARY_LIMIT) -> str:
    """The report as GitHub Markdown, shorter than `limit` bytes."""
    lines = [f"## {_MARKS[report.result]} Seatrial: {report.result} - {prose(report.answer)}", ""]
    lines += [f"**Requested coverage:** {prose(report.requested_coverage)}  ", f"**Model:** {prose(report.model)}", ""]
    lines += ["| Deliverable | Verdict | Proof |", "|---|---|---|"]
    lines += [f"| {cell(line.name)} | {line.verdict} | {cell(line.proof)} |" for line in report.deliverables]
    missed = [
        f"level {o.number}: {check_words(check)}"
        for o in outcomes(report.trial)
        if o.result
        for check in o.result.checks
        if not check.passed
    ]
    sections = (
        ("Missed checks", missed or ["none"]),
        ("Evidence", report.evidence or ("none",)),
        ("Limitations", report.limitations or ("none",)),
        ("Follow-ups", report.follow_ups or ("none",)),
    )
    for title, bullets in sections:
        lines += ["", f"### {title}", *(f"- {prose(bullet)}" for bullet in bullets)]
    return _cut(lines, limit)


def annotations(report: Report) -> list[str]:
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
    lines = annotations(report)
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
