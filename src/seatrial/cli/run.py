"""`seatrial run`: a trial from flags to a verdict."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn

import typer

from seatrial.cli import request
from seatrial.model.guarded import real_path

if TYPE_CHECKING:
    from seatrial.model.loop import Loop
    from seatrial.model.record import Baseline, Plan, Trial
    from seatrial.trial.progress import Listener


def run(
    context: typer.Context,
    loop: request.LoopName = None,
    level: request.Levels = None,
    model: request.Model = None,
    change: request.Change = None,
    device: request.Device = None,
    verl: request.Verl = None,
    nemo_rl: request.NemoRl = None,
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
    from seatrial.cli import attach
    from seatrial.model.errors import UserError
    from seatrial.trial import baseline as comparing
    from seatrial.trial import conduct, disk, rundir
    from seatrial.trial.level import Limits

    options = {"device": device, "verl": verl, "nemo_rl": nemo_rl}
    loaded = request.load_config(config, settings, loop, level, model, change, base, python, context.obj or (), options, no_base)
    asked = request.ask(loaded, auto)
    if fault is not None:
        _require_fault(fault, asked.loop, [item.number for item in asked.plan.levels])
    if on is None and (detach or dry_run):
        raise UserError("--detach and --dry-run are for trials on a cluster", "add --on slurm:PROFILE")
    force = loaded.config
    wanted = conduct.Request(
        plan=asked.plan,
        out=(real_path(out) if ".." in out.parts else out.absolute()) if out else rundir.new_path(Path(force.run.trials), asked.loop.name),
        python=Path(force.environment.python) if force.environment.python else None,
        limits=Limits(force.limits.deadline_minutes, force.limits.stall_minutes),
        options={"fault": fault} if fault else {},
        config={key: {"value": value, "origin": origin} for key, value, origin, _ in loaded.rows()},
        baseline=_unchanged(asked.plan, baseline, expect, run_base=force.change.run_base, here=on is None, fault=fault is not None),
    )
    if on is not None and asked.plan.levels:  # a trial without a level needs no job
        attach.begin(wanted, *request.profile_named(loaded, on), detach=detach, dry_run=dry_run, json=json)
    if asked.plan.levels:
        disk.require_room(asked.loop, asked.plan, wanted.out, wanted.python, os.environ)
    rundir.named_directory(wanted.out)
    tell = listener(json)
    close(comparing.finish(wanted, conduct.start(wanted, tell), tell), wanted.out, json)


def _unchanged(
    plan: Plan, named: str | None, expect: Literal["identical"] | None, *, run_base: bool, here: bool, fault: bool
) -> Baseline | None:
    """What the trial is compared with: what the user named, or the base of the change."""
    from seatrial.model.errors import UserError
    from seatrial.trial.base import base_of
    from seatrial.trial.baseline import requested

    if expect and not named and not run_base:
        raise UserError("--expect needs something to compare with, and --no-base switches the base off", "leave one of them out")
    found = requested(named, plan, here=here) if named else base_of(plan, run=run_base, here=here, fault=fault)
    if expect and found is None:
        raise UserError("--expect needs a change", "name the checkout under test with --change PATH")
    return found.model_copy(update={"expect": expect}) if found else None


def listener(json: bool) -> Listener:
    """How the trial is shown."""
    from seatrial.cli import display

    return display.JsonLines() if json else display.Text()


def close(trial: Trial, directory: Path, json: bool, cut: str = "", in_job: bool = False) -> NoReturn:
    """Print the summary, tell GitHub, and exit with the verdict.

    `cut` says why a trial on a cluster has no verdict of its own. Inside its job only the place of the report is said:
    whoever attaches prints the rest.
    """
    import shlex

    from seatrial.files import read_model, read_text
    from seatrial.model.record import Report
    from seatrial.model.verdict import ExitCode, exit_code
    from seatrial.report.github import publish

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
    from seatrial.regress.history.keep import keep

    if line := keep(directory):
        typer.echo(line, err=True)


def _require_fault(fault: str, loop: Loop, levels: list[int]) -> None:
    """A fault that is unknown, or that no chosen level is to catch, is an error; `list` prints the known ones."""
    from seatrial.model.errors import UserError

    known = loop.faults()
    if not known:
        cpu = f"seatrial run {loop.name} --device cpu --fault list" if "device" in loop.options() else "leave --fault out"
        raise UserError(f"{loop.title} has no faults to inject here", cpu)
    if fault == "list":
        rows = ((name, ",".join(map(str, found.levels)), found.stage or "-", found.text) for name, found in known.items())
        typer.echo("\n".join(f"{name:25} levels {levels:14} stage {stage:10} {text}" for name, levels, stage, text in rows))
        raise typer.Exit
    if fault not in known:
        raise UserError(f"unknown fault {fault!r}; known: {', '.join(known)}", f"seatrial run {loop.name} --fault list")
    places = known[fault].levels
    if not set(places).intersection(levels):
        raise UserError(f"the fault {fault} acts at level {', '.join(map(str, places))} only", f"add --level {places[0]}")
