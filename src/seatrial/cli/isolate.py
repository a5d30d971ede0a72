"""`seatrial isolate`: the guided reruns of a failed level."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def isolate(
    run: Annotated[Path, typer.Argument(help="The run directory of a trial with a level that failed.")],
    level: Annotated[int | None, typer.Option("--level", "-l", help="The failed level. Default: the first that has reruns.")] = None,
    only: Annotated[str | None, typer.Option("--only", metavar="NAME,NAME", help="Only these reruns; `repeat` changes nothing.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the commands of each rerun, and start nothing.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print events and the matrix as JSON instead of text.")] = False,
) -> None:
    """Rerun a failed level with one setting changed at a time, to name suspects.

    Each rerun is a trial of its own below RUN/isolate/; finished ones are not run again. The verdict of RUN stays what it
    is. Exit code: 0 when every rerun was judged and the matrix is complete, 99 when one was Blocked, 130 when interrupted.
    """
    import os

    from seatrial.cli.run import listener
    from seatrial.files import read_text
    from seatrial.model.errors import UserError
    from seatrial.model.verdict import ExitCode
    from seatrial.trial import isolate as trial
    from seatrial.trial import remote

    remote.refuse_while_active(run.absolute(), os.environ)
    names = tuple(name.strip() for name in (only or "").split(",") if name.strip())
    if only is not None and not names:
        raise UserError(f"--only {only!r}: names no rerun", "name some, or leave --only out to run them all")
    case = trial.open_case(run, level, names)
    if dry_run:
        for place, script in trial.scripts(case, names):
            typer.echo(f"# {place}\n{script}")
        return
    matrix = trial.isolate(case, listener(json), names)
    typer.echo(matrix.model_dump_json() if json else f"\n{read_text(case.place() / trial.TEXT)}")
    if not json:
        typer.echo(f"matrix: {case.place() / trial.JSON}")
    if matrix.interrupted:
        raise typer.Exit(ExitCode.INTERRUPTED)
    raise typer.Exit(ExitCode.PASS if matrix.complete else ExitCode.BLOCKED)
