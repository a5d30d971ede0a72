"""The JSON Schemas of a campaign's files and of `status --json`, generated from the types that write them.

The files under `schemas/` are shipped for consumers, such as the viewer; a test holds them equal to what is generated here.
"""

from __future__ import annotations

from pathlib import Path

from seatrial.core.records import Record
from seatrial.report.build import schema_text
from seatrial.rollouts.campaign import Campaign
from seatrial.rollouts.campaign_dir import ShardState, Stop
from seatrial.rollouts.campaign_rounds import Round
from seatrial.rollouts.campaign_runner import Status
from seatrial.rollouts.manifest import Manifest
from seatrial.rollouts.results.campaign_merge import MergeResult
from seatrial.rollouts.results.profile_data import Summary

DIRECTORY = Path(__file__).parent / "schemas"
_KINDS: dict[str, type[Record]] = {
    "manifest": Manifest,
    "merge": MergeResult,
    "plan": Round,
    "profile": Summary,
    "state": ShardState,
    "status": Status,
    "stop": Stop,
}


def schemas() -> dict[str, str]:
    """The text of every shipped schema, by file name."""
    texts = {name: schema_text(f"rollouts-{name}", kind) for name, kind in _KINDS.items()}
    # What a server's kind has no use for is not said in campaign.json.
    texts["campaign"] = schema_text("rollouts-campaign", Campaign, "validation")
    return {f"{name}.schema.json": text for name, text in texts.items()}
