"""What the judge of a rung is given and gives back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from seatrial.loops.facts import Row
from seatrial.model.record import CheckResult


@dataclass(frozen=True, slots=True)
class Judgement:
    """What the facts of one rung prove."""

    checks: tuple[CheckResult, ...]
    figure: str = ""
    """A few letters for the table of families: `2.1e-07`, `26/26`."""
    limitations: tuple[str, ...] = ()


Judge = Callable[[Sequence[Row], str], Judgement]
"""From the facts of one rung of one model, and the device it ran on (`cpu`, `cuda`). A missing fact is a missed check."""
