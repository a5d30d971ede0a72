"""`seatrial attach`: follow a trial on a cluster to its verdict; what `run --on` and `resume --on` do, too."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

if TYPE_CHECKING:
    from seatrial.model.profile import Profile
    from seatrial.model.record import Plan, Trial
    from seatrial.trial.attached import Note
    from seatrial.trial.conduct import Request


def attach(
    run: Annotated[Path, typer.Argument(help="The run directory of a trial that was submitted with --on.")],
    json: Annotated[bool, typer.Option("--json", help="One JSON object per change, instead of text.")] = False,
) -> None:
    """Follow a trial that runs as a Slurm job, to its verdict. Ctrl-C detaches: the job goes on.

    A job that ended before the trial had its verdict is judged from the run directory: what is stored stays, the rest
    is Blocked at the cluster. The exit code is the verdict's: 0 Pass, 1 Fail, 77 Skipped, 99 Blocked.
    """
    from seatrial.trial import rundir

    path = run.absolute()
    rundir.load(path)
    follow(path, json)


def begin(wanted: Request, name: str, profile: Profile, *, detach: bool, dry_run: bool, json: bool) -> NoReturn:
    """Store a new trial and submit it. Whatever is wrong with the job is said before anything is made."""
    from seatrial.cli.run import listener
    from seatrial.trial import conduct, hidden, remote, rundir

    hidden.refuse(wanted.plan.arguments)
    script = remote.script(wanted.plan, wanted.out, profile)
    if dry_run:
        _dry_run(wanted.plan, wanted.out, profile, script)
    rundir.named_directory(wanted.out)
    try:
        trial = conduct.prepare(wanted, listener(json))
    except KeyboardInterrupt:
        typer.echo(
            f"\nseatrial: nothing was submitted; `seatrial resume {shlex.quote(str(wanted.out))} --on slurm:{name}` does it", err=True
        )
        raise
    _submit(wanted.out, trial, name, profile, detach, json)


def again(path: Path, name: str, profile: Profile, *, detach: bool, json: bool) -> NoReturn:
    """Submit a trial that is stored, and not finished, once more."""
    import os

    from seatrial.cli.run import close
    from seatrial.model.errors import UserError
    from seatrial.trial import conduct, hidden, remote, rundir, verify

    recorded = rundir.read(path)
    if conduct.is_over(recorded, verify.examine(path, recorded)):
        typer.echo("seatrial: every level of this trial has its verdict; nothing is left to do", err=True)
        close(conduct.resume(path, lambda _: None), path, json)
    trial = rundir.load(path)
    hidden.refuse(trial.plan.arguments)
    if remote.is_own_job(path, os.environ):
        raise UserError(f"{path}: this is the Slurm job of that trial", "leave out --on")
    remote.refuse_while_active(path, os.environ)
    _submit(path, trial, name, profile, detach, json)


def _submit(path: Path, trial: Trial, name: str, profile: Profile, detach: bool, json: bool) -> NoReturn:
    from seatrial.trial import remote
    from seatrial.trial.attached import Note

    sent = remote.submit_trial(path, trial, profile, name)
    _show(Note("job", f"submitted with the profile {name}", sent.slurm or "", "waiting"), json)
    if detach:
        typer.echo(_how_to_attach(path), err=True)
        raise typer.Exit
    follow(path, json)


def _dry_run(plan: Plan, path: Path, profile: Profile, script: str) -> NoReturn:
    """Print the script as it would be submitted, and what Slurm says of it."""
    from seatrial.model.verdict import ExitCode
    from seatrial.trial import remote

    typer.echo(script, nl=False)
    said = remote.validate(plan, path, profile)
    typer.echo(f"seatrial: sbatch --test-only: {said}", err=True)
    raise typer.Exit(ExitCode.PASS if said == "ok" else ExitCode.BLOCKED)


def follow(path: Path, json: bool) -> NoReturn:
    """Show the job until it has ended, then close with the verdict of the run directory."""
    from seatrial.cli.run import close
    from seatrial.model.verdict import ExitCode
    from seatrial.trial import remote
    from seatrial.trial.attached import Following

    try:
        unit = Following(path, lambda note: _show(note, json)).to_the_end()
    except KeyboardInterrupt:
        typer.echo(f"\ndetached; the job goes on. {_how_to_attach(path)}", err=True)
        raise typer.Exit(ExitCode.INTERRUPTED) from None
    trial, cut = remote.settle(path, unit)
    if json:
        from seatrial.cli.display import JsonLines
        from seatrial.trial.progress import Ended

        JsonLines()(Ended(trial, str(path)))
    close(trial, path, json, cut)


def _how_to_attach(path: Path) -> str:
    return f"follow it with `seatrial attach {shlex.quote(str(path))}`, cancel it with `seatrial jobs cancel {shlex.quote(str(path))}`"


def _show(note: Note, json: bool) -> None:
    """Print a note as text, or as one JSON object."""
    import dataclasses
    import json as encoder

    if json:
        row = {("event" if key == "kind" else key): value for key, value in dataclasses.asdict(note).items() if value}
        typer.echo(encoder.dumps(row, ensure_ascii=False))
    elif note.kind == "log":
        typer.echo(note.text)
    else:
        typer.echo(f"seatrial: Slurm job {note.slurm or '(no id yet)'} {note.text}")
