"""`seatrial plan`: what would run, why, and what it would cost."""

from __future__ import annotations

import dataclasses
import os
import shlex
from collections.abc import Mapping
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from seatrial import api
from seatrial.cli import request

if TYPE_CHECKING:
    from seatrial.evidence.redact import Redactor
    from seatrial.trial.trial_request import TrialRequest

SHOWN = 120
"""Letters of a changed line that are shown."""
NOTHING = "the table of this loop knows that the changed paths need none"


def plan(
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
    settings: request.Set = None,
    config: request.ConfigFile = None,
    explain: Annotated[bool, typer.Option("--explain", help="With --auto: also show every path and line that asks for a level.")] = False,
    commands: Annotated[bool, typer.Option("--commands", help="Also print each command, its environment and the files it writes.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
) -> None:
    """Say what would run, why, and what it would cost. Trains nothing.

    --commands also runs the loop's own scripts with stand-ins for whatever they start, to see what that would be.
    """
    from seatrial.core.errors import UserError
    from seatrial.trial import staging

    if explain and not auto:
        raise UserError("--explain shows what a diff asks for, and no diff is read", "add --auto")
    flags = {"device": device, "verl": verl, "nemo_rl": nemo_rl}
    others = {"levels": level, "model": model, "changes": change, "base": base}
    loaded = request.loaded_with(opt, flags, settings, config, loop, arguments=context.obj or (), **others)
    asked = api.plan(configuration=loaded, auto=auto)
    redactor = staging.redactor(asked.plan.arguments)
    causes = explained(asked, redactor) if explain else []
    if json:
        found = {**asked.plan.model_dump(mode="json"), **({"causes": causes} if explain else {})}
        typer.echo(redactor.text(dumps(found, indent=2, ensure_ascii=False)))
        return
    typer.echo(redactor.text(describe(asked)))
    if explain:
        lines = [_cause_line(cause) for cause in causes] or ["no line or path asks for a level"]
        typer.echo(redactor.text("\n".join(["", *lines])))
    if commands:
        typer.echo(redactor.text(describe_commands(asked)))


def describe(asked: TrialRequest) -> str:
    from seatrial.trial.plan import totals

    plan = asked.plan
    lines = [f"loop: {asked.loop.title}    model: {plan.model}"]
    for repo in plan.changes:
        state = f"at {repo.commit[:12]} ({repo.branch or 'detached HEAD'}), {len(repo.dirty)} dirty files"
        kind = "checkout" if repo.companion else "change"
        lines.append(f"{kind}: {repo.name} {state}, packages: {', '.join(repo.packages) or 'none'}")
    lines += [f"diff: {diff.repo}: {len(diff.paths)} paths against {diff.base}" for diff in asked.diffs]
    if plan.not_needed and not plan.levels:
        lines.append(f"\nno RL level is required: {NOTHING}, all {len(plan.not_needed)} of them")
    for level in plan.levels:
        lines.append(f"\nlevel {level.number}: {level.title}" + (f"  [will be Skipped: {level.skip}]" if level.skip else ""))
        lines += [f"  because {reason}" for reason in level.reasons]
        if not level.skip:
            lines.append(f"  needs {_needs(level.cost.model_dump())}")
    chosen = {level.number for level in plan.levels}
    left = [f"{level.number} {level.title}" for level in asked.loop.levels() if level.number not in chosen]
    lines.append(f"\nnot requested: {'; '.join(left) or 'none'}")
    lines.append(f"in all: {_needs(totals(plan))}")
    skipped = "; `seatrial run` with the same options would be Skipped, for nothing is to run: name levels with --level"
    lines.append("nothing was run" + ("; `seatrial run` with the same options runs it" if plan.levels else skipped))
    return "\n".join(lines)


def explained(asked: TrialRequest, redactor: Redactor) -> list[dict[str, object]]:
    """Every path and line that asks for a level, in the order of the levels; secrets are hidden before a line is cut."""
    causes = asked.required.causes if asked.required else ()
    made = [dataclasses.asdict(cause) | {"text": _cut(redactor.text(cause.text))} for cause in causes]
    return sorted(made, key=lambda cause: int(cause["level"]))


def _cut(text: str) -> str:
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"


def _cause_line(cause: Mapping[str, object]) -> str:
    """`level 1  bridge: src/x.py:12 says 'lora' (PEFT)`, and the line itself below it."""
    place = cause["path"] if cause["line"] is None else f"{cause['path']}:{cause['line']}"
    concern = f" ({cause['concern']})" if cause["concern"] else ""
    text = f"\n           {cause['text']}" if cause["text"] else ""
    return f"level {cause['level']}  {cause['repo']}: {place} {cause['rule']}{concern}{text}"


def _needs(cost: Mapping[str, float]) -> str:
    """A cost in words; times were measured on two cores without a GPU."""
    machine = f"{cost['gpus']:g} GPUs, about {cost['minutes']:.1f} min and {cost['cpu_seconds']:g} CPU-s"
    return f"{machine}, {cost['disk_mb']:g} MB disk, {cost['memory_mb']:g} MB memory"


def describe_commands(asked: TrialRequest) -> str:
    """The processes of every level, as its command.sh will have them; $OUT is the level's directory."""
    from seatrial.core.loop import Context
    from seatrial.trial import run_dir
    from seatrial.trial.staging import engine_interpreters, loop_path, phase_lines

    plan, loop = asked.plan, asked.loop
    out = Path(asked.loaded.config.run.trials, "RUN").absolute()
    context = Context.of(plan, out, _python(asked), engine_interpreters())
    lines = []
    for side in loop.side_tests(context):
        words = shlex.join([*side.argv, *side.files])
        lines += [
            f"\n# {side.name}",
            side.skip or side.blocked or f"(cd {shlex.quote(str(side.cwd))} && {words})",
            *(f"# {note}" for note in side.notes),
        ]
    path = os.pathsep.join(loop_path(loop, context))
    lines.append(f"\nexport PYTHONPATH={shlex.quote(path)}")
    planned = {level.number: run_dir.level_directory(out, level) for level in plan.levels if not level.skip}
    for level in (level for level in loop.levels() if level.number in planned):
        directory = planned[level.number]
        lines.append(f"\n# level {level.number}: {level.title}")
        for phase in loop.phases(level, context, directory):
            lines.append(f"# {phase.name}" + (f": {phase.steps} steps" if phase.steps else ""))
            lines += phase_lines(phase, directory, str(out / "instruments"))
        lines += [f"# {line}" for line in loop.shown(level, context, directory)]
    return "\n".join(lines)


def _python(asked: TrialRequest) -> Path:
    """The loop's interpreter, where it can be known without building an environment."""
    from seatrial.core.errors import BlockedError

    named = asked.loaded.config.environment.python
    if named or asked.loop.environment is not None:
        return Path(named or "python3")
    try:
        return asked.loop.interpreter()
    except BlockedError:
        return Path("python3")
