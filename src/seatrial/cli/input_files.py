"""Jobs and campaigns in TOML files. Errors name the file, the table and the key, and the known keys for an unknown one.

- `[[jobs]]` tables have the keys of `Job`; `[[jobs.servers]]` tables describe model servers, which become components, or URLs where
  they run already.
- campaign.toml with flags on top, or flags alone, becomes a `Campaign`.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, TypeAdapter, ValidationError

from seatrial.core.errors import UserError
from seatrial.core.files import read_text
from seatrial.core.guarded import BadValue, parse_toml
from seatrial.core.jobs import After, Batch, Component, Job, Ready
from seatrial.core.records import replace
from seatrial.evidence.redact import Redactor
from seatrial.runtime.servers import Server, components, prehosted

if TYPE_CHECKING:
    from seatrial.rollouts.campaign import Campaign

_WORDS = {
    "tuple_type": "a list is meant",
    "list_type": "a list is meant",
    "model_type": "a table is meant",
    "dict_type": "a table is meant",
}
_EXAMPLES = {"mounts": '"/source:/target"', "name": '"small-letters-and-digits"', "time": '"4:00:00"', "url": '"https://host/v1"'}


def read_toml(file: Path) -> dict[str, Any]:
    """The file as data, or a UserError that names file and line."""
    try:
        return parse_toml(read_text(file))
    except BadValue as error:
        raise UserError(f"{file}: {error}", "correct the file") from error


def place_of(data: Any, path: tuple[int | str, ...]) -> str:
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


def message_of(error: Any) -> str:
    """pydantic's error in words of a TOML file."""
    if error["type"] in ("extra_forbidden", "missing"):
        return "unknown key" if error["type"] == "extra_forbidden" else "is missing"
    if error["type"] in _WORDS:
        return f"{_WORDS[error['type']]} (got {error['input']!r})"
    if error["type"] == "string_pattern_mismatch":
        keys = [word for word in error["loc"] if word in _EXAMPLES]
        example = f"; an example is {_EXAMPLES[keys[-1]]}" if keys else f" (it must match {error['ctx']['pattern']})"
        return f"{error['input']!r} cannot stand here{example}"
    got = "" if error["type"] == "value_error" else f" (got {error['input']!r})"
    return str(error["msg"]).removeprefix("Value error, ") + got


def fix_of(error: Any, tables: Mapping[str, type[BaseModel]], whole: type[BaseModel], page: str) -> str:
    """Known keys of the table for an unknown one, else where to read on; `tables` by the names of keys that hold them."""
    if error["type"] != "extra_forbidden":
        named = [word for word in error["loc"] if isinstance(word, str)]
        return f"correct {named[-1]}; {page} lists the keys" if named else f"correct the file; {page} shows how"
    outer = [word for word in error["loc"][:-1] if word in tables]
    known = list(tables[outer[-1]].model_fields if outer else whole.model_fields)
    close = difflib.get_close_matches(str(error["loc"][-1]), known, n=1)
    return f"did you mean {close[0]}?" if close else f"known keys: {', '.join(known)}"


def read_jobs(file: Path, gpus_per_node: int, here: Path) -> Batch:
    """The jobs of a file, for nodes with so many GPUs. Components without a container work in `here` unless they say otherwise."""
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
    from seatrial.rollouts.campaign import secret_in

    key = secret_in(record.model_dump(mode="json", exclude_defaults=True), clear=Redactor(os.environ).value)
    if key is not None:
        message = f"{where}: {key} holds a secret, and job scripts are stored and read by everybody"
        raise UserError(message, "export it where you submit: it is passed on; name its variable in place of its value")


def _placed(batch: Batch, here: Path) -> Batch:
    """The batch with its working directory in it: it must not depend on where it is submitted again."""
    jobs = []
    for job in batch.jobs:
        parts = [
            item if item.workdir or item.container or item.image else replace(item, workdir=str(here.absolute())) for item in job.components
        ]
        jobs.append(replace(job, components=tuple(parts)))
    return replace(batch, jobs=tuple(jobs))


def _expand(job: dict[str, Any], gpus_per_node: int) -> None:
    """Put components and URLs in the place of the descriptions of servers."""
    servers = TypeAdapter(list[Server]).validate_python(job["servers"])
    made = [item.model_dump() for server in servers for item in components(server, gpus_per_node)]
    job["components"] = [*made, *job.get("components", ())]
    job["servers"] = prehosted(servers)


def _fix(error: Any) -> str:
    if error["type"] == "extra_forbidden" and error["loc"][-1] == "time":
        return "the time limit of a job is minutes = N; time belongs into the profile"
    tables: dict[str, type[BaseModel]] = {"ready": Ready, "components": Component, "servers": Server, "after": After, "jobs": Job}
    return fix_of(error, tables, Batch, "docs/slurm.md")


_RIVALS = {"work.repeats": ("seeds", "repeats"), "work.seeds": ("repeats", "repeats"), "verifier": (None, "verifier")}
"""What gives way to a flag: a key beside it, and a key of each dataset."""


def read_campaign(
    file: Path | None,
    flags: Mapping[str, Any],
    settings: Sequence[str] = (),
    stored: Mapping[str, Any] | None = None,
    stored_in: Path | None = None,
) -> Campaign:
    """The campaign of a file, of flags (dotted keys; None is unsaid), or of both: flags win. Paths in it become absolute.

    `stored` are the settings of a campaign that was started, instead of a file; errors name the file that they are `stored_in`.
    """
    from seatrial.rollouts.campaign import Campaign

    data = read_toml(file) if file else dict(stored or {})
    for key, value in [*flags.items(), *map(_setting, settings)]:
        if value is not None:
            _clear_rivals(data, key)
            _put(data, key, value)
    if not data.get("datasets"):
        if stored_in:
            raise UserError(f"{stored_in}: names no datasets", "the file was edited; restore it")
        raise UserError("nothing to collect: no campaign file, and no --input", "name a campaign.toml, or say --input FILE.jsonl --url URL")
    _make_absolute(data, file.parent if file else Path.cwd())
    data.setdefault("name", "rollouts")
    try:
        return Campaign.model_validate(data)
    except ValidationError as error:
        # A key that nobody knows explains why another one is missing.
        first = min(error.errors(), key=lambda item: item["type"] != "extra_forbidden")
        where = ": ".join(filter(None, (str(file or stored_in or ""), place_of(data, first["loc"]) if first["loc"] else "")))
        # The policy's server has no name but "server", which the place has said.
        shown = {**first, "input": "…"} if "key_env" in first["loc"] else first
        message = Redactor(os.environ).text(message_of(shown).removeprefix("server server: "))
        raise UserError(": ".join(filter(None, (where, message))), _campaign_fix(first, file)) from error


def _setting(text: str) -> tuple[str, Any]:
    """`KEY=VALUE`, the value as in TOML; what is no TOML is a text."""
    key, separator, value = text.partition("=")
    if not separator or not key.strip():
        raise UserError(f"--set {text}: KEY=VALUE is meant", "write --set sampling.temperature=0.7")
    try:
        return key.strip(), parse_toml(f"value = {value}")["value"]
    except BadValue:
        return key.strip(), value


def _clear_rivals(data: dict[str, Any], key: str) -> None:
    beside, in_datasets = _RIVALS.get(key, (None, None))
    if beside is not None and isinstance(work := data.get("work"), dict):
        work.pop(beside, None)
    for dataset in data.get("datasets") or () if in_datasets is not None else ():
        if isinstance(dataset, dict):
            dataset.pop(in_datasets, None)


def _put(data: dict[str, Any], key: str, value: Any) -> None:
    *tables, last = key.split(".")
    for name in tables:
        data = data.setdefault(name, {})
        if not isinstance(data, dict):
            raise UserError(f"{key}: {name} is no table", "a key of one dataset is set in the file")
    data[last] = value


def _make_absolute(data: dict[str, Any], base: Path) -> None:
    """Relative paths start at the file; jobs run elsewhere."""
    for dataset in data["datasets"] if isinstance(data["datasets"], list) else ():
        if isinstance(dataset, dict) and isinstance(dataset.get("path"), str):
            dataset["path"] = str((base / dataset["path"]).absolute())
    verifiers = data.get("verifiers")
    for verify in verifiers.values() if isinstance(verifiers, dict) else ():
        function = verify.get("function") if isinstance(verify, dict) else None
        if isinstance(function, str) and ".py:" in function:
            verify["function"] = str((base / function).absolute())


def _campaign_fix(error: Any, file: Path | None) -> str:
    """Known keys, or where to read on; without a file the flag that is missing."""
    from seatrial.rollouts import campaign

    if file is None and error["type"] == "missing" and error["loc"] == ("policy",):
        return "say --url http://host:8000/v1, or name a campaign file"
    if file is None and not error["loc"] and "verifier" in str(error["msg"]):
        return "say --verifier"
    tables: dict[str, type[BaseModel]] = {
        "datasets": campaign.Dataset,
        "work": campaign.Work,
        "policy": campaign.Policy,
        "server": Server,
        "requests": campaign.Requests,
        "failures": campaign.Failures,
        "gym": campaign.Gym,
        "verifiers": campaign.Verify,
        "sandbox": campaign.SandboxLimits,
        "collector": campaign.Collector,
    }
    return fix_of(error, tables, campaign.Campaign, "docs/rollouts.md")
