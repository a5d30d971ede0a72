"""What this machine has and cannot do: checked before anything of a batch is started.

- GPUs are those that CUDA_VISIBLE_DEVICES names, else the device files; simultaneous units have their own.
- What only a cluster can do is refused by name, never left out silently.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from seatrial.model.errors import BlockedError, UserError
from seatrial.model.job import Component, Job
from seatrial.model.verdict import Boundary

VISIBLE = "CUDA_VISIBLE_DEVICES"


def gpus_here(environment: Mapping[str, str] = os.environ, devices: Path = Path("/dev")) -> tuple[str, ...]:
    """The GPUs that may be used, as CUDA_VISIBLE_DEVICES calls them."""
    if VISIBLE not in environment:
        found = (re.fullmatch(r"nvidia([0-9]+)", path.name) for path in devices.glob("nvidia*"))
        return tuple(str(number) for number in sorted(int(match[1]) for match in found if match))
    named: list[str] = []
    for word in environment[VISIBLE].split(","):
        if word.strip() in ("", "-1"):  # CUDA hides what comes after an invalid one
            break
        named.append(word.strip())
    return tuple(named)


def gpus_of(job: Job) -> int:
    """GPUs that one unit needs."""
    return sum(item.gpus * item.replicas for item in job.components)


def slots(job: Job, here: tuple[str, ...]) -> list[tuple[str, ...]]:
    """The GPUs of each unit that may run at the same time. Raises a BlockedError when not even one has enough."""
    needed, most = gpus_of(job), job.parallel or 1
    if needed > len(here):
        raise BlockedError(
            Boundary.ENVIRONMENT,
            f"job {job.name} needs {needed} GPUs, and there are {len(here)} on this machine"
            + (f" ({VISIBLE}={os.environ[VISIBLE]})" if VISIBLE in os.environ else ""),
            "run it on a machine or a cluster that has them, or ask for fewer",
        )
    units = min(most, len(here) // needed) if needed else most
    return [here[number * needed : (number + 1) * needed] for number in range(units)]


def refuse_what_needs_a_cluster(job: Job) -> None:
    """Raise a UserError for what this machine cannot honour."""
    for item in job.components:
        _refuse(job, item)
    if job.after_ids:
        raise UserError(
            f"job {job.name}: after_ids = {', '.join(job.after_ids)}: Slurm jobs are not known here",
            "submit it to the cluster, or leave out after_ids once they have ended well",
        )


def _refuse(job: Job, item: Component) -> None:
    where = f"job {job.name}, component {item.name}"
    if item.container or item.image:
        key = "container" if item.container else "image"
        fix = f"submit it to Slurm (seatrial ... --on slurm:PROFILE), or leave out {key} if the programs are installed here"
        raise UserError(f"{where}: {key} = {item.container or item.image}: containers are not run on this machine", fix)
    if item.nodes > 1:
        raise UserError(f"{where}: nodes = {item.nodes}: this is one machine", "submit it to Slurm, or set nodes = 1")
