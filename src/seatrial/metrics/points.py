"""What a reader found in one file, before files are merged.

- Points stand in the order in which they were written; a step may occur more than once.
- `number` is the one place that says what counts as a value: NaN and infinities are kept, and null is NaN.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from seatrial.model.guarded import STEP_DIGITS, as_float, parse_not_finite
from seatrial.model.series import Damage, Scalar


@dataclass(slots=True)
class Points:
    """The points of one tag as written."""

    steps: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)


@dataclass(slots=True)
class Reading:
    """The content of one metrics file."""

    points: dict[str, Points] = field(default_factory=dict)
    scalars: dict[str, Scalar] = field(default_factory=dict)
    damage: list[Damage] = field(default_factory=list)
    words: dict[str, Damage] = field(default_factory=dict)
    """Tags of rows that hold text, true or false and never a number."""

    def series(self, tag: str) -> Points:
        """The points of one tag, made empty if it is new."""
        return self.points.setdefault(tag, Points())

    def add(self, tag: str, step: int, value: float) -> None:
        """Append one point."""
        points = self.series(tag)
        points.steps.append(step)
        points.values.append(value)


def number(value: object) -> float | None:
    """A JSON value as number: null, and NaN or infinity in any spelling as text, are non-finite numbers; None for other text, true and
    false, lists and objects."""
    if value is None:
        return math.nan
    if isinstance(value, str):
        return parse_not_finite(value)
    return as_float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def step_number(value: object) -> int | None:
    """A JSON value as step: whole numbers that a run can reach, in either direction, only."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 10**STEP_DIGITS else None
