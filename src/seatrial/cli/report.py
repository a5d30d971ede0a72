"""`seatrial report`: build the reports of a run directory anew from what is on disk, and print one."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from seatrial.model.guarded import real_path

if TYPE_CHECKING:
    from seatrial.model.record import Trial
    from seatrial.model.series import Metrics


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
    from seatrial.files import read_text
    from seatrial.loops import loop_of
    from seatrial.model.errors import UserError
    from seatrial.model.verdict import exit_code
    from seatrial.report import write
    from seatrial.trial import verify

    if not (run / "trial.json").is_file():
        raise UserError(f"{run}: no trial.json here", "give a run directory, such as trials/<time>-<loop>-<id>")
    trial = verify.load(run.absolute())
    loop = loop_of(trial.plan)
    built = write.write_reports(run, trial, loop.title, loop.levels(), metrics_by_level(run, trial))
    files = {Format.SUMMARY: write.SUMMARY, Format.JSON: write.JSON, Format.JUNIT: write.JUNIT, Format.HTML: write.HTML}
    if format is Format.PATH:
        typer.echo(str(real_path(run / write.HTML)))
    else:
        typer.echo(read_text(run / files[format]), nl=False)
    raise typer.Exit(exit_code(built.result))


def metrics_by_level(run: Path, trial: Trial) -> dict[str, Metrics]:
    """The metrics of every level that wrote some, under `<number>-<name>`."""
    from seatrial.metrics.read import read_metrics
    from seatrial.report.deliverables import METRICS, level_directory
    from seatrial.report.outcome import outcomes

    paths = {outcome.key: run / level_directory(outcome) / METRICS for outcome in outcomes(trial)}
    return {key: read_metrics([path]) for key, path in paths.items() if path.is_file()}
