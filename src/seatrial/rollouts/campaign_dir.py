"""The directory of a campaign: its paths, and the state files through which its processes see each other.

- state-NNNN-<token>.json: progress of one attempt of a shard, rewritten every two seconds, for status, viewer and failure budgets. Counts
  are the shard's, earlier attempts included, except `failed_now`. A killed attempt never writes `ended`: the age of its file shows it.
  State files decide nothing that matters: the journal says which units are done.
- stop.json: why the campaign stopped itself. The first writer wins; `resume` puts it aside.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import orjson
from pydantic import Field

from seatrial.core.errors import UserError
from seatrial.core.files import read_model, write_error, write_json
from seatrial.core.guarded import real_path
from seatrial.core.records import Record


class CampaignDir:
    """Paths below the directory of a campaign."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.campaign = root / "campaign.json"
        """The resolved campaign.toml."""
        self.manifest = root / "manifest.json"
        """Written last when a campaign starts: without it there is none."""
        self.inputs = root / "inputs.jsonl"
        self.index = root / "inputs.index"
        """Where each row starts in `inputs`, and where the last one ends."""
        self.shards = root / "shards"
        self.rounds = root / "rounds"
        """A directory per launch: plan.json, and the jobs."""
        self.stop = root / "stop.json"
        self.model = root / "model.json"
        """The policy's model, as the first collector found it."""
        self.merged = root / "merged"
        """rollouts.jsonl, failures.jsonl, merge.json."""
        self.profile = root / "profile"

    def shard(self, number: int) -> Path:
        """attempt-*.jsonl, lease.json, state-*.json."""
        return self.shards / f"{number:05d}"


def write_once(path: Path, value: Record) -> None:
    """Write a small file whole, unless it is there already: the first writer wins."""
    temporary = path.with_name(f".{path.stem}-{os.getpid()}-{os.urandom(4).hex()}")
    try:
        temporary.write_bytes(orjson.dumps(value.model_dump()))
        os.link(temporary, path)  # unlike a rename it never replaces
    except FileExistsError:
        pass
    except OSError as error:
        raise write_error(path, error) from error
    finally:
        temporary.unlink(missing_ok=True)


_NAME = re.compile(r"state-(\d{4,})-[0-9a-f]+\.json")


class ShardState(Record):
    """Where an attempt stands."""

    shard: int
    attempt: int
    token: str
    host: str
    pid: int
    slurm: Mapping[str, str] = Field(default_factory=dict)
    started: float
    """Seconds since 1970, as all times here."""
    updated: float
    ended: str | None = None
    """How the attempt ended: done, stopped, budget, servers, fenced, error."""
    units: int
    owed: int
    ok: int
    failed: int
    """For good."""
    failed_now: int = 0
    """Given up by this attempt, owed again."""
    kinds: Mapping[str, int] = Field(default_factory=dict)
    """Units that failed in this attempt, by class of failure."""
    collected: int = 0
    """Rollouts of this attempt."""
    reward_sum: float = 0.0
    """Over `ok`."""
    open: int = 0
    """Requests of the whole collector."""
    concurrency: int = 0
    """What the collector lets itself open now."""
    rate: float = 0.0
    """Settled units per second, lately."""
    message: str = ""


def write_state(place: CampaignDir, state: ShardState) -> float:
    """Replace the state of an attempt; gives the time at which that was, by the file system's clock."""
    path = place.shard(state.shard) / f"state-{state.attempt:04d}-{state.token}.json"
    write_json(path, state)
    return path.stat().st_mtime


def newest_states(place: CampaignDir, shards: Iterable[int]) -> dict[int, tuple[ShardState, float]]:
    """The state of each shard's newest attempt, with the time at which its file was written by the file system's own clock."""
    found: dict[int, tuple[ShardState, float]] = {}
    for shard in shards:
        directory = place.shard(shard)
        try:
            names = [match for path in directory.iterdir() if (match := _NAME.fullmatch(path.name))]
            if names:
                file = directory / max(names, key=lambda match: int(match[1]))[0]
                found[shard] = (read_model(file, ShardState), file.stat().st_mtime)
        except (FileNotFoundError, UserError):
            continue  # none yet, or of another version: a picture with a gap
    return found


class Stop(Record):
    """Why no more is collected."""

    reason: str
    by: str
    at: int
    accept: str = ""
    """The setting with which a campaign that stopped for its failures goes on."""


def read_stop_file(place: CampaignDir) -> Stop | None:
    return read_model(place.stop, Stop) if place.stop.is_file() else None


def write_stop_file(place: CampaignDir, reason: str, by: str, accept: str = "") -> None:
    """Stop the campaign; the first reason stays."""
    write_once(place.stop, Stop(reason=reason, by=by, at=int(time.time()), accept=accept))


def set_stop_file_aside(place: CampaignDir) -> None:
    """Put the reason aside, so that a resumed campaign may collect again."""
    if place.stop.is_file():
        place.stop.replace(place.root / f"stop-{int(time.time())}.json")


def spare_campaigns(out: Path, own: Path | None = None) -> None:
    """Refuse a path in any campaign's directory, however it is spelled; `own` is the folder there that such results have."""
    target = real_path(out)
    if own is not None and target.is_relative_to(real_path(own)):
        return
    for folder in (target, *target.parents):
        if CampaignDir(folder).manifest.is_file() and CampaignDir(folder).index.is_file():
            raise UserError(f"{out}: lies in the directory of a campaign, {folder}", "write to another place")
