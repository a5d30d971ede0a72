"""Rounds of jobs of a campaign: how shards are dealt to tasks, the batch that is launched, and what runs in a task.

- Each launch is a batch of its own, which collects what is pending at that moment. The first round on a cluster has a task per shard;
  later ones pack shards into tasks of about equal size. On this machine all shards are dealt to as many tasks as run at a time.
- `collect_task` collects the shards of one task from the backend that the campaign names. Exit code 0: nothing of them is pending.
  99: something is; the message says why.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from urllib.parse import urlsplit

from seatrial.core.errors import UserError
from seatrial.core.files import read_model, write_json
from seatrial.core.jobs import PLACEHOLDER, After, Batch, Component, Job, Ready
from seatrial.core.records import Record, replace
from seatrial.rollouts.campaign import Campaign, api_key_of
from seatrial.rollouts.campaign_dir import CampaignDir
from seatrial.rollouts.collect_engine import CollectEnd, collect
from seatrial.rollouts.manifest import Units, check_functions, load_campaign, load_manifest
from seatrial.rollouts.rollout_record import Backend, Verifier
from seatrial.runtime.environments import mounts_of
from seatrial.runtime.interrupt import stop_requested
from seatrial.runtime.jobdir import BATCH
from seatrial.runtime.servers import components

LOCAL = "local"
COLLECT, MERGE = "collect", "merge"
SANDBOX = "sandbox"
_PLAN = "plan.json"


class Round(Record):
    """rounds/<number>/plan.json."""

    number: int
    made: int
    """Seconds since 1970."""
    on: str
    """`local`, or `slurm:PROFILE`."""
    owed: int
    tasks: tuple[tuple[int, ...], ...]
    """Shards of each task."""


def list_rounds(place: CampaignDir) -> tuple[Round, ...]:
    """All rounds so far, in order."""
    found = [file for file in place.rounds.glob(f"*/{_PLAN}") if file.parent.name.isdecimal()]
    plans = sorted(found, key=lambda file: int(file.parent.name))
    return tuple(read_model(file, Round) for file in plans)


def round_dir(place: CampaignDir, number: int) -> Path:
    """The batch of a round."""
    return place.rounds / f"{number:04d}"


def is_launched(place: CampaignDir, number: int) -> bool:
    """Whether its batch was stored: before that nothing of it can run."""
    return (round_dir(place, number) / BATCH).is_file()


def plan_round(
    place: CampaignDir, owed: Mapping[int, int], largest: int, on: str, parallel: int | None = None, most: int | None = None
) -> Round:
    """The next round for shards that owe so many units; `largest` is the size of a full shard, `parallel` as in `[work]`.

    `most` is how many tasks the cluster takes in one array: where shards are more, they are dealt to so many tasks.
    """
    past, most = list_rounds(place), (parallel or 1) if on == LOCAL else most
    tasks = _packed(owed, largest) if past and on != LOCAL else [(shard,) for shard in sorted(owed)]
    if most and len(tasks) > most:
        tasks = [tuple(chain.from_iterable(tasks[first::most])) for first in range(most)]
    number = past[-1].number + 1 if past else 1
    return Round(number=number, made=int(time.time()), on=on, owed=sum(owed.values()), tasks=tuple(tasks))


def save_round(place: CampaignDir, planned: Round) -> None:
    """Write the plan, which the tasks read."""
    write_json(round_dir(place, planned.number) / _PLAN, planned)


def load_round(place: CampaignDir, number: int) -> Round:
    """A stored plan."""
    return read_model(round_dir(place, number) / _PLAN, Round)


def _packed(owed: Mapping[int, int], largest: int) -> list[tuple[int, ...]]:
    """Shards in order, together while they owe no more than one full shard does."""
    tasks: list[list[int]] = []
    filled = 0
    for shard, count in sorted(owed.items()):
        if not tasks or filled + count > largest:
            tasks.append([])
            filled = 0
        tasks[-1].append(shard)
        filled += count
    return [tuple(task) for task in tasks]


def check_root(root: Path) -> None:
    """A UserError for a campaign directory whose name cannot stand in a job."""
    if PLACEHOLDER.search(str(root)):
        raise UserError(f"{root}: words in braces have a meaning in a job", "choose another directory with --out")


def batch_of(place: CampaignDir, campaign: Campaign, planned: Round, gpus_per_node: int, *, merge: bool) -> Batch:
    """The jobs of a round: the collecting tasks with their servers, and, when asked for, a merge after them."""
    root = place.root.absolute()
    check_root(root)
    services: list[Component] = []
    client = ["collect", str(root), "--round", str(planned.number), "--task", "{index}"]
    if campaign.policy.server:
        server = replace(campaign.policy.server, name="policy")
        services += components(server, gpus_per_node)
        client += ["--urls", "{url:policy}" if server.route else "{urls:policy}"]
    if campaign.sandbox_service:
        command = _seatrial("sandbox", "--host", "{bind}", "--port", "{port}", "--campaign", str(root))
        services.append(Component(name=SANDBOX, command=command, port=True, ready=Ready(path="/health", deadline_s=120)))
        client += ["--sandbox", "{url:sandbox}"]
    jobs = [
        Job(
            name=COLLECT,
            components=(*services, _client(place, campaign, client)),
            array=len(planned.tasks),
            parallel=campaign.work.parallel,
            minutes=campaign.collector.minutes if planned.on != LOCAL else None,  # of a shard's job, and here is none
        )
    ]
    if merge:
        words = ("finish", str(root))
        jobs.append(Job(name=MERGE, components=(_client(place, campaign, words),), after=(After(job=COLLECT, when="any"),)))
    return Batch(jobs=tuple(jobs))


def _seatrial(*words: str) -> tuple[str, ...]:
    return (sys.executable, "-P", "-m", "seatrial.cli.main", "rollouts", *words)


def _client(place: CampaignDir, campaign: Campaign, words: Sequence[str]) -> Component:
    about = campaign.collector
    boxed = about.container or about.image
    wanted = [Path(text) for text in _paths(campaign)]
    return Component(
        name="client",
        role="client",
        command=_seatrial(*words),
        cpus=about.cpus,
        memory_mb=about.memory_mb,
        container=about.container,
        image=about.image,
        mounts=(*(mounts_of(place.root.absolute(), wanted) if boxed else ()), *about.mounts),
        environment=campaign.environment,
    )


def _paths(campaign: Campaign) -> list[str]:
    """What a collector reads besides the campaign's directory."""
    found = [verify.function.rpartition(":")[0] for verify in campaign.verifiers.values() if verify.function]
    if campaign.gym:
        found += [text for text in (campaign.gym.directory, campaign.gym.python) if text]
    return found


def collect_task(
    place: CampaignDir, number: int, task: int, urls: Sequence[str], sandbox: str | None, progress: Callable[[str], None]
) -> CollectEnd:
    """Collect what the shards of a task owe; `urls` are the policy's servers in this job, `sandbox` the service beside it."""
    planned = load_round(place, number)
    if not 0 <= task < len(planned.tasks):
        raise UserError(f"round {number} has {len(planned.tasks)} tasks, and no task {task}", "seatrial rollouts resume plans anew")
    campaign = load_campaign(place)
    check_functions(load_manifest(place), campaign, Path.cwd())
    logs = round_dir(place, number) / "gym" / str(task)
    shards = planned.tasks[task]
    backend = make_backend(campaign, place, shards, [*urls] or _prehosted(campaign), sandbox, logs, progress)
    return run_collector(place, campaign, shards, backend, progress)


def run_collector(
    place: CampaignDir,
    campaign: Campaign,
    shards: Sequence[int],
    backend: Backend,
    progress: Callable[[str], None],
    only: Callable[[int], bool] | None = None,
) -> CollectEnd:
    """Collect these shards, until done or asked to stop (see `Interruptible`)."""

    async def main() -> CollectEnd:
        with Units(place, load_manifest(place)) as units:
            return await collect(place, campaign, units, shards, backend, stop=_stop_reason, progress=progress, only=only)

    return asyncio.run(main())


def _stop_reason() -> str | None:
    return "asked to stop" if stop_requested() else None


def _prehosted(campaign: Campaign) -> list[str]:
    return [str(url) for url in ((campaign.policy.url,) if campaign.policy.url else campaign.policy.urls)]


def make_backend(
    campaign: Campaign,
    place: CampaignDir,
    shards: Sequence[int],
    urls: Sequence[str],
    sandbox: str | None,
    logs: Path,
    progress: Callable[[str], None],
) -> Backend:
    """Who makes the rollouts of these shards; `logs` is for servers that it starts."""
    bases = [base_url(url) for url in urls]
    key = api_key_of(campaign.policy.key_env)
    if campaign.gym:
        from seatrial.rollouts.backends.gym_backend import GymBackend, GymCollector

        agents = agents_of(place, shards)
        kind = GymBackend if campaign.gym.driver == "agents" else GymCollector
        return kind(campaign, bases, key, logs, agents=agents, sandbox=_host_and_port(sandbox), place=place, progress=progress)
    from seatrial.rollouts.backends.direct_backend import DirectBackend

    return DirectBackend(campaign, bases, make_verifiers(campaign, bases), key, place=place, progress=progress)


def agents_of(place: CampaignDir, shards: Sequence[int]) -> set[str]:
    """Every agent that a row of these shards names."""
    with Units(place, load_manifest(place)) as units:
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
    from seatrial.rollouts.verifiers import make_verifier

    datasets = {dataset.name: dataset for dataset in campaign.datasets}
    made: dict[str, Verifier] = {}
    verifiers: dict[str, Verifier] = {}
    for dataset in campaign.datasets:
        verify = campaign.verifier_of(dataset)
        if verify.kind == "judge" and verify.url is None and urls:
            policy = campaign.policy
            verify = replace(verify, url=urls[0], model=verify.model or policy.model, key_env=policy.key_env)
        key = verify.model_dump_json()
        if key not in made:
            made[key] = make_verifier(verify, campaign.sandbox, Path.cwd(), None, datasets)
        verifiers[dataset.name] = made[key]
    return verifiers
