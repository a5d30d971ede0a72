"""Jobs in a TOML file: `[[jobs]]` tables with the keys of model/job.py. Errors name the file, the job and the key.

`[[jobs.servers]]` tables (launch/servers.py) describe model servers; they become components, or URLs where they run already.
"""

from __future__ import annotations

import difflib
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from seatrial.model.job import Batch


def read_jobs(file: Path, gpus_per_node: int, here: Path) -> Batch:
    """The jobs of a file, for nodes with so many GPUs. Components without a container work in `here` unless they say otherwise."""
    from pydantic import ValidationError

    from seatrial.files import read_text
    from seatrial.model.errors import UserError
    from seatrial.model.job import Batch

    try:
        data = tomllib.loads(read_text(file))
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{file}: {error}", "correct the file") from error
    if "jobs" not in data:
        raise UserError(f"{file}: no [[jobs]] in it", 'write [[jobs]] with name = "…", and [[jobs.components]] below it')
    place: tuple[int | str, ...] = ()
    try:
        for number, job in enumerate(data["jobs"] if isinstance(data["jobs"], list) else ()):
            if isinstance(job, dict) and isinstance(job.get("servers"), list):
                place = ("jobs", number, "servers")
                _expand(job, gpus_per_node)
        place = ()
        return _placed(Batch.model_validate(data), here)
    except ValidationError as error:
        first = error.errors()[0]
        where = (*place, *first["loc"])
        raise UserError(f"{file}: {_place(data, where)}: {_message(first)}", _fix({**first, "loc": where})) from error


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


def _place(data: Any, path: tuple[int | str, ...]) -> str:
    """`jobs.collect.components.server.gpus`: tables of a list by their names, where they have one."""
    words = []
    for step in path:
        try:
            data = data[step]
        except (LookupError, TypeError):
            data = None
        named = isinstance(step, int) and isinstance(data, dict) and "name" in data
        words.append(str(data["name"] if named else step))
    return ".".join(words) or "(the file)"


_WORDS = {
    "tuple_type": "a list is meant",
    "list_type": "a list is meant",
    "model_type": "a table is meant",
    "dict_type": "a table is meant",
}
_EXAMPLES = {"mounts": '"/source:/target"', "name": '"small-letters-and-digits"', "time": '"4:00:00"', "url": '"https://host/v1"'}


def _message(error: Any) -> str:
    if error["type"] == "extra_forbidden":
        return "unknown key"
    if error["type"] in _WORDS:
        return f"{_WORDS[error['type']]} (got {error['input']!r})"
    if error["type"] == "string_pattern_mismatch":
        keys = [word for word in error["loc"] if word in _EXAMPLES]
        example = f"; an example is {_EXAMPLES[keys[-1]]}" if keys else f" (it must match {error['ctx']['pattern']})"
        return f"{error['input']!r} cannot stand here{example}"
    got = "" if error["type"] in ("missing", "value_error") else f" (got {error['input']!r})"
    return str(error["msg"]).removeprefix("Value error, ") + got


def _fix(error: Any) -> str:
    """Known keys of the table for an unknown one."""
    from seatrial.launch.servers import Server
    from seatrial.model.job import After, Batch, Component, Job, Ready

    if error["type"] != "extra_forbidden":
        named = [word for word in error["loc"] if isinstance(word, str)]
        return f"correct {named[-1]}; docs/slurm.md has an example of each key" if named else "correct the jobs"
    if error["loc"][-1] == "time":
        return "the time limit of a job is minutes = N; time belongs into the profile"
    tables: dict[str, type[Batch] | type[Job] | type[Component] | type[After] | type[Ready] | type[Server]]
    tables = {"ready": Ready, "components": Component, "servers": Server, "after": After, "jobs": Job}
    outer = [word for word in error["loc"][:-1] if word in tables]
    known = list(tables[outer[-1]].model_fields if outer else Batch.model_fields)
    close = difflib.get_close_matches(str(error["loc"][-1]), known, n=1)
    return f"did you mean {close[0]}?" if close else f"known keys: {', '.join(known)}"
