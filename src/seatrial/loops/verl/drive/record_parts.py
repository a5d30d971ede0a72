"""Where the parts of a batch record lie, and the part that the reward worker writes. Standard library only."""

from __future__ import annotations

import os
from pathlib import Path

from seatrial.probes import facts

VARIABLE = "SEATRIAL_RECORD"
"""Names the directory of the parts; without it nothing is recorded."""
PARTS = "parts"
REWARDS = "rewards.jsonl"


def directory() -> Path | None:
    """Where the parts go; None when nothing is recorded."""
    place = os.environ.get(VARIABLE)
    return Path(place) if place else None


def rewarded(row: int, text: str, reward: float) -> None:
    """One call of the reward function."""
    place = directory()
    if place is not None:
        place.mkdir(parents=True, exist_ok=True)
        facts.append(place / REWARDS, {"row": row, "text": text, "reward": reward})
