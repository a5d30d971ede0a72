"""isolate.md: the isolation matrix as a table, for people and reviews."""

from __future__ import annotations

from seatrial.model.isolation import Matrix, Measured, Rerun, settings
from seatrial.report.markdown import cell, prose
from seatrial.report.text import number


def matrix_md(matrix: Matrix) -> str:
    """The matrix; recorded texts are no markup, and cannot end a line or a cell."""
    head = [
        f"Isolation of level {matrix.level}, {prose(matrix.title)}, of {prose(matrix.trial)}",
        "",
        *(f"- {prose(text)}" for text in matrix.conclusion),
        "",
        "| run | settings | verdict | original failure | missed check | reason | log |",
        "|---|---|---|---|---|---|---|",
        _row("original", "", f"{matrix.verdict}", "", matrix.measured, matrix.reason, matrix.log),
    ]
    return "\n".join([*head, *(_rerun(item) for item in matrix.reruns)]) + "\n"


def _rerun(item: Rerun) -> str:
    verdict = "not run" if item.verdict is None else str(item.verdict)
    if item.reduced and item.verdict == "Pass":
        verdict = "reduced-optimization pass"
    failure = f"{item.failure} ({item.note})" if item.note else item.failure
    return _row(item.name, settings(item.arguments, item.options), verdict, failure, item.measured, item.reason, item.log)


def _row(name: str, changed: str, verdict: str, failure: str, measured: Measured | None, reason: str, log: str) -> str:
    missed = f"{measured.name}: {number(measured.value)}" if measured else ""
    return f"| {' | '.join(map(cell, (name, changed, verdict, failure, missed, reason, log)))} |"
