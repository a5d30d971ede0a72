"""Commands that jobs of a campaign run: the collector of a task, what comes after it, and the sandbox service."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from seatrial.cli.rollouts.show import say
from seatrial.cli.rollouts.watch import Directory


def collect(
    directory: Directory,
    number: Annotated[int, typer.Option("--round", help="A round of the campaign.")],
    task: Annotated[int, typer.Option("--task", help="A task of that round.")],
    urls: Annotated[str, typer.Option("--urls", help="Servers of the policy in this job.")] = "",
    sandbox: Annotated[str | None, typer.Option("--sandbox", help="The sandbox service in this job.")] = None,
) -> None:
    """Collect the shards of one task. Jobs call this."""
    from seatrial.launch.interrupt import Interruptible
    from seatrial.model.verdict import ExitCode
    from seatrial.rollouts.conduct.client import collect_task
    from seatrial.rollouts.place import Place

    with Interruptible():
        ended = collect_task(Place(directory), number, task, urls.replace(",", " ").split(), sandbox, say)
    say(f"{ended.reason}: {ended.ok} ok, {ended.failed} failed for good, {ended.owed} owed. {ended.message}".rstrip())
    if ended.owed:
        raise typer.Exit(ExitCode.BLOCKED)


def finish(directory: Directory) -> None:
    """Merge and profile a campaign that is complete. Jobs call this after the collecting ones."""
    from seatrial.cli.rollouts.results import merge_and_profile

    merge_and_profile(directory)


def sandbox(
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port to listen on.")],
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "127.0.0.1",
    campaign: Annotated[Path | None, typer.Option("--campaign", metavar="DIR", help="Take the limits of this campaign.")] = None,
) -> None:
    """Serve the sandbox over HTTP, as NeMo Gym's resources servers expect it (NEMO_SKILLS_SANDBOX_HOST and _PORT)."""
    from seatrial.rollouts.campaign import SandboxLimits
    from seatrial.rollouts.manifest import load_campaign
    from seatrial.rollouts.place import Place
    from seatrial.rollouts.sandbox.service import run_service

    limits = load_campaign(Place(campaign)).sandbox if campaign else SandboxLimits()
    run_service(host, port, limits, lambda chosen: say(f"the sandbox listens on http://{host}:{chosen}"))
