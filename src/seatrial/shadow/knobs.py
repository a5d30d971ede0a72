"""A setting of a loop, and whether a recomputed run proved it: configured, in force, exercised."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

STEP = ("ratio", "kl", "mask", "loss", "gradient", "clip", "advantage", "reference", "logprob")
"""The stages that are proven by the gradient."""


@dataclass(frozen=True)
class Knob:
    """One setting that a step passes through."""

    stage: str
    default: Any
    neutral: tuple[Any, ...] = ()
    """Values without an effect."""
    exercised_by: str = ""
    """The shadow's counter that must not be zero for the setting to have had an effect."""
    only: str = ""
    """What alone reads it, in the loop's own words: a loss type, an advantage estimator. Nothing: each."""

    def status(self, value: Any, found: Mapping[str, Any], exercised: Mapping[str, int], read: bool = True) -> str:
        """What the findings on a run say of the setting; `read` is false where nothing of the run reads it."""
        stage = next(entry for entry in found["stages"] if entry["stage"] == self.stage)
        if stage["unproven"]:
            return "not proven"
        if not read:
            return "not exercised"
        if any(value == item and type(value) is type(item) for item in self.neutral):
            return "neutral"
        if self.exercised_by and not exercised[self.exercised_by]:
            return "not exercised"
        return "proven" if stage["compared"] and found["divergence"] is None else "not proven"
