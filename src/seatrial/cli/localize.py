"""`seatrial localize`: which sequences and tokens a log-probability mismatch sits in, and what it follows."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def localize(
    run: Annotated[Path, typer.Argument(help="A trial's run directory (the one that holds trial.json).")],
    level: Annotated[int | None, typer.Option("--level", "-l", help="The level to look at. Default: the first that failed.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print localize.json instead of text.")] = False,
) -> None:
    """Show where generator and trainer disagree: sequences, token positions, and what the disagreement follows.

    Writes localize/localize.json and localize/localize.html into the run directory. It judges nothing: the exit code is
    0 when the analysis was made, whatever it says.
    """
    from seatrial.report.localize import localize_text
    from seatrial.trial.localize import HTML, PLACE, localize_run

    found = localize_run(run, level)
    if json:
        typer.echo(found.model_dump_json(indent=2))
        return
    typer.echo(localize_text(found))
    typer.echo(f"\nreport: {run.absolute() / PLACE / HTML}")
