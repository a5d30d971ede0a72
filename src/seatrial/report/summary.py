"""summary.md: the fixed format that answers "did the requested deliverables pass?" in its first line."""

from __future__ import annotations

from collections.abc import Iterable

from seatrial.model.record import Report
from seatrial.report.markdown import prose


def summary_md(report: Report) -> str:
    """The summary; recorded texts are no markup, and stay on one line each, so that none can imitate a heading."""
    head = [
        f"Result: {report.result} - {prose(report.answer)}",
        f"Requested coverage: {prose(report.requested_coverage)}",
        f"Model: {prose(report.model)}",
    ]
    sections = (
        ("Deliverables", (f"{line.name}: {line.verdict} - {line.proof}" for line in report.deliverables)),
        ("Evidence", report.evidence),
        ("Limitations", report.limitations),
        ("Follow-ups", report.follow_ups),
    )
    return "\n\n".join(["\n".join(head), *(_section(title, bullets) for title, bullets in sections)]) + "\n"


def _section(title: str, bullets: Iterable[str]) -> str:
    lines = [f"- {prose(bullet)}" for bullet in bullets] or ["- none"]
    return "\n".join([f"{title}:", *lines])
