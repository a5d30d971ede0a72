"""What runs in a task of a round: the shards of that task, collected from the backend that the campaign names.

The exit code says the rest: 0 when nothing of these shards is owed any more, 99 when something is (the message says why).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from seatrial.launch.interrupt import stop_requested
from seatrial.model.errors import UserError
from seatrial.rollouts.campaign import Campaign
from seatrial.rollouts.collect.engine import Ended, collect
from seatrial.rollouts.conduct import rounds
from seatrial.rollouts.keys import key_of
from seatrial.rollouts.manifest import check_functions, load, load_campaign
from seatrial.rollouts.place import Place
from seatrial.rollouts.units import Units
from seatrial.rollouts.work import Backend, Verifier


def collect_task(place: Place, number: int, task: int, urls: Sequence[str], sandbox: str | None, progress: Callable[[str], None]) -> Ended:
    """Collect what the shards of a task owe; `urls` are the policy's servers in this job, `sandbox` the service beside it."""
    planned = rounds.load(place, number)
    if not 0 <= task < len(planned.tasks):
        raise UserError(f"round {number} has {len(planned.tasks)} tasks, and no task {task}", "seatrial rollouts resume plans anew")
    campaign = load_campaign(place)
    check_functions(load(place), campaign, Path.cwd())
    logs = rounds.directory(place, number) / "gym" / str(task)
    shards = planned.tasks[task]
    backend = make_backend(campaign, place, shards, [*urls] or _prehosted(campaign), sandbox, logs, progress)
    return run(place, campaign, shards, backend, progress)


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


def make_backend(
    campaign: Campaign,
    place: Place,
    shards: Sequence[int],
    urls: Sequence[str],
    sandbox: str | None,
    logs: Path,
    progress: Callable[[str], None],
) -> Backend:
    """Who makes the rollouts of these shards; `logs` is for servers that it starts."""
    bases = [base_url(url) for url in urls]
    key = key_of(campaign.policy.key_env)
    if campaign.gym:
        from seatrial.rollouts.gym.backend import GymBackend
        from seatrial.rollouts.gym.streaming import GymCollector

        agents = agents_of(place, shards)
        kind = GymBackend if campaign.gym.driver == "agents" else GymCollector
        return kind(campaign, bases, key, logs, agents=agents, sandbox=_host_and_port(sandbox), place=place, progress=progress)
    from seatrial.rollouts.direct.backend import DirectBackend

    return DirectBackend(campaign, bases, make_verifiers(campaign, bases), key, place=place, progress=progress)


def agents_of(place: Place, shards: Sequence[int]) -> set[str]:
    """Every agent that a row of these shards names."""
    with Units(place, load(place)) as units:
        rows = {units.row_of(number) for shard in shards for number in units.of_shard(shard)}
        return {agent for index in sorted(rows) if (agent := units.row(index).agent)}


def _host_and_port(url: str | None) -> tuple[str, int] | None:
    if url is None:
        return None
    parts = urlsplit(url)
    return parts.hostname or "127.0.0.1", parts.port or 80


def base_url(url: str) -> str:
    """Base of the OpenAI interface: a server in the job is known by host and port alone."""
    bare = url.rstrip("/")
    return bare if bare.endswith("/v1") or bare.count("/") > 2 else f"{bare}/v1"


def make_verifiers(campaign: Campaign, urls: Sequence[str]) -> Mapping[str, Verifier]:
    """The verifier of each dataset; datasets that say the same share one. A judge without a URL is the policy itself."""
    from seatrial.rollouts.verify import make_verifier

    datasets = {dataset.name: dataset for dataset in campaign.datasets}
    made: dict[str, Verifier] = {}
    verifiers: dict[str, Verifier] = {}
    for dataset in campaign.datasets:
        verify = campaign.verifier_of(dataset)
        if verify.kind == "judge" and verify.url is None and urls:
            policy = campaign.policy
            verify = verify.model_copy(update={"url": urls[0], "model": verify.model or policy.model, "key_env": policy.key_env})
        key = verify.model_dump_json()
        if key not in made:
            made[key] = make_verifier(verify, campaign.sandbox, Path.cwd(), None, datasets)
        verifiers[dataset.name] = made[key]
    return verifiers
