"""What runs in a task of a round: the shards of that task, collected from the backend that the campaign names.

The exit code says the rest: 0 when nothing of these shards is owed any more, 99 when something is (the message says why).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from seatrial.launch.interrupt import stop_requested
from seatrial.model.errors import UserError
from seatrial.rollouts import rounds
from seatrial.rollouts.campaign import Campaign
from seatrial.rollouts.collect.engine import Ended, collect
from seatrial.rollouts.manifest import load, load_campaign
from seatrial.rollouts.place import Place
from seatrial.rollouts.units import Units
from seatrial.rollouts.work import Backend, Verifier


def collect_task(place: Place, number: int, task: int, urls: Sequence[str], sandbox: str | None, progress: Callable[[str], None]) -> Ended:
    """Collect what the shards of a task owe; `urls` are the policy's servers in this job, `sandbox` the service beside it."""
    planned = rounds.load(place, number)
    if not 0 <= task < len(planned.tasks):
        raise UserError(f"round {number} has {len(planned.tasks)} tasks, and no task {task}", "seatrial rollouts resume plans anew")
    campaign = load_campaign(place)
    backend = make_backend(campaign, place, [*urls] or _prehosted(campaign), sandbox)
    return run(place, campaign, planned.tasks[task], backend, progress)


def run(
    place: Place,
    campaign: Campaign,
    shards: Sequence[int],
    backend: Backend,
    progress: Callable[[str], None],
    only: Callable[[int], bool] | None = None,
) -> Ended:
    """Collect these shards, until done or asked to stop (see `Interruptible`)."""

    async def main() -> Ended:
        with Units(place, load(place)) as units:
            return await collect(place, campaign, units, shards, backend, stop=_asked_to_stop, progress=progress, only=only)

    return asyncio.run(main())


def _asked_to_stop() -> str | None:
    return "asked to stop" if stop_requested() else None


def _prehosted(campaign: Campaign) -> list[str]:
    return [str(url) for url in ((campaign.policy.url,) if campaign.policy.url else campaign.policy.urls)]


def key_of(variable: str | None) -> str | None:
    """An API key, from the variable that holds it."""
    if variable is None:
        return None
    if not os.environ.get(variable):
        raise UserError(f"the variable {variable} is to hold an API key, and is not set here", f"export {variable} where you start")
    return os.environ[variable]


def make_backend(campaign: Campaign, place: Place, urls: Sequence[str], sandbox: str | None) -> Backend:
    """Who makes the rollouts of this campaign."""
    bases = [base_url(url) for url in urls]
    key = key_of(campaign.policy.key_env)
    if campaign.gym:
        from seatrial.rollouts.gym.backend import GymBackend

        return GymBackend(campaign, place, bases, key, sandbox)
    from seatrial.rollouts.direct.backend import DirectBackend

    return DirectBackend(campaign, bases, make_verifiers(campaign, bases), key)


def base_url(url: str) -> str:
    """Base of the OpenAI interface: a server in the job is known by host and port alone."""
    bare = url.rstrip("/")
    return bare if bare.endswith("/v1") or bare.count("/") > 2 else f"{bare}/v1"


def make_verifiers(campaign: Campaign, urls: Sequence[str]) -> Mapping[str, Verifier]:
    """The verifier of each dataset; datasets that say the same share one."""
    from seatrial.rollouts.verify import make_verifier

    made: dict[str, Verifier] = {}
    verifiers: dict[str, Verifier] = {}
    for dataset in campaign.datasets:
        verify = campaign.verifier_of(dataset)
        key = verify.model_dump_json() + (dataset.answer or "")
        made[key] = verifiers[dataset.name] = made.get(key) or make_verifier(verify, campaign.sandbox, Path.cwd(), None)
    return verifiers
