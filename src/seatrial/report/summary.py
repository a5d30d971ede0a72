"""summary.md: the fixed format that answers "did the requested deliverables pass?" in its first line."""

from __future__ import annotations

from collections.abc import Iterable

from seatrial.model.record import Report
from seatrial.report.text import one_line


def summary_md(report: Report) -> str:
    """The summary; recorded texts are kept to one line each, so that none can imitate a heading."""
    head = [
        f"Result: {report.result} - {one_line(report.answer)}",
        f"Requested coverage: {one_line(report.requested_coverage)}",
        f"Model: {one_line(report.model)}",
    ]
    sections = (
        ("Deliverables", (f"{line.name}: {line.verdict} - {line.proof}" for line in report.deliverables)),
        ("Evidence", report.evidence),
        ("Limitations", report.limitations),
        ("Follow-ups", report.follow_ups),
    )
    return "\n\n".join(["\n".join(head), *(_section(title, bullets) for title, bullets in sections)]) + "\n"


def _section(title: str, bullets: Iterable[str]) -> str:
    lines = [f"- {one_line(bullet)}" for bullet in bullets] or ["- none"]
    return "\n".join([f"{title}:", *lines])
