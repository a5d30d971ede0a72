"""Starts and finishes campaigns: what `seatrial rollouts start` and `seatrial.collect` share, and the files of the demo.

`write_demo` makes the same files each time, but for the paths that it is given. The server's program is copied: it runs in an
environment of its own, and must find there what it imports of Seatrial, and nothing else that is installed beside it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

import seatrial
from seatrial.core.errors import UserError
from seatrial.core.files import read_text, write_bytes, write_text
from seatrial.core.guarded import BadValue, parse_toml
from seatrial.evidence.redact import Redactor
from seatrial.rollouts import demo_server
from seatrial.rollouts.campaign import Campaign
from seatrial.rollouts.campaign_dir import CampaignDir, spare_campaigns
from seatrial.rollouts.campaign_rounds import campaign_warnings, check_campaign, check_root
from seatrial.rollouts.campaign_runner import CampaignRunner, RunTarget, Status, campaign_lock
from seatrial.rollouts.manifest import Manifest, Units, create_campaign, load_campaign, load_manifest
from seatrial.rollouts.results.campaign_export import write_skills_layout
from seatrial.rollouts.results.campaign_merge import MergeResult, merge_campaign
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
    tell: Tell = lambda _: None,
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
    data: dict[str, Any] = {
        "datasets": dataset_tables(files, prompt, answer),
        "policy": _without_none({"url": url, "model": model}),
        "work": _without_none({"repeats": repeats, "seeds": seeds, "shards": shards}),
        **_without_none({"verifier": verifier}),
    }
    found = read_campaign(data if campaign is None else campaign)
    place = CampaignDir(new_root(out, found.name))
    check_start(found, place, tell, here=True)
    make_campaign(found, place, tell)
    with campaign_lock(place, tell):
        with Interruptible():
            status = CampaignRunner(place, RunTarget(), tell, lambda _: None).run()
        if not status.owed:
            finish_campaign(place, tell)
    return CampaignResult(status, place.root)


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


def dataset_tables(files: Sequence[str | Path], prompt: str | None, answer: str | None) -> list[dict[str, str]]:
    """[[datasets]] for files of rows, each named by its file."""
    names = [re.sub(r"[^A-Za-z0-9._-]+", "-", Path(file).stem).strip("-._")[:80] or "rows" for file in files]
    columns = _without_none({"prompt": prompt, "answer": answer})
    return [{"name": name, "path": str(file), **columns} for name, file in zip(names, files, strict=True)]


def _without_none(found: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in found.items() if value is not None}


def new_root(out: str | Path | None, name: str) -> Path:
    """The directory of a new campaign: `out`, else campaigns/<time>-<name>."""
    return Path(out or Path("campaigns") / f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{name}").absolute()


def check_start(campaign: Campaign, place: CampaignDir, tell: Tell, *, here: bool) -> None:
    """Refuse what would stop every shard, and tell of what is probably a slip; `here`: the collectors run on this machine."""
    check_root(place.root)
    check_campaign(campaign, here=here)
    for warning in campaign_warnings(campaign):
        tell(f"warning: {warning}")


def make_campaign(campaign: Campaign, place: CampaignDir, tell: Tell) -> Manifest:
    """Read and check the rows and make the campaign's directory, from which nothing is collected yet."""
    manifest = create_campaign(campaign, Path.cwd(), place, tell)
    write_text(place.root / ".gitignore", "*\n")  # it may lie in a checkout under test, which must not look changed
    return manifest


def merge(place: CampaignDir, tell: Tell, *, partial: bool = False) -> MergeResult:
    """Merge a campaign and tell how much that was; with the layout of NeMo-Skills where the campaign asks for it."""
    manifest = load_manifest(place)
    with Units(place, manifest) as units, Interruptible():
        merged = merge_campaign(place, manifest, units, partial=partial, progress=tell)
    counts = {"failed for good": merged.failed, "missing": merged.missing, "twice": merged.duplicates, "contradicting": merged.conflicts}
    counts |= {"torn": merged.torn, "foreign": merged.foreign}
    odd = "".join(f", {count} {what}" for what, count in counts.items() if count)
    tell(f"merged {merged.ok} of {merged.expected} rollouts ({100 * merged.coverage:.2f} %){odd}")
    if not manifest.imported and load_campaign(place).skills_layout:
        write_skills_layout(place)
    return merged


def profile(place: CampaignDir, tell: Tell, pass_at: float = 1.0, ks: Sequence[int] | None = None, out: Path | None = None) -> Path:
    """Write the profile of a campaign, complete or not; gives its directory."""
    target = out or place.profile
    spare_campaigns(target, place.profile)
    write_profile(make_profile(place, pass_at=pass_at, ks=ks, progress=tell), target)
    return target


def finish_campaign(place: CampaignDir, tell: Tell) -> None:
    """Merge and profile a campaign that is complete; a BlockedError says what is missing."""
    merge(place, tell)
    try:
        profile(place, tell)
    except UserError as error:
        if importlib.util.find_spec("pyarrow") is not None:
            raise
        # All but one form of the profile was written: no reason to call a complete campaign anything else.
        tell(f"{error.message}; {error.fix}")
    tell(f"profile: {place.profile / 'profile.html'}, profile.md beside it")


_SEED = 20261115
_ROWS = {"sums": 8, "largest": 12}
"""Of each difficulty."""
_PROGRAM = ("__init__.py", "rollouts/__init__.py", "rollouts/demo_server.py")
_CAMPAIGN = """\
# What `seatrial rollouts demo` collects. Change it, and start it yourself: seatrial rollouts start campaign.toml
name = "demo"

[[datasets]]
name = "sums"
path = "sums.jsonl"
verifier = "exact"
tag_columns = ["difficulty"]

[[datasets]]
name = "largest"
path = "largest.jsonl"
verifier = "choice"
tag_columns = ["difficulty"]

[work]
repeats = 8
shards = 2
parallel = 1

[sampling]
temperature = 1.0
max_output_tokens = 8

[requests]
concurrency = 32
timeout_s = 60
dead_s = 30

[policy]
model = "seatrial-demo"

[policy.server]
kind = "command"
command = {command}
environment = {{ PYTHONPATH = {program}, OMP_NUM_THREADS = "1" }}
deadline_s = 300
"""


def write_demo(directory: Path, python: Path, cache: Path) -> Path:
    """Write the demo into `directory`, for an interpreter that has torch and transformers; returns campaign.toml.

    The trained model is kept in `cache`: a second demo starts at once.
    """
    program = directory.absolute() / "program"
    for name in _PROGRAM:
        source = Path(seatrial.__file__).parent / name
        write_bytes(program / "seatrial" / name, source.read_bytes())
    for dataset, makers in demo_server.MAKERS.items():
        draw = random.Random(f"{_SEED} {dataset}")
        rows = [question for make in makers for question in demo_server.different(make, _ROWS[dataset], draw)]
        lines = [json.dumps({"prompt": row.prompt, "answer": row.answer, "difficulty": row.difficulty}) for row in rows]
        write_text(directory / f"{dataset}.jsonl", "\n".join(lines) + "\n")
    command = [str(python.absolute()), "-m", "seatrial.rollouts.demo_server", "--host", "{bind}", "--port", "{port}"]
    command += ["--cache", str(cache.absolute())]
    # A JSON string is a TOML string.
    text = _CAMPAIGN.format(command=json.dumps(command), program=json.dumps(str(program)))
    campaign = directory / "campaign.toml"
    write_text(campaign, text)
    return campaign
