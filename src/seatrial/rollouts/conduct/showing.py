"""`--dry-run`: what a campaign would launch, and what Slurm says of it."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from seatrial.launch.slurm import submit
from seatrial.launch.slurm.render import render_batch
from seatrial.model.job import Batch
from seatrial.model.words import counted
from seatrial.rollouts.campaign import Campaign
from seatrial.rollouts.conduct import rounds
from seatrial.rollouts.conduct.conductor import Where
from seatrial.rollouts.manifest import Manifest
from seatrial.rollouts.place import Place
from seatrial.rollouts.units import Units


@dataclass(frozen=True, slots=True)
class Shown:
    """A dry run."""

    text: str
    answers: tuple[tuple[str, str], ...] = ()
    """What Slurm says of each job: ok, or why it would refuse it."""


def describe(draft: Place, root: Path, campaign: Campaign, manifest: Manifest, where: Where) -> Shown:
    """The first round of a campaign that would lie in `root`; its inputs lie in `draft`."""
    with Units(draft, manifest) as units:
        sizes = {shard: sum(1 for _ in units.of_shard(shard)) for shard in range(manifest.shards)}
    planned = rounds.plan(draft, sizes, max(sizes.values()), where.name, campaign.work.parallel, where.most_tasks)
    batch = rounds.batch_of(Place(root), campaign, planned, where.gpus_per_node, merge=where.profile is not None)
    lines = [*_summary(campaign, manifest, sizes), ""]
    if where.profile is None:
        return Shown("\n".join(lines + _commands(batch, len(planned.tasks))))
    scripts = render_batch(
        batch, where.profile, root / "rounds" / "0001", {job.name: f"seatrial-{job.name}-00000000" for job in batch.jobs}
    )
    for name, script in scripts.items():
        lines += [f"# ===== {name} =====", script]
    return Shown("\n".join(lines), submit.validate(batch, where.profile, draft.root / "rounds" / "0001"))


def _summary(campaign: Campaign, manifest: Manifest, sizes: dict[int, int]) -> list[str]:
    work, requests = campaign.work, campaign.requests
    minutes = max(sizes.values()) * work.rollout_s / requests.concurrency / 60
    each = f"about {minutes:.0f} min" if minutes >= 1 else "less than a minute"
    guess = f"{each} each, if a rollout takes {work.rollout_s:g} s and {requests.concurrency} are open"
    lines = [f"campaign {manifest.name}: {counted(manifest.rows, 'row')}, {counted(manifest.units, 'rollout')}"]
    for file in manifest.files:
        labels = manifest.repeats[file.dataset]
        lines.append(f"  {file.dataset}: {counted(file.rows, 'row')} x {len(labels)} ({file.path})")
    spread = f"{min(sizes.values())} to {max(sizes.values())}" if len(set(sizes.values())) > 1 else str(max(sizes.values()))
    of_each = f"{spread} rollouts" if max(sizes.values()) > 1 else "1 rollout"
    lines.append(f"  {counted(manifest.shards, 'shard')} of {of_each}, dealt by {manifest.deal}; {guess}")
    return lines


def _commands(batch: Batch, tasks: int) -> list[str]:
    (job,) = batch.jobs
    count = f"{tasks} tasks at a time" if tasks > 1 else "1 task"
    lines = [f"{count} on this machine, with all shards between them; {{index}} is the number of a task, which runs:"]
    return lines + [f"  {item.name} x {item.replicas}: {shlex.join(item.command)}" for item in job.components]
