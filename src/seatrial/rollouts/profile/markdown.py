"""profile.md: what a person reads, or pastes into a pull request."""

from __future__ import annotations

from seatrial.report.markdown import cell, prose
from seatrial.rollouts.profile.model import Profile
from seatrial.rollouts.profile.tables import Table, answer, tables


def profile_markdown(profile: Profile) -> str:
    """All of it."""
    summary = profile.summary
    lines = [f"# Reward profile of {prose(summary.campaign)}", "", prose(answer(profile)), ""]
    for table in tables(profile):
        lines += _table(table)
    lines += ["## How to read it", "", *(f"- {rule}" for rule in summary.rules)]
    found = ", ".join(f"{count} {name}" for name, count in summary.journal if count)
    lines += [f"- Journal: {found or 'nothing torn, foreign or twice'}.", "", f"Made {summary.made} by seatrial {summary.seatrial}."]
    return "\n".join(lines) + "\n"


def _table(table: Table) -> list[str]:
    note = [prose(table.note), ""] if table.note else []
    head = [_line(table.head), "|" + "---|" * len(table.head)]
    return [f"## {prose(table.title)}", "", *note, *head, *(_line(row) for row in table.rows), ""]


def _line(cells: tuple[str, ...]) -> str:
    """Recorded text can neither end a cell nor a line."""
    return "| " + " | ".join(map(cell, cells)) + " |"
