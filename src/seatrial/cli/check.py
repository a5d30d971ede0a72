"""`seatrial check`: checks over metrics that are already there."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from seatrial.model.record import CheckResult
    from seatrial.model.series import Metrics


def check(
    metrics: Annotated[
        Path,
        typer.Argument(help="A metrics file, a directory with event files, JSONL or metrics.json of one run, or a trial's run directory."),
    ],
    expressions: Annotated[list[str], typer.Argument(help="""Checks, for example 'max(data["train/loss"]) < 1.05'.""")],
    level: Annotated[int | None, typer.Option("--level", help="The level of a trial whose metrics are meant.")] = None,
    also: Annotated[list[Path] | None, typer.Option("--also", help="Further files or directories of the same run.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False,
) -> None:
    """Judge checks over the metrics of one run: exit 0 if all pass, 1 if one misses, 2 if one is not a check, or there are several runs.

    Metrics that are damaged cannot pass: torn lines and corrupt records are printed and count as a miss.
    """
    from seatrial.metrics.checks import evaluate, undamaged
    from seatrial.metrics.grammar import parse
    from seatrial.model.verdict import ExitCode
    from seatrial.trial.level_files import metrics_of_run

    for expression in expressions:
        parse(expression)  # a wrong expression is told before large files are read
    found = metrics_of_run(metrics, level, also or ())
    results = [evaluate(expression, found) for expression in expressions]
    if found.damage:
        results.append(undamaged(found))
    if as_json:
        _print_json(results, found)
    else:
        print_table(results)
    raise typer.Exit(ExitCode.PASS if all(result.passed for result in results) else ExitCode.FAIL)


def _print_json(results: list[CheckResult], found: Metrics) -> None:
    content = {
        "passed": all(result.passed for result in results),
        "checks": [result.model_dump(mode="json") for result in results],
        "damage": [str(damage) for damage in found.damage],
        "overlaps": {overlap.tag: overlap.steps for overlap in found.overlaps},
        "sources": found.sources,
    }
    typer.echo(json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False))


def print_table(results: Sequence[CheckResult], title: str = "Checks") -> None:
    """The metric table."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from seatrial.report.text import visible

    table = Table(title=Text(visible(title)))
    for column in ("Status", "Check", "Value", "Message"):
        table.add_column(column, overflow="fold")
    for result in results:
        status = Text("Pass", style="green") if result.passed else Text("Fail", style="bold red")
        value = f"{result.value:.6g}" if isinstance(result.value, float) else str(result.value if result.value is not None else "-")
        table.add_row(status, *(Text(visible(text)) for text in (result.name, value, result.message)))
    # A log file has no width; a narrow default would tear expressions apart.
    Console(width=None if sys.stdout.isatty() else 200).print(table)
