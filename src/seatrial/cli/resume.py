"""`seatrial resume`: finish a trial from its run directory."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def resume(
    run: Annotated[Path, typer.Argument(help="A run directory that `seatrial run` made.")],
    json: Annotated[bool, typer.Option("--json", help="One JSON object per event, instead of text.")] = False,
) -> None:
    """Finish a trial that was killed, interrupted or blocked.

    Levels that passed or failed are kept. It refuses when the loop's environment or the change is not what it was.
    """
    from seatrial.cli.run import close, listener
    from seatrial.trial import conduct

    close(conduct.resume(run, listener(json)), run.absolute(), json)
