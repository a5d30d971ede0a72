"""campaign.toml with flags on top, or flags alone, as a Campaign. Errors name the file, the table and the key."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from seatrial.cli.tables import fix_of, message_of, place_of, read_toml
from seatrial.model.guarded import BadValue, parse_toml

if TYPE_CHECKING:
    from pydantic import BaseModel

    from seatrial.rollouts.campaign import Campaign


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
    from pydantic import ValidationError

    from seatrial.evidence.redact import Redactor
    from seatrial.model.errors import UserError
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
        raise UserError(": ".join(filter(None, (where, message))), _fix(first, file)) from error


def _setting(text: str) -> tuple[str, Any]:
    """`KEY=VALUE`, the value as in TOML; what is no TOML is a text."""
    from seatrial.model.errors import UserError

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
    from seatrial.model.errors import UserError

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


def _fix(error: Any, file: Path | None) -> str:
    """Known keys, or where to read on; without a file the flag that is missing."""
    from seatrial.launch.servers import Server
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
