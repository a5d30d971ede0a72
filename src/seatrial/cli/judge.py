"""`seatrial judge`, `check`, `report` and `localize`: commands that read what a run left, and run nothing."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from seatrial import api
from seatrial.core.guarded import real_path
from seatrial.trial.files_judge import redacted

if TYPE_CHECKING:
    from seatrial.core.records import CheckResult, Trial
    from seatrial.core.series import Metrics

__all__ = ["check", "judge", "localize", "print_table", "redacted", "report"]


def judge(
    loop: Annotated[str, typer.Argument(help="The loop that wrote the files.")],
    logs: Annotated[list[Path], typer.Option("--log", help="The log of the run.")],
    metrics: Annotated[list[Path] | None, typer.Option("--metrics", help="Metrics: a file or a directory; repeat for several.")] = None,
    level: Annotated[int | None, typer.Option("--level", "-l", help="Judge against the checks of this level.")] = None,
    expect_steps: Annotated[int | None, typer.Option("--expect-steps", min=1, help="Training steps the run was to take.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the verdict as JSON.")] = False,
) -> None:
    """Judge the files that any run left, without running anything. The exit code is the verdict's."""
    from seatrial.core.errors import UserError
    from seatrial.core.text import one_line
    from seatrial.core.verdict import exit_code
    from seatrial.loops import get_loop

    get_loop(loop)  # an unknown loop is said first
    if len(logs) != 1:
        raise UserError(f"--log is given {len(logs)} times", "judge one run at a time: name its log once")
    result = api.judge(loop, log=logs[0], metrics=metrics or (), level=level, expect_steps=expect_steps)
    if json:
        typer.echo(result.model_dump_json(indent=2))
        raise typer.Exit(exit_code(result.verdict))
    shown = one_line  # recorded text has no lines of its own
    where = f"{result.file}:{result.line}" if result.line else (result.file or "none")
    of = f" of {result.steps_expected}" if result.steps_expected is not None else ""
    typer.echo(f"verdict:   {result.verdict}\nboundary:  {result.boundary or 'none'}\nreason:    {shown(result.reason)}")
    typer.echo(f"decisive:  {shown(where)}\n           {shown(result.text)}")
    typer.echo(f"steps:     {result.steps_reached if result.steps_reached is not None else 'none'}{of}")
    typer.echo(f"milestone: {shown(result.milestone or 'none')}")
    missed = [check for check in result.checks if not check.passed]
    typer.echo(f"checks:    {len(result.checks)} made, {len(missed)} missed")
    for check in missed:
        typer.echo(f"missed:    {shown(check.name)}" + (f" (measured {shown(str(check.value))})" if check.value is not None else ""))
    if result.advice:
        typer.echo(f"advice:    {shown(result.advice)}")
    for text in result.limitations:
        typer.echo(f"note:      {shown(text)}")
    raise typer.Exit(exit_code(result.verdict))


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
    from seatrial.core.verdict import ExitCode

    found = api.check(metrics, *expressions, level=level, also=also or ())
    if as_json:
        content = {
            "passed": found.passed,
            "checks": [result.model_dump(mode="json") for result in found.checks],
            "damage": [str(damage) for damage in found.metrics.damage],
            "overlaps": {overlap.tag: overlap.steps for overlap in found.metrics.overlaps},
            "sources": found.metrics.sources,
        }
        typer.echo(json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False))
    else:
        print_table(found.checks)
    raise typer.Exit(ExitCode.PASS if found.passed else ExitCode.FAIL)


def print_table(results: Sequence[CheckResult], title: str = "Checks") -> None:
    """The metric table."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from seatrial.core.text import visible

    table = Table(title=Text(visible(title)))
    for column in ("Status", "Check", "Value", "Message"):
        table.add_column(column, overflow="fold")
    for result in results:
        status = Text("Pass", style="green") if result.passed else Text("Fail", style="bold red")
        value = f"{result.value:.6g}" if isinstance(result.value, float) else str(result.value if result.value is not None else "-")
        table.add_row(status, *(Text(visible(text)) for text in (result.name, value, result.message)))
    # A log file has no width; a narrow default would tear expressions apart.
    Console(width=None if sys.stdout.isatty() else 200).print(table)


class Format(StrEnum):
    """What to print."""

    SUMMARY = "summary"
    JSON = "json"
    JUNIT = "junit"
    HTML = "html"
    PATH = "path"


def report(
    run: Annotated[Path, typer.Argument(help="A trial's run directory (the one that holds trial.json).")],
    format: Annotated[
        Format, typer.Option("--format", "-f", help="What to print: one of the four reports, or the path of report.html.")
    ] = Format.SUMMARY,
) -> None:
    """Write summary.md, report.json, junit.xml and report.html of a trial anew, and print one of them.

    Every file is compared with the digest that trial.json holds of it: a Pass of which something was altered is Blocked, or a Fail where
    the files show one.

    The exit code is the verdict: 0 Pass, 1 Fail, 77 Skipped, 99 Blocked.
    """
    from seatrial.core.errors import UserError
    from seatrial.core.files import read_text
    from seatrial.core.verdict import exit_code
    from seatrial.loops import loop_of
    from seatrial.report import build
    from seatrial.trial import verify

    if not (run / "trial.json").is_file():
        raise UserError(f"{run}: no trial.json here", "give a run directory, such as trials/<time>-<loop>-<id>")
    trial = verify.load(run.absolute())
    loop = loop_of(trial.plan)
    built = build.write_reports(run, trial, loop.title, loop.levels(), metrics_by_level(run, trial))
    files = {Format.SUMMARY: build.SUMMARY, Format.JSON: build.JSON, Format.JUNIT: build.JUNIT, Format.HTML: build.HTML}
    if format is Format.PATH:
        typer.echo(str(real_path(run / build.HTML)))
    else:
        typer.echo(read_text(run / files[format]), nl=False)
    raise typer.Exit(exit_code(built.result))


def metrics_by_level(run: Path, trial: Trial) -> dict[str, Metrics]:
    """The metrics of every level that wrote some, under `<number>-<name>`."""
    from seatrial.metrics.read import read_metrics
    from seatrial.report.outcomes import METRICS, level_directory, outcomes

    paths = {outcome.key: run / level_directory(outcome) / METRICS for outcome in outcomes(trial)}
    return {key: read_metrics([path]) for key, path in paths.items() if path.is_file()}


def localize(
    run: Annotated[Path, typer.Argument(help="A trial's run directory (the one that holds trial.json).")],
    level: Annotated[int | None, typer.Option("--level", "-l", help="The level to look at. Default: the first that failed.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print localize.json instead of text.")] = False,
) -> None:
    """Show where generator and trainer disagree: sequences, token positions, and what the disagreement follows.

    Writes localize/localize.json and localize/localize.html into the run directory. It judges nothing: the exit code is
    0 when the analysis was made, whatever it says.
    """
    from seatrial.report.html import localize_text
    from seatrial.trial.analyses import LOCALIZE_DIRECTORY, LOCALIZE_HTML, localize_run

    found = localize_run(run, level)
    if json:
        typer.echo(found.model_dump_json(indent=2))
        return
    typer.echo(localize_text(found))
    typer.echo(f"\nreport: {run.absolute() / LOCALIZE_DIRECTORY / LOCALIZE_HTML}")
