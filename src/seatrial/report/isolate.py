"""isolate.md: the isolation matrix as a table, for people and reviews."""

from __future__ import annotations

from seatrial.model.isolation import Matrix, Measured, Rerun, settings
from seatrial.report.text import number, one_line


def matrix_md(matrix: Matrix) -> str:
    """The matrix; recorded texts are kept to one line each, and cannot end a cell."""
    head = [
        f"Isolation of level {matrix.level}, {one_line(matrix.title)}, of {one_line(matrix.trial)}",
        "",
        *(f"- {one_line(text)}" for text in matrix.conclusion),
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
    cells = [one_line(cell).replace("|", r"\|") for cell in (name, changed, verdict, failure, missed, reason, log)]
    return f"| {' | '.join(cells)} |"
