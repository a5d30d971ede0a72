"""`seatrial doctor`: the preflight alone."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from seatrial.cli import request

if TYPE_CHECKING:
    from seatrial.model.record import Finding


def doctor(
    context: typer.Context,
    loop: request.LoopName = None,
    level: request.Levels = None,
    model: request.Model = None,
    change: request.Change = None,
    device: request.Device = None,
    verl: request.Verl = None,
    nemo_rl: request.NemoRl = None,
    python: request.Python = None,
    settings: request.Set = None,
    config: request.ConfigFile = None,
    json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Is this machine ready for a trial? Each finding that is not ok has the command that fixes it. Runs no training."""
    from seatrial.launch.environments import Environments
    from seatrial.model.errors import BlockedError
    from seatrial.model.loop import Context
    from seatrial.model.record import Finding
    from seatrial.model.verdict import ExitCode
    from seatrial.trial.interpreter import engine_interpreters, find_interpreter
    from seatrial.trial.preflight import preflight

    passed = context.obj or ()
    options = {"device": device, "verl": verl, "nemo_rl": nemo_rl}
    loaded = request.load_config(config, settings, loop, level, model, change, python=python, arguments=passed, options=options)
    asked = request.ask(loaded, auto=False)
    own = Path(loaded.config.environment.python) if loaded.config.environment.python else None
    findings: tuple[Finding, ...]
    interpreter = None
    try:
        interpreter = find_interpreter(asked.loop, own, typer.echo, build=False)
        name = asked.loop.environment
        ours = name is not None and not own
        findings = Environments().check(str(name), asked.loop.environments()[str(name)]) if ours else interpreter.findings
    except BlockedError as error:
        findings = (Finding(name="environment", ok=False, boundary=error.boundary, message=error.message, fix=error.fix),)
    place = Path(loaded.config.run.trials).absolute()
    while not place.is_dir():
        place = place.parent
    trial = Context(
        run_dir=place,
        python=interpreter.python if interpreter else Path("python3"),
        model=asked.plan.model,
        levels=tuple(item.name for item in asked.plan.levels if not item.skip),
        changes=asked.plan.changes,
        arguments=asked.plan.arguments,
        options=asked.plan.options,
        environments=engine_interpreters(),
    )
    skipped = [Finding(name=f"level {item.number}", ok=True, message=f"Skipped: {item.skip}") for item in asked.plan.levels if item.skip]
    findings = (*findings, _writable(place), *skipped)
    if interpreter:
        findings = (*findings, *preflight(asked.loop, asked.plan, trial, os.environ))
    _print(findings, json)
    raise typer.Exit(ExitCode.PASS if all(finding.ok for finding in findings) else ExitCode.BLOCKED)


def _print(findings: tuple[Finding, ...], as_json: bool) -> None:
    """Each finding with its fix."""
    import json

    if as_json:
        typer.echo(json.dumps([finding.model_dump(mode="json") for finding in findings], indent=2))
        return
    for finding in findings:
        fix = f"\n        fix: {finding.fix}" if finding.fix else ""
        typer.echo(f"{'ok     ' if finding.ok else 'BLOCKED'} {finding.name}: {finding.message}{fix}")


def _writable(place: Path) -> Finding:
    """Run directories can be made there."""
    from seatrial.model.record import Finding

    try:
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        return Finding(name="run directory", ok=False, message=f"{place}: {error.strerror}", fix="set run.trials to a writable directory")
    return Finding(name="run directory", ok=True, message=f"{place} is writable")
