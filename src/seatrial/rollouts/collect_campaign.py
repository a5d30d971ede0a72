"""A campaign from Python, on this machine: read it, collect what it asks for, merge and profile."""

from __future__ import annotations

import importlib.util
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from seatrial.core.errors import UserError
from seatrial.core.files import read_text, write_text
from seatrial.core.guarded import BadValue, parse_toml
from seatrial.evidence.redact import Redactor
from seatrial.rollouts.campaign import Campaign
from seatrial.rollouts.campaign_dir import CampaignDir
from seatrial.rollouts.campaign_preflight import campaign_warnings, check_campaign
from seatrial.rollouts.campaign_rounds import check_root
from seatrial.rollouts.campaign_runner import CampaignRunner, RunTarget, Status, campaign_lock
from seatrial.rollouts.manifest import Units, create_campaign, load_manifest
from seatrial.rollouts.results.campaign_export import write_skills_layout
from seatrial.rollouts.results.campaign_merge import merge_campaign
from seatrial.rollouts.results.profile_build import make_profile
from seatrial.rollouts.results.profile_writer import write_profile
from seatrial.runtime.interrupt import Interruptible

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class CampaignResult:
    """How far a campaign came, and its directory."""

    status: Status
    directory: Path

    @property
    def complete(self) -> bool:
        """Whether nothing is left to collect and at least one rollout worked; only then there are merged/ and profile/ to use."""
        return not self.status.owed and self.status.ok > 0


def _silent(_: str) -> None:
    """Nobody listens."""


def collect(
    campaign: str | Path | Mapping[str, Any] | None = None,
    *,
    input: str | Path | Sequence[str | Path] = (),
    prompt: str | None = None,
    answer: str | None = None,
    url: str | None = None,
    model: str | None = None,
    verifier: str | None = None,
    repeats: int | None = None,
    seeds: str | None = None,
    shards: int | None = None,
    out: str | Path | None = None,
    tell: Tell = _silent,
) -> CampaignResult:
    """Start a campaign here, and collect, merge and profile it (`seatrial rollouts start`).

    Takes a campaign.toml, or its content as a mapping, or keyword arguments alone. `tell` is called with lines on the progress.
    Interrupted, it raises a KeyboardInterrupt; `seatrial rollouts resume` goes on.
    """
    files = [input] if isinstance(input, str | Path) else list(input)
    flags = {"prompt": prompt, "answer": answer, "url": url, "model": model, "verifier": verifier, "repeats": repeats, "seeds": seeds}
    said = [name for name, value in {"input": files or None, **flags, "shards": shards}.items() if value is not None]
    if campaign is not None and said:
        raise UserError(f"collect: {said[0]} is given beside a campaign", "write it into the campaign, or leave the campaign out")
    if campaign is None and not files:
        raise UserError("nothing to collect: no campaign, and no input", "name a campaign.toml, or say input=FILE.jsonl, url=URL")
    if repeats is not None and seeds is not None:
        raise UserError("repeats and seeds exclude each other: repeats=4 is seeds='0-3'", "leave one of them out")
    columns = {"prompt": prompt, "answer": answer}
    data: dict[str, Any] = {
        "datasets": [_without_none({"name": _label(Path(file).stem), "path": str(file), **columns}) for file in files],
        "policy": _without_none({"url": url, "model": model}),
        "work": _without_none({"repeats": repeats, "seeds": seeds, "shards": shards}),
        **_without_none({"verifier": verifier}),
    }
    found = read_campaign(data if campaign is None else campaign)
    root = Path(out or Path("campaigns") / f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{found.name}").absolute()
    check_root(root)
    check_campaign(found, here=True)
    for warning in campaign_warnings(found):
        tell(f"warning: {warning}")
    place = CampaignDir(root)
    create_campaign(found, Path.cwd(), place, tell)
    write_text(root / ".gitignore", "*\n")  # it may lie in a checkout under test, which must not look changed
    with campaign_lock(place, tell), Interruptible():
        status = CampaignRunner(place, RunTarget(), tell, lambda _: None).carry()
        if not status.owed:
            _finish(place, found, tell)
    return CampaignResult(status, root)


def _finish(place: CampaignDir, campaign: Campaign, tell: Tell) -> None:
    """Merge and profile a campaign that is complete."""
    manifest = load_manifest(place)
    with Units(place, manifest) as units:
        merge_campaign(place, manifest, units, progress=tell)
    if campaign.skills_layout:
        write_skills_layout(place)
    try:
        write_profile(make_profile(place, progress=tell), place.profile)
    except UserError as error:
        if importlib.util.find_spec("pyarrow") is not None:
            raise
        tell(f"{error.message}; {error.fix}")  # every other form of the profile was written


def read_campaign(source: str | Path | Mapping[str, Any]) -> Campaign:
    """A campaign from its file or its content. Relative paths start at the file, or here; errors name the key."""
    file = None if isinstance(source, Mapping) else Path(source)
    try:
        data = dict(source) if isinstance(source, Mapping) else parse_toml(read_text(Path(source)))
    except BadValue as error:
        raise UserError(f"{file}: {error}", "correct the file") from error
    base = file.parent if file else Path.cwd()
    data.setdefault("name", "rollouts")
    try:
        read = Campaign.model_validate(data)
        stored = read.model_dump(mode="json", exclude_unset=True)
        for dataset in stored["datasets"]:
            dataset["path"] = str((base / dataset["path"]).absolute())
        for verify in stored.get("verifiers", {}).values():
            if ".py:" in (verify.get("function") or ""):
                verify["function"] = str((base / verify["function"]).absolute())
        return Campaign.model_validate(stored)
    except ValidationError as error:
        # A key that nobody knows explains why another one is missing.
        first = min(error.errors(), key=lambda item: item["type"] != "extra_forbidden")
        where = ".".join(map(str, first["loc"]))
        text = "unknown key" if first["type"] == "extra_forbidden" else first["msg"].removeprefix("Value error, ")
        message = Redactor(os.environ).text(": ".join(filter(None, (str(file or ""), where, text))))
        raise UserError(message, f"correct {where or 'the campaign'}; docs/rollouts.md lists the keys") from error


def _without_none(found: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in found.items() if value is not None}


def _label(text: str) -> str:
    """A file's name as that of a dataset."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-._")[:80] or "rows"
