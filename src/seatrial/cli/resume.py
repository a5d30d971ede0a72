"""`seatrial resume`: finish a trial from its run directory."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from seatrial.cli import request


def resume(
    run: Annotated[Path, typer.Argument(help="A run directory that `seatrial run` made.")],
    on: request.On = None,
    detach: request.Detach = False,
    settings: request.Set = None,
    config: request.ConfigFile = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object per event, instead of text.")] = False,
) -> None:
    """Finish a trial that was killed, interrupted or blocked, or that was only planned.

    Levels that passed or failed are kept. It refuses when the loop's environment or the change is not what it was,
    and while a Slurm job of the trial waits or runs. A level whose files were altered since it ended is no Pass.
    """
    import os

    from seatrial.cli import attach
    from seatrial.cli.run import close, listener
    from seatrial.model.errors import UserError
    from seatrial.trial import baseline, conduct, remote

    path = run.absolute()
    if on is None and (detach or settings or config):
        raise UserError("--detach, --set and --config are for trials on a cluster", "add --on slurm:PROFILE")
    if on is not None:
        attach.again(path, *request.profile_named(request.load_config(config, settings), on), detach=detach, json=json)
    remote.refuse_while_active(path, os.environ)
    tell = listener(json)
    trial = conduct.resume(path, tell)
    if not trial.alterations:  # what was altered is compared with nothing
        trial = baseline.finish(conduct.request_of(path, trial), trial, tell)
    close(trial, path, json, in_job=remote.is_own_job(path, os.environ))
