"""Rounds: each launch of a campaign is a batch of its own, which collects what is owed at that moment.

- The first round on a cluster has one task per shard. A later one has tasks of about the same size, each with several shards: the
  rest of a campaign is spread thin over many shards, and a server per shard would mostly start and stop.
- On this machine there are as many tasks as run at a time, and all shards are dealt to them: servers start once.
- A round that waits or runs is followed, never doubled.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path

from seatrial.files import read_model, write_json
from seatrial.launch.jobdir import BATCH
from seatrial.launch.mounts import mounts_of
from seatrial.launch.servers import components
from seatrial.model.errors import UserError
from seatrial.model.job import PLACEHOLDER, After, Batch, Component, Job, Ready
from seatrial.model.record import Record
from seatrial.rollouts.campaign import Campaign
from seatrial.rollouts.place import Place

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


def rounds(place: Place) -> tuple[Round, ...]:
    """All rounds so far, in order."""
    found = [file for file in place.rounds.glob(f"*/{_PLAN}") if file.parent.name.isdecimal()]
    plans = sorted(found, key=lambda file: int(file.parent.name))
    return tuple(read_model(file, Round) for file in plans)


def directory(place: Place, number: int) -> Path:
    """The batch of a round."""
    return place.rounds / f"{number:04d}"


def is_launched(place: Place, number: int) -> bool:
    """Whether its batch was stored: before that nothing of it can run."""
    return (directory(place, number) / BATCH).is_file()


def plan(place: Place, owed: Mapping[int, int], largest: int, on: str, parallel: int | None = None, most: int | None = None) -> Round:
    """The next round for shards that owe so many units; `largest` is the size of a full shard, `parallel` as in `[work]`.

    `most` is how many tasks the cluster takes in one array: where shards are more, they are dealt to so many tasks.
    """
    past, most = rounds(place), (parallel or 1) if on == LOCAL else most
    tasks = _packed(owed, largest) if past and on != LOCAL else [(shard,) for shard in sorted(owed)]
    if most and len(tasks) > most:
        tasks = [tuple(chain.from_iterable(tasks[first::most])) for first in range(most)]
    number = past[-1].number + 1 if past else 1
    return Round(number=number, made=int(time.time()), on=on, owed=sum(owed.values()), tasks=tuple(tasks))


def store(place: Place, planned: Round) -> None:
    """Write the plan, which the tasks read."""
    write_json(directory(place, planned.number) / _PLAN, planned)


def load(place: Place, number: int) -> Round:
    """A stored plan."""
    return read_model(directory(place, number) / _PLAN, Round)


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


def batch_of(place: Place, campaign: Campaign, planned: Round, gpus_per_node: int, *, merge: bool) -> Batch:
    """The jobs of a round: the collecting tasks with their servers, and, when asked for, a merge after them."""
    root = place.root.absolute()
    check_root(root)
    services: list[Component] = []
    client = ["collect", str(root), "--round", str(planned.number), "--task", "{index}"]
    if campaign.policy.server:
        server = campaign.policy.server.model_copy(update={"name": "policy"})
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


def _client(place: Place, campaign: Campaign, words: Sequence[str]) -> Component:
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
