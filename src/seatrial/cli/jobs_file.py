"""Jobs in a TOML file: `[[jobs]]` tables with the keys of model/job.py. Errors name the file, the job and the key.

`[[jobs.servers]]` tables (launch/servers.py) describe model servers; they become components, or URLs where they run already.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from seatrial.cli.tables import fix_of, message_of, place_of, read_toml

if TYPE_CHECKING:
    from pydantic import BaseModel

    from seatrial.model.job import Batch


def read_jobs(file: Path, gpus_per_node: int, here: Path) -> Batch:
    """The jobs of a file, for nodes with so many GPUs. Components without a container work in `here` unless they say otherwise."""
    from pydantic import ValidationError

    from seatrial.model.errors import UserError
    from seatrial.model.job import Batch

    data = read_toml(file)
    if "jobs" not in data:
        raise UserError(f"{file}: no [[jobs]] in it", 'write [[jobs]] with name = "…", and [[jobs.components]] below it')
    place: tuple[int | str, ...] = ()
    try:
        for number, job in enumerate(data["jobs"] if isinstance(data["jobs"], list) else ()):
            if isinstance(job, dict) and isinstance(job.get("servers"), list):
                place = ("jobs", number, "servers")
                _expand(job, gpus_per_node)
        place = ()
        batch = Batch.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = (*place, *first["loc"])
        raise UserError(f"{file}: {place_of(data, where)}: {message_of(first)}", _fix({**first, "loc": where})) from error
    for job in batch.jobs:
        refuse_secrets(f"{file}: job {job.name}", job)
    return _placed(batch, here)


def refuse_secrets(where: str, record: BaseModel) -> None:
    """A UserError where a value is a secret: scripts and job files are stored, and read by everybody."""
    import os

    from seatrial.evidence.redact import Redactor
    from seatrial.model.errors import UserError
    from seatrial.rollouts.values import secret_in

    key = secret_in(record.model_dump(mode="json", exclude_defaults=True), clear=Redactor(os.environ).value)
    if key is not None:
        message = f"{where}: {key} holds a secret, and job scripts are stored and read by everybody"
        raise UserError(message, "export it where you submit: it is passed on; name its variable in place of its value")


def _placed(batch: Batch, here: Path) -> Batch:
    """The batch with its working directory in it: it must not depend on where it is submitted again."""
    jobs = []
    for job in batch.jobs:
        parts = [
            item if item.workdir or item.container or item.image else item.model_copy(update={"workdir": str(here.absolute())})
            for item in job.components
        ]
        jobs.append(job.model_copy(update={"components": tuple(parts)}))
    return batch.model_copy(update={"jobs": tuple(jobs)})


def _expand(job: dict[str, Any], gpus_per_node: int) -> None:
    """Put components and URLs in the place of the descriptions of servers."""
    from pydantic import TypeAdapter

    from seatrial.launch.servers import Server, components, prehosted

    servers = TypeAdapter(list[Server]).validate_python(job["servers"])
    made = [item.model_dump() for server in servers for item in components(server, gpus_per_node)]
    job["components"] = [*made, *job.get("components", ())]
    job["servers"] = prehosted(servers)


def _fix(error: Any) -> str:
    from seatrial.launch.servers import Server
    from seatrial.model.job import After, Batch, Component, Job, Ready

    if error["type"] == "extra_forbidden" and error["loc"][-1] == "time":
        return "the time limit of a job is minutes = N; time belongs into the profile"
    tables: dict[str, type[BaseModel]] = {"ready": Ready, "components": Component, "servers": Server, "after": After, "jobs": Job}
    return fix_of(error, tables, Batch, "docs/slurm.md")
