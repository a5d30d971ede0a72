"""`seatrial plan`: what would run, why, and what it would cost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

import typer

from seatrial.cli import request

if TYPE_CHECKING:
    from seatrial.cli.request import Asked


def plan(
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
    settings: request.Set = None,
    config: request.ConfigFile = None,
    json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
) -> None:
    """Say what would run, why, and what it would cost. Runs nothing."""
    passed = context.obj or ()
    options = {"device": device, "verl": verl, "nemo_rl": nemo_rl}
    loaded = request.load_config(config, settings, loop, level, model, change, base, arguments=passed, options=options)
    asked = request.ask(loaded, auto)
    typer.echo(asked.plan.model_dump_json(indent=2) if json else describe(asked))


def describe(asked: Asked) -> str:
    """The plan as text."""
    from seatrial.trial.plan import totals

    plan = asked.plan
    lines = [f"loop: {asked.loop.title}    model: {plan.model}"]
    for repo in plan.changes:
        state = f"at {repo.commit[:12]} ({repo.branch or 'detached HEAD'}), {len(repo.dirty)} dirty files"
        kind = "checkout" if repo.companion else "change"
        lines.append(f"{kind}: {repo.name} {state}, packages: {', '.join(repo.packages) or 'none'}")
    lines += [f"diff: {diff.repo}: {len(diff.paths)} paths against {diff.base}" for diff in asked.diffs]
    for level in plan.levels:
        lines.append(f"\nlevel {level.number}: {level.title}" + (f"  [will be Skipped: {level.skip}]" if level.skip else ""))
        lines += [f"  because {reason}" for reason in level.reasons]
        if not level.skip:
            lines.append(f"  needs {_needs(level.cost.model_dump())}")
    chosen = {level.number for level in plan.levels}
    left = [f"{level.number} {level.title}" for level in asked.loop.levels() if level.number not in chosen]
    lines.append(f"\nnot requested: {'; '.join(left) or 'none'}")
    lines.append(f"in all: {_needs(totals(plan))}")
    lines.append("nothing was run; `seatrial run` with the same options runs it")
    return "\n".join(lines)


def _needs(cost: Mapping[str, float]) -> str:
    """A cost in words; times were measured on two cores without a GPU."""
    machine = f"{cost['gpus']:g} GPUs, about {cost['minutes']:.1f} min and {cost['cpu_seconds']:g} CPU-s"
    return f"{machine}, {cost['disk_mb']:g} MB disk, {cost['memory_mb']:g} MB memory"
