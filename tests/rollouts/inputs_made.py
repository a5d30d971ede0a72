"""Small input files and campaigns for the tests of inputs, manifest, units, import and layouts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from seatrial.rollouts.campaign import Campaign
from seatrial.rollouts.campaign_dir import CampaignDir
from seatrial.rollouts.manifest import Manifest, Units, create_campaign, load_manifest
from seatrial.rollouts.results.campaign_merge import MergeResult, merge_campaign


def jsonl(path: Path, rows: Iterable[Any]) -> Path:
    """A file of rows; a text stands for itself."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows), encoding="utf-8")
    return path


def plain(number: int, **more: Any) -> dict[str, Any]:
    """A plain row."""
    return {"prompt": f"What is {number} + 1?", "answer": str(number + 1), **more}


def gym(number: int, **more: Any) -> dict[str, Any]:
    """A row of Gym."""
    return {"responses_create_params": {"input": [{"role": "user", "content": f"Question {number}"}]}, "expected_answer": "A", **more}


def campaign(*datasets: Mapping[str, Any], **tables: Any) -> Campaign:
    """A campaign of datasets, each in NAME.jsonl unless it says a path."""
    listed = [{"path": f"{item['name']}.jsonl", **item} for item in datasets or ({"name": "a"},)]
    scored = {} if "gym" in tables else {"verifier": "exact"}
    return Campaign.model_validate({"name": "tiny", "datasets": listed, "policy": {"url": "http://localhost:1/v1"}, **scored, **tables})


def made(folder: Path, rows: Iterable[Any], **tables: Any) -> tuple[CampaignDir, Manifest]:
    """A campaign directory of one dataset, `a`."""
    jsonl(folder / "a.jsonl", rows)
    place = CampaignDir(folder / "campaign")
    return place, create_campaign(campaign(**tables), folder, place)


def merged(place: CampaignDir, *, partial: bool = False) -> MergeResult:
    """Merge a campaign directory."""
    manifest = load_manifest(place)
    with Units(place, manifest) as units:
        return merge_campaign(place, manifest, units, partial=partial)
