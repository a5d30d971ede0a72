"""A known bug that a loop can inject into itself, to show that a trial catches it."""

from __future__ import annotations

from typing import NamedTuple


class Fault(NamedTuple):
    """One entry of a loop's table of faults."""

    text: str
    """What it does."""
    levels: tuple[int, ...]
    """The levels that are to catch it."""
    stage: str = ""
    """The stage of the step proof that names it at the first of these levels; empty: another check catches it."""
