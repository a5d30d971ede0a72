"""`seatrial run`, `resume`, `attach` and `isolate`: run trials to a verdict, here or as a Slurm job; rerun a failed level."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from seatrial import api
from seatrial.cli import request
from seatrial.core.errors import UserError
from seatrial.core.files import read_model, read_text
from seatrial.core.verdict import ExitCode, exit_code

if TYPE_CHECKING:
    from seatrial.core.jobs import Profile
    from seatrial.core.loop import Loop
    from seatrial.core.records import Plan, Trial
    from seatrial.trial.progress import Listener
    from seatrial.trial.runner import Request
    from seatrial.trial.slurm_job import Note


def run(
    context: typer.Context,
    loop: request.LoopName = None,
    level: request.Levels = None,
    model: request.Model = None,
    change: request.Change = None,
    device: request.Device = None,
    verl: request.Verl = None,
    nemo_rl: request.NemoRl = None,
    opt: request.Opt = None,
    auto: request.Auto = False,
    base: request.Base = None,
    no_base: request.NoBase = False,
    baseline: request.Baseline = None,
    expect: request.Expect = None,
    python: request.Python = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Run directory. Default: a new one below trials/.")] = None,
    settings: request.Set = None,
    config: request.ConfigFile = None,
    fault: Annotated[str | None, typer.Option("--fault", help="Inject a known bug, to see the trial catch it; `list` names them.")] = None,
    on: request.On = None,
    detach: request.Detach = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="With --on: print the script, let Slurm validate it, submit nothing.")] = False,
    json: Annotated[bool, typer.Option("--json", help="One JSON object per event, instead of text.")] = False,
) -> None:
    """Run levels of a loop on a change, to a verdict and a report.

    The base of the change runs beside it, under the same conditions: a failure that it has too is Blocked, and the report
    says whether both runs are identical, or where they first differ.

    Loop arguments stand after `--` and are passed on verbatim:
    seatrial run trl --level 0 -- --learning_rate 1e-4
    """
    from seatrial.trial.trial_request import require_fault, run_request, runner_request

    flags = {"device": device, "verl": verl, "nemo_rl": nemo_rl}
    others = {"levels": level, "model": model, "changes": change, "base": base, "python": python, "no_base": no_base}
    loaded = request.loaded_with(opt, flags, settings, config, loop, arguments=context.obj or (), **others)
    asked = api.plan(configuration=loaded, auto=auto)
    if fault == "list":
        _list_faults(asked.loop)
    if fault is not None:
        require_fault(fault, asked.loop, [item.number for item in asked.levels])
    if on is None and (detach or dry_run):
        raise UserError("--detach and --dry-run are for trials on a cluster", "add --on slurm:PROFILE")
    if on is not None:
        wanted = runner_request(asked, baseline=baseline, expect=expect, out=out, fault=fault, here=False)
        if asked.levels:
            begin(wanted, *request.profile_named(loaded, on), detach=detach, dry_run=dry_run, json=json)
        close(run_request(asked, wanted, listener(json)), wanted.out, json)  # a trial without a level needs no job
    try:
        found = api.run(asked, baseline=baseline, expect=expect, out=out, fault=fault, listener=listener(json), history=False)
    except api.TrialInterrupted as cut:
        found = cut.trial
    close(found.record, found.directory, json)


def listener(json: bool) -> Listener:
    from seatrial.cli import display

    return display.JsonLines() if json else display.Text()


def close(trial: Trial, directory: Path, json: bool, cut: str = "", in_job: bool = False) -> NoReturn:
    """Print the summary, tell GitHub, and exit with the verdict.

    `cut` says why a trial on a cluster has no verdict of its own. Inside its job only the place of the report is said:
    whoever attaches prints the rest.
    """

    from seatrial.core.records import Report
    from seatrial.report.ci import publish

    report = read_model(directory / "report.json", Report)
    if not json:
        typer.echo(f"\n{read_text(directory / 'summary.md')}" if not in_job else f"{report.result}: {report.answer}")
        typer.echo(f"report: {directory / 'report.html'}")
    for line in publish(report, os.environ) if not in_job else ():
        getattr(sys.stdout, "command", sys.stdout.write)(f"{line}\n")
    if trial.status == "running":
        what = f"not finished: {cut}" if cut else "interrupted"
        where = ", here or with --on slurm:PROFILE" if cut else ""
        typer.echo(f"{what}; finish it with: seatrial resume {shlex.quote(str(directory))}{where}", err=True)
        raise typer.Exit(exit_code(report.result) if cut else ExitCode.INTERRUPTED)
    if not in_job:
        _keep(directory)
    raise typer.Exit(exit_code(report.result))


def _keep(directory: Path) -> None:
    """Into the history; one quiet line, and no say in the verdict."""
    from seatrial.history.auto_import import auto_import

    if line := auto_import(directory):
        typer.echo(line, err=True)


def _list_faults(loop: Loop) -> NoReturn:
    from seatrial.trial.trial_request import faults_of

    rows = ((name, ",".join(map(str, found.levels)), found.stage or "-", found.text) for name, found in faults_of(loop).items())
    typer.echo("\n".join(f"{name:25} levels {levels:14} stage {stage:10} {text}" for name, levels, stage, text in rows))
    raise typer.Exit


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

    from seatrial.trial import baseline, runner, slurm_job
    from seatrial.trial.trial_request import load_config

    path = run.absolute()
    if on is None and (detach or settings or config):
        raise UserError("--detach, --set and --config are for trials on a cluster", "add --on slurm:PROFILE")
    if on is not None:
        again(path, *request.profile_named(load_config(config, settings), on), detach=detach, json=json)
    slurm_job.refuse_while_active(path, os.environ)
    tell = listener(json)
    trial = runner.resume(path, tell)
    if not trial.alterations:  # what was altered is compared with nothing
        trial = baseline.finish(runner.request_of(path, trial), trial, tell)
    close(trial, path, json, in_job=slurm_job.is_own_job(path, os.environ))


def attach(
    run: Annotated[Path, typer.Argument(help="The run directory of a trial that was submitted with --on.")],
    json: Annotated[bool, typer.Option("--json", help="One JSON object per change, instead of text.")] = False,
) -> None:
    """Follow a trial that runs as a Slurm job, to its verdict. Ctrl-C detaches: the job goes on.

    A job that ended before the trial had its verdict is judged from the run directory: what is stored stays, the rest
    is Blocked at the cluster. The exit code is the verdict's: 0 Pass, 1 Fail, 77 Skipped, 99 Blocked.
    """
    from seatrial.trial import run_dir

    path = run.absolute()
    run_dir.load(path)
    follow(path, json)


def begin(wanted: Request, name: str, profile: Profile, *, detach: bool, dry_run: bool, json: bool) -> NoReturn:
    """Store a new trial and submit it. Whatever is wrong with the job is said before anything is made."""
    from seatrial.trial import run_dir, runner, slurm_job, staging

    staging.refuse(wanted.plan.arguments)
    script = slurm_job.script(wanted.plan, wanted.out, profile)
    if dry_run:
        _dry_run(wanted.plan, wanted.out, profile, script)
    run_dir.named_directory(wanted.out)
    try:
        trial = runner.prepare(wanted, listener(json))
    except KeyboardInterrupt:
        typer.echo(
            f"\nseatrial: nothing was submitted; `seatrial resume {shlex.quote(str(wanted.out))} --on slurm:{name}` does it", err=True
        )
        raise
    _submit(wanted.out, trial, name, profile, detach, json)


def again(path: Path, name: str, profile: Profile, *, detach: bool, json: bool) -> NoReturn:
    """Submit a trial that is stored, and not finished, once more."""
    from seatrial.trial import run_dir, runner, slurm_job, staging, verify

    recorded = run_dir.read(path)
    if runner.is_over(recorded, verify.examine(path, recorded)):
        typer.echo("seatrial: every level of this trial has its verdict; nothing is left to do", err=True)
        close(runner.resume(path, lambda _: None), path, json)
    trial = run_dir.load(path)
    staging.refuse(trial.plan.arguments)
    if slurm_job.is_own_job(path, os.environ):
        raise UserError(f"{path}: this is the Slurm job of that trial", "leave out --on")
    slurm_job.refuse_while_active(path, os.environ)
    _submit(path, trial, name, profile, detach, json)


def _submit(path: Path, trial: Trial, name: str, profile: Profile, detach: bool, json: bool) -> NoReturn:
    from seatrial.trial import slurm_job
    from seatrial.trial.slurm_job import Note

    sent = slurm_job.submit_trial(path, trial, profile, name)
    _show(Note("job", f"submitted with the profile {name}", sent.slurm or "", "waiting"), json)
    if detach:
        typer.echo(_how_to_attach(path), err=True)
        raise typer.Exit
    follow(path, json)


def _dry_run(plan: Plan, path: Path, profile: Profile, script: str) -> NoReturn:
    """Print the script as it would be submitted, and what Slurm says of it."""
    from seatrial.trial import slurm_job

    typer.echo(script, nl=False)
    said = slurm_job.validate(plan, path, profile)
    typer.echo(f"seatrial: sbatch --test-only: {said}", err=True)
    raise typer.Exit(ExitCode.PASS if said == "ok" else ExitCode.BLOCKED)


def follow(path: Path, json: bool) -> NoReturn:
    """Show the job until it has ended, then close with the verdict of the run directory."""
    from seatrial.trial import slurm_job
    from seatrial.trial.slurm_job import Following

    try:
        unit = Following(path, lambda note: _show(note, json)).to_the_end()
    except KeyboardInterrupt:
        typer.echo(f"\ndetached; the job goes on. {_how_to_attach(path)}", err=True)
        raise typer.Exit(ExitCode.INTERRUPTED) from None
    trial, cut = slurm_job.settle(path, unit)
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

    from seatrial.trial import analyses as trial
    from seatrial.trial import slurm_job

    slurm_job.refuse_while_active(run.absolute(), os.environ)
    names = tuple(name.strip() for name in (only or "").split(",") if name.strip())
    if only is not None and not names:
        raise UserError(f"--only {only!r}: names no rerun", "name some, or leave --only out to run them all")
    case = trial.open_case(run, level, names)
    if dry_run:
        for place, script in trial.scripts(case, names):
            typer.echo(f"# {place}\n{script}")
        return
    matrix = trial.isolate(case, listener(json), names)
    typer.echo(matrix.model_dump_json() if json else f"\n{read_text(case.place() / trial.ISOLATE_TEXT)}")
    if not json:
        typer.echo(f"matrix: {case.place() / trial.ISOLATE_JSON}")
    if matrix.interrupted:
        raise typer.Exit(ExitCode.INTERRUPTED)
    raise typer.Exit(ExitCode.PASS if matrix.complete else ExitCode.BLOCKED)
