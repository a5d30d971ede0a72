"""Where jobs go: `[slurm.NAME]` in seatrial.toml says how one cluster, or one partition of it, is used.

Seatrial runs where sbatch is: there is no ssh in it.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, StringConstraints, model_validator

from seatrial.model.job import Count, Mount, Variables
from seatrial.model.record import Record

Option = Annotated[str, StringConstraints(pattern=r"^--?[A-Za-z][^\n]*$")]
Word = Annotated[str, StringConstraints(pattern=r"^[^\s'\"\\$`;&|<>]+$")]


_SET_BY_US = {
    "sbatch": (
        *("--array", "-a", "--job-name", "-J", "--output", "-o", "--error", "-e", "--open-mode", "--comment", "--signal", "--requeue"),
        *("--no-requeue", "--dependency", "-d", "--kill-on-invalid-dep", "--nodes", "-N", "--ntasks", "-n", "--ntasks-per-node"),
        *("--cpus-per-task", "-c", "--gres", "--gpus", "-G", "--gpus-per-node", "--gpus-per-task", "--mem", "--time", "-t", "--account"),
        *("-A", "--partition", "-p", "--qos", "-q", "--exclusive", "--parsable", "--test-only", "--wrap", "--wait", "-W", "--export"),
        *("--chdir", "-D", "--container-image", "--container-mounts"),
    ),
    "srun": (
        *("--nodelist", "-w", "--nodes", "-N", "--ntasks", "-n", "--ntasks-per-node", "--cpus-per-task", "-c", "--exact", "--overlap"),
        *("--gres", "--gpus", "-G", "--gpus-per-node", "--gpus-per-task", "--mem", "--het-group", "--kill-on-bad-exit", "-K", "--input"),
        *("-i", "--output", "-o", "--error", "-e", "--chdir", "-D", "--container-image", "--container-mounts"),
    ),
}
"""Options that follow from the job or from other keys: a second value would make Slurm do what nobody follows."""


class Profile(Record):
    """One way to use a cluster."""

    account: Word | None = Field(default=None, description="account that is charged")
    partition: Word | None = Field(default=None, description="partition; none takes the cluster's default")
    qos: Word | None = Field(default=None, description="quality of service")
    time: Annotated[str, StringConstraints(pattern=r"^(\d+-)?\d{1,2}:\d{2}:\d{2}$")] = Field(
        default="1:00:00", description="time limit, [days-]hours:minutes:seconds, unless a job has its own"
    )
    nodes: Count = Field(default=1, description="nodes of a trial")
    gpus_per_node: Annotated[int, Field(ge=0)] = Field(default=8, description="GPUs that one node has")
    gpus: Annotated[int, Field(ge=0)] | None = Field(default=None, description="GPUs per node of a trial; none takes what its levels need")
    cpus: Count = Field(default=4, description="CPUs of a trial on each node")
    memory_mb: Count | None = Field(default=None, description="memory of a job on each node; none takes the cluster's default")
    gres: Word = Field(default="gpu", description="name of the GPU resource, such as gpu or gpu:h100")
    exclusive: bool = Field(default=False, description="take whole nodes")
    containers: dict[str, str] = Field(default_factory=dict, description="images by name")
    container: str | None = Field(default=None, description="container of a trial, by its name in containers")
    image: str | None = Field(default=None, description="container of a trial, as a literal image")
    mounts: tuple[Mount, ...] = Field(default=(), description="mounts of every container, source:target[:flags]")
    environment: Variables = Field(default_factory=dict, description="variables of every component")
    prolog: tuple[str, ...] = Field(default=(), description="shell lines that run first on the first node, such as module load")
    setup: tuple[str, ...] = Field(default=(), description="shell lines that run in the client's own step and container, right before it")
    sbatch: tuple[Option, ...] = Field(default=(), description="more options of sbatch, such as --reservation=x")
    srun: tuple[Option, ...] = Field(default=(), description="more options of every srun, such as --mpi=pmix")
    ray: Literal["none", "symmetric-run", "ray.sub"] = Field(default="none", description="how Ray is started for a trial")
    ray_sub: str | None = Field(default=None, description="path of the loop's own ray.sub")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.container and self.image:
            raise ValueError("container (a name of containers) and image (a literal) exclude each other")
        if self.container and self.container not in self.containers:
            known = ", ".join(self.containers) or "none; name them in containers"
            raise ValueError(f"container: no image is called {self.container!r}; known: {known}; a literal one belongs into image")
        for key, options in (("sbatch", self.sbatch), ("srun", self.srun)):
            for option in options:
                _refuse_ours(key, option)
        return self


def _refuse_ours(key: str, option: str) -> None:
    """A ValueError for an option that Seatrial sets; Slurm takes long ones abbreviated, and values right behind short ones."""
    long = option.startswith("--")
    flag = option.partition("=")[0].split()[0] if long else option[:2]
    for ours in _SET_BY_US[key]:
        if flag == ours or (long and len(flag) > 4 and ours.startswith(flag)):
            raise ValueError(f"{key}: {option} is set by Seatrial ({ours}), from the job or from another key of the profile; leave it out")
