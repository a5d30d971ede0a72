"""Reading a batch record: rows in order, tensors when they are asked for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from seatrial.instruments.batch_record import ROWS, TENSORS


@dataclass(frozen=True)
class Event:
    """One row of a record."""

    kind: str
    step: int
    values: dict[str, Any]
    path: Path | None

    def tensors(self) -> dict[str, Any]:
        """All tensors of this row."""
        from safetensors.torch import load_file

        return load_file(self.path) if self.path else {}


@dataclass(frozen=True)
class Moment:
    """The same event on every rank, rank 0 first; what only rank 0 writes stands alone."""

    kind: str
    step: int
    ranks: tuple[Event, ...]

    def first(self) -> Event:
        """That of rank 0."""
        return self.ranks[0]


def moments(directory: Path, world: int) -> Iterator[Moment]:
    """The records of all ranks, side by side; ValueError where they do not go together."""
    others = [events(directory / f"rank{rank}") for rank in range(1, world)]
    for event in events(directory):
        together = [event]
        for rank, stream in enumerate(others if event.kind != "logged" else (), 1):
            other = next(stream, None)
            if other is None or (other.kind, other.step) != (event.kind, event.step):
                got = f"{other.kind} of step {other.step}" if other else "nothing more"
                raise ValueError(f"rank 0 recorded {event.kind} of step {event.step}, rank {rank} {got}")
            together.append(other)
        yield Moment(event.kind, event.step, tuple(together))


def events(directory: Path) -> Iterator[Event]:
    """Every row of the record below `directory`; a torn row raises ValueError with its line."""
    with (directory / ROWS).open(encoding="utf-8") as stream:
        for number, line in enumerate(stream, 1):
            try:
                row = json.loads(line)
                name = row.get("tensors")
                yield Event(row["event"], int(row["step"]), _numbers(row["values"]), directory / TENSORS / name if name else None)
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ValueError(f"{directory / ROWS}, line {number}: not a row of a record: {error}") from error


def _numbers(value: Any) -> Any:
    """Values of a row, with the numbers that JSON has no word for (see `facts.plain`)."""
    if isinstance(value, dict):
        return {key: _numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_numbers(item) for item in value]
    return float(value) if value in ("NaN", "Infinity", "-Infinity") else value
