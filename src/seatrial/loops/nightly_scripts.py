"""Test scripts of a loop, without running them: by `describe_nightly` and `describe_functional` of its `nightly.py`, if it has one."""

from __future__ import annotations

import importlib
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from seatrial.loops import HERE


@dataclass(frozen=True, slots=True, kw_only=True)
class Nightly(ABC):
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Asserted:
    """One metrics file that a script leaves, and what it asserts of it."""

    metrics: Path | None
    """None when its place cannot be told without running the script."""
    written: str
    """The place as the script has it."""
    checks: tuple[str, ...] = ()
    """Expressions of the check language. One with a `$` in it was not expanded, and nobody can evaluate it."""
    steps: int | None = None
    """The last step that must be in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Functional:
    """What one functional script asks for, and what it must leave to have passed."""

    loop: str
    root: Path
    """Of the checkout: where the script is run."""
    output: Path
    """The directory that the script makes, or empties, for its results."""
    logs: Path
    """Where its trainer logs; metrics are made from what is there."""
    asserted: tuple[Asserted, ...]
    unread: tuple[str, ...] = ()
    """What may assert more, as written: nobody could read it without running the script, so it cannot have been met."""
    gpus: int | None = None
    """Over all nodes; None when the script does not say."""
    minutes: int | None = None
    step_tags: tuple[str, ...] = ()
    """Metrics that have a point at every training step, the first one that is there counts."""
    skips: tuple[re.Pattern[str], ...] = ()
    """Lines by which a script says that it did nothing."""
    table: str = ""
    """A line of the log that shows that the script looked at its metrics itself."""


def describe_nightly(script: str, text: str) -> Nightly | None:
    """The script at this path with this text, by the first loop that knows it. One that is damaged is a UserError."""
    return next((found for module in _readers() if (found := module.describe_nightly(script, text)) is not None), None)


def describe_functional(script: Path, arguments: tuple[str, ...]) -> Functional | None:
    """The script of a checkout, called with these arguments, by the first loop that knows it."""
    return next((found for module in _readers() if (found := module.describe_functional(script, arguments)) is not None), None)


def _readers() -> Iterator[Any]:
    for place in sorted(HERE.glob("*/nightly.py")):
        yield importlib.import_module(f"seatrial.loops.{place.parent.name}.nightly")
