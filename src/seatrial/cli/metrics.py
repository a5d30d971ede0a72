"""`seatrial metrics`: what is in the metric files of a run."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from seatrial.core.series import Metrics, Series

app = typer.Typer(
    rich_markup_mode=None,
    add_completion=False,
    help="Read the metrics of a run: event files, JSONL, metrics.json, trainer_state.json.",
    no_args_is_help=True,
)

_BARS = "▁▂▃▄▅▆▇█"
_NOT_FINITE = "×"
_WIDTH = 24

Logdir = Annotated[Path, typer.Argument(help="A metrics file, a directory of one run, or a trial's run directory.")]
LevelOf = Annotated[int | None, typer.Option("--level", help="The level of a trial whose metrics are meant.")]


@app.command()
def dump(
    logdir: Logdir,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write to this file instead of standard output.")] = None,
    level: LevelOf = None,
) -> None:
    """Write all metrics as one metrics.json: {tag: {step: value}}.

    Damage is printed to standard error and makes the exit code 1; what could be read is written all the same.
    """
    from seatrial.core.errors import UserError
    from seatrial.core.files import write_json
    from seatrial.metrics.json_files import to_metrics_json
    from seatrial.trial.level import metrics_of_run

    found = metrics_of_run(logdir, level)
    content = to_metrics_json(found)
    if output is None:
        typer.echo(json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False))
    else:
        if not output.parent.is_dir():
            raise UserError(f"{output}: the directory {output.parent} does not exist", f"mkdir -p {output.parent}")
        write_json(output, content)
        typer.echo(f"wrote {len(content)} metric{'' if len(content) == 1 else 's'} to {output}", err=True)
    _end(found)


@app.command()
def show(
    logdir: Logdir,
    tag: Annotated[str, typer.Option("--tag", "-t", help="Only tags that match this glob, for example 'train/*'.")] = "*",
    level: LevelOf = None,
) -> None:
    """Show every metric in one line: points, steps, values, non-finite points and its course."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from seatrial.core.errors import UserError
    from seatrial.core.text import one_line
    from seatrial.trial.level import metrics_of_run

    found = metrics_of_run(logdir, level)
    series = [found.series[name] for name in sorted(found.series) if fnmatchcase(name, tag)]
    scalars = [name for name in sorted(found.scalars) if fnmatchcase(name, tag)]
    if not series and not scalars and not found.damage:
        some = ", ".join(sorted({*found.series, *found.scalars})[:5])
        raise UserError(f"{logdir}: no metric matches {tag!r}", f"quote the glob; there are {some or 'no metrics at all'}")
    table = Table()
    for column in ("Tag", "Points", "Steps", "First", "Last", "Min", "Max", "Not finite", "Course"):
        table.add_column(column, overflow="fold", justify="left" if column in ("Tag", "Course") else "right")
    for one in series:
        table.add_row(*(Text(one_line(cell)) for cell in _row(one)))
    for name in scalars:
        table.add_row(Text(one_line(name)), "1", "-", Text(one_line(str(found.scalars[name]))))
    Console(width=None if sys.stdout.isatty() else 200).print(table)
    for overlap in found.overlaps:
        typer.echo(
            f"{one_line(overlap.tag)}: written more than once with different values at {len(overlap.steps)} steps; the last one counts"
        )
    _end(found)


def _end(found: Metrics) -> None:
    """Damage is told and fails the command."""
    from seatrial.core.text import one_line
    from seatrial.core.verdict import ExitCode

    for damage in found.damage:
        typer.echo(f"damaged: {one_line(str(damage))}", err=True)
    if found.damage:
        raise typer.Exit(ExitCode.FAIL)


def _row(series: Series) -> list[str]:
    if not series.steps:
        return [series.tag, "0", "-", "-", "-", "-", "-", "0", ""]
    finite = [value for value in series.values if math.isfinite(value)]
    low, high = (f"{min(finite):.6g}", f"{max(finite):.6g}") if finite else ("-", "-")
    ends = f"{series.steps[0]}…{series.steps[-1]}"
    first, last = f"{series.values[0]:.6g}", f"{series.values[-1]:.6g}"
    return [series.tag, str(len(series)), ends, first, last, low, high, str(len(series.values) - len(finite)), sparkline(series.values)]


def sparkline(values: Sequence[float], width: int = _WIDTH) -> str:
    """The course of a series in at most `width` characters; a group with a non-finite value is marked ×."""
    count = min(width, len(values))
    groups = [values[index * len(values) // count : (index + 1) * len(values) // count] for index in range(count)]
    # Halved, so that the span of the largest numbers does not overflow.
    means = [sum(value / len(group) / 2 for value in group) for group in groups]
    finite = [mean for mean in means if math.isfinite(mean)]
    low, span = (min(finite), max(finite) - min(finite)) if finite else (0.0, 0.0)
    top = len(_BARS) - 1
    return "".join(_NOT_FINITE if not math.isfinite(mean) else _BARS[round((mean - low) / span * top) if span else 0] for mean in means)
