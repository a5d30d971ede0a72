"""Small campaigns with a journal written by hand, for the tests of profile and select."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from seatrial.rollouts import manifest as manifests
from seatrial.rollouts.campaign import Campaign
from seatrial.rollouts.campaign_dir import CampaignDir
from seatrial.rollouts.manifest import Units
from seatrial.rollouts.rollout_record import Head, encode

Result = Mapping[str, Any] | None
"""Fields of a head; None where the unit is owed."""


def campaign(
    root: Path, datasets: Mapping[str, Sequence[Mapping[str, Any]]], *, repeats: int = 4, shards: int = 2, **more: Any
) -> CampaignDir:
    """A campaign over these rows of each dataset; `more` are further keys of each dataset, by its name."""
    tables = []
    for name, rows in datasets.items():
        path = root / f"{name}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        tables.append({"name": name, "path": str(path), **more.get(name, {})})
    said = {"name": "small", "datasets": tables, "work": {"repeats": repeats, "shards": shards}, "policy": {"url": "http://h/v1"}}
    place = CampaignDir(root / "campaign")
    manifests.create_campaign(Campaign.model_validate({**said, "verifier": "exact"}), root, place)
    return place


def questions(count: int, **more: Any) -> list[dict[str, Any]]:
    """Plain rows."""
    return [{"prompt": f"question {number}", "answer": str(number), **more} for number in range(count)]


def ok(reward: float, answer: str | None = None, **more: Any) -> dict[str, Any]:
    """A rollout."""
    return {"outcome": "ok", "reward": float(reward), "answer": answer, **more}


def failed(kind: str = "timeout", *, final: bool = True) -> dict[str, Any]:
    """A failure."""
    return {"outcome": "failed", "kind": kind, "final": final}


def record(place: CampaignDir, unit: int, result: Mapping[str, Any]) -> bytes:
    """The line of a unit."""
    with Units(place, manifests.load_manifest(place)) as units:
        known = units.unit(unit)
        return encode(Head(unit=unit, task=known.row.id, repeat=known.repeat, seed=known.seed, **result), {"reward": result.get("reward")})


def attempt(place: CampaignDir, shard: int, lines: Iterable[bytes], number: int = 1) -> Path:
    """One attempt's file."""
    path = place.shard(shard) / f"attempt-{number:04d}-00ff.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(lines))
    return path


def collected(place: CampaignDir, tasks: Sequence[Sequence[Result]]) -> CampaignDir:
    """The results of each row, by repetition, in one attempt of each shard."""
    manifest = manifests.load_manifest(place)
    lines: dict[int, list[bytes]] = {}
    with Units(place, manifest) as units:
        for index, results in enumerate(tasks):
            for unit, result in zip(units.units_of_row(index), results, strict=True):
                if result is not None:
                    lines.setdefault(units.shard_of(unit), []).append(record(place, unit, result))
    for shard, found in lines.items():
        attempt(place, shard, found)
    return place
