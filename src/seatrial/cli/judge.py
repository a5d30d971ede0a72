"""`seatrial judge`, `check`, `report` and `localize`: commands that read what a run left, and run nothing."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from enum import StrEnum
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from seatrial.core.guarded import real_path
from seatrial.core.records import replace

if TYPE_CHECKING:
    from seatrial.core.records import CheckResult, Trial
    from seatrial.core.series import Metrics
    from seatrial.evidence.redact import Redactor
    from seatrial.trial.files_judge import FileVerdict

_LINES_BEFORE, _LONGEST_LINE = 400, 100_000
"""What is read before the decisive line to know what it holds: the name of a value, the begin of a key."""


def redacted(found: FileVerdict, redactor: Redactor) -> FileVerdict:
    """The verdict without secrets: what it quotes is from a log that is not redacted."""
    shown = _in_its_place(found, redactor)

    def clear(text: str) -> str:
        return redactor.text(text.replace(found.text, shown) if shown != found.text else text)

    quoted = {name: clear(getattr(found, name)) for name in ("text", "reason", "advice")}
    limitations = tuple(map(clear, found.limitations))
    signature = found.signature and clear(found.signature)
    return redactor.record(replace(found, **quoted, limitations=limitations, signature=signature))


def _in_its_place(found: FileVerdict, redactor: Redactor) -> str:
    """The decisive line as the lines before it leave it: a value may stand below its name."""
    if not found.file or not found.line or not found.text.strip():
        return found.text
    try:
        with Path(found.file).open(encoding="utf-8", errors="surrogateescape", newline="\n") as stream:
            rows = [row[:_LONGEST_LINE] for row in islice(stream, max(0, found.line - _LINES_BEFORE), found.line)]
    except OSError:
        return found.text
    cleared = redactor.rows(rows)
    if not rows or cleared[-1] == rows[-1] or cleared[-1] == redactor.text(rows[-1]):
        return found.text
    return cleared[-1].strip()[: max(len(found.text), 200)]


def judge(
    loop: Annotated[str, typer.Argument(help="The loop that wrote the files.")],
    logs: Annotated[list[Path], typer.Option("--log", help="The log of the run.")],
    metrics: Annotated[list[Path] | None, typer.Option("--metrics", help="Metrics: a file or a directory; repeat for several.")] = None,
    level: Annotated[int | None, typer.Option("--level", "-l", help="Judge against the checks of this level.")] = None,
    expect_steps: Annotated[int | None, typer.Option("--expect-steps", min=1, help="Training steps the run was to take.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the verdict as JSON.")] = False,
) -> None:
    """Judge the files that any run left, without running anything. The exit code is the verdict's."""
    import os

    from seatrial.core.errors import UserError
    from seatrial.core.text import one_line
    from seatrial.core.verdict import exit_code
    from seatrial.evidence.redact import Redactor
    from seatrial.loops import get_loop
    from seatrial.trial.files_judge import judge_files
    from seatrial.trial.plan import parse_levels

    known = get_loop(loop)
    if len(logs) != 1:
        raise UserError(f"--log is given {len(logs)} times", "judge one run at a time: name its log once")
    (log,) = logs
    if not log.is_file():
        wrong = "a directory, not a log file" if log.is_dir() else "no such log file"
        raise UserError(f"{log}: {wrong}", "name the file that holds the output of the run")
    chosen = None
    if level is not None:
        (number,) = parse_levels(str(level), known)
        chosen = next(item for item in known.levels() if item.number == number)
    result = redacted(judge_files(known, log, metrics or [], chosen, expect_steps), Redactor(os.environ))
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
    from seatrial.metrics.checks import evaluate, parse, undamaged
    from seatrial.trial.level import metrics_of_run

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
