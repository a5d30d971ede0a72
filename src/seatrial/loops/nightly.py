"""Nightly test scripts: what a loop knows of them without running them.

A loop that has such scripts has a `nightly.py` with `describe(script, text)`, which gives None for what is not one of its scripts.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from seatrial.loops import HERE


@dataclass(frozen=True, slots=True, kw_only=True)
class Nightly(ABC):
    """What one script asks for."""

    script: str
    """Its path in the tree."""
    nodes: int
    gpus_per_node: int
    minutes: int
    """Of the whole test, also where it is cut into several jobs."""
    steps: int
    """Training steps that it must reach."""
    metrics: str
    """Where it leaves its metrics; relative to the tree."""
    variables: Mapping[str, str]
    """What keeps two runs of it apart; with the placeholders of a bisect."""

    @abstractmethod
    def incomplete(self, tree: Path, log: Path) -> str | None:
        """Why an exit code of 0 does not count, or None when the test really ran to its end."""


def describe(script: str, text: str) -> Nightly | None:
    """The script at this path with this text, by the first loop that knows it. One that is damaged is a UserError."""
    for place in sorted(HERE.glob("*/nightly.py")):
        found: Nightly | None = importlib.import_module(f"seatrial.loops.{place.parent.name}.nightly").describe(script, text)
        if found is not None:
            return found
    return None
