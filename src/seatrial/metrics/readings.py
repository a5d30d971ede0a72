"""What a reader found in one file (`Reading`), and several readings merged into one `Metrics`.

- Points stand in the order in which they were written. Files are added in the order in which they were written: the last writer of a
  step wins.
- A step that was written twice with different values is an `Overlap`.
- `number` is the one place that says what counts as a number.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, field
from itertools import pairwise

from seatrial.core.guarded import STEP_DIGITS, as_float, parse_not_finite
from seatrial.core.series import Damage, Metrics, Overlap, Scalar, Series


@dataclass(slots=True)
class Points:
    """The points of one tag as written."""

    steps: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)


@dataclass(slots=True)
class FileReading:
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


class Merger:
    """Collects readings; `metrics` gives the result."""

    def __init__(self, prefix: str = "") -> None:
        self._prefix = prefix
        self._series: dict[str, dict[int, float]] = {}
        self._scalars: dict[str, Scalar] = {}
        self._overlaps: dict[str, set[int]] = {}
        self._damage: list[Damage] = []
        self._words: dict[str, Damage] = {}
        self._sources: list[str] = []
        self._restarts: dict[str, set[int]] = {}
        self._original: dict[str, set[int]] = {}

    def add(self, reading: FileReading, source: str, original: bool = False) -> None:
        """Add one file behind those added before; an `original` is no copy of another, so no two of them hold one step of a run."""
        self._sources.append(source)
        self._damage.extend(reading.damage)
        for name, words in reading.words.items():
            self._words.setdefault(self._prefix + name, words)
        for name, points in reading.points.items():
            tag = self._prefix + name
            again = set(_again(points.steps))
            if original:
                known = self._original.setdefault(tag, set())
                again |= known.intersection(points.steps)
                known.update(points.steps)
            if again:
                self._restarts.setdefault(tag, set()).update(again)
            self._add_points(tag, points)
        for name, value in reading.scalars.items():
            tag = self._prefix + name
            if tag in self._scalars and not _same_scalar(self._scalars[tag], value):
                self._overlaps.setdefault(tag, set())
            self._scalars[tag] = value

    def _add_points(self, tag: str, points: Points) -> None:
        table = self._series.get(tag)
        if table is None:
            table = self._series[tag] = dict(zip(points.steps, points.values, strict=True))
            if len(table) == len(points.steps):
                return
            table.clear()  # a step occurs twice in the file: go through it point by point
        for step, value in zip(points.steps, points.values, strict=True):
            known = table.get(step)
            if known is None:
                table[step] = value
            elif not same(known, value):
                self._overlaps.setdefault(tag, set()).add(step)
                if not math.isfinite(known):
                    what = f"the value {known} was written over by {value}"
                    self._damage.append(Damage(self._sources[-1], f"{tag}, step {step}", 1, what))
                table[step] = value
            elif known == as_float32(known):
                table[step] = value

    def metrics(self) -> Metrics:
        """Everything added so far."""
        for tag in self._scalars.keys() & self._series.keys():
            what = "one file gives a single value and another a series; only the series is kept"
            self._damage.append(Damage(", ".join(self._sources), f"tag {tag!r}", 1, what))
            del self._scalars[tag]
        return Metrics(
            series={
                tag: Series(tag, steps := tuple(sorted(table)), tuple([table[at] for at in steps])) for tag, table in self._series.items()
            },
            scalars=self._scalars,
            damage=tuple(self._damage),
            words=self._words,
            overlaps=tuple(Overlap(tag, tuple(sorted(steps))) for tag, steps in sorted(self._overlaps.items())),
            sources=tuple(self._sources),
            restarts=tuple(Overlap(tag, tuple(sorted(steps))) for tag, steps in sorted(self._restarts.items())),
        )


def _again(steps: list[int]) -> list[int]:
    """Steps that do not go on from the one before. A table that is sorted by the text of its steps is sorted."""
    back = [after for before, after in pairwise(steps) if after <= before]
    return [] if back and len(set(steps)) == len(steps) and steps == sorted(steps, key=str) else back


def _series(tag: str, table: dict[int, float]) -> Series:
    steps = sorted(table)
    return Series(tag, tuple(steps), tuple([table[step] for step in steps]))


def same(one: float, other: float) -> bool:
    """Whether two values are one number, exactly or after rounding one of them to a 32-bit float."""
    if one == other or (math.isnan(one) and math.isnan(other)):
        return True
    return as_float32(one) == other or one == as_float32(other)


def as_float32(value: float) -> float:
    """`value` as a 32-bit float holds it; beyond its range that is infinite."""
    try:
        return float(struct.unpack("<f", struct.pack("<f", value))[0])
    except OverflowError:
        return math.copysign(math.inf, value)


def _same_scalar(one: Scalar, other: Scalar) -> bool:
    if isinstance(one, int | float) and isinstance(other, int | float):
        return same(float(one), float(other))
    return one == other
