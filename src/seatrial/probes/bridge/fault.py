"""A seeded bug: what it is, who can have it, and what must notice it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """One bug."""

    text: str
    model: str
    """A family that can have it."""
    rungs: tuple[str, ...]
    """Those that must fail by it."""
    named: str
    """What the failure must name: a part of a tensor's, mapping's or module's name."""
    apply: Callable[[], None]
