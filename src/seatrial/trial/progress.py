"""Events of a running trial. The runner sends them; the command line shows them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from seatrial.core.guarded import parse_json
from seatrial.core.records import BitComparison, Finding, LevelResult, Plan, SideResult, Trial


@dataclass(frozen=True, slots=True)
class Planned:
    """The run directory exists and the plan is stored."""

    directory: str
    plan: Plan


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage begins: evidence, environment, preflight, report."""

    name: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Found:
    finding: Finding


@dataclass(frozen=True, slots=True)
class Running:
    """A level is running: which process, how far, how good."""

    level: int
    title: str
    phase: str
    seconds: float
    step: int | None = None
    steps: int | None = None
    reward: float | None = None
    line: str = ""


@dataclass(frozen=True, slots=True)
class Judged:
    result: LevelResult


@dataclass(frozen=True, slots=True)
class SideRunning:
    """Tests that go before the levels are running."""

    name: str
    seconds: float
    line: str = ""


@dataclass(frozen=True, slots=True)
class SideJudged:
    result: SideResult


@dataclass(frozen=True, slots=True)
class Compared:
    level: int
    base: str
    found: BitComparison


@dataclass(frozen=True, slots=True)
class Ended:
    trial: Trial
    directory: str


Event = Planned | Stage | Found | SideRunning | SideJudged | Running | Judged | Compared | Ended
Listener = Callable[[Event], None]


TAIL = 8192


def newest(path: Path) -> tuple[int | None, float | None]:
    """The newest step and reward in a metrics.jsonl, from its last whole rows; None while there is none."""
    try:
        with path.open("rb") as stream:
            stream.seek(max(0, path.stat().st_size - TAIL))
            rows = stream.read().split(b"\n")[:-1]
    except OSError:
        return None, None
    for row in reversed(rows):
        try:
            values = parse_json(row)
        except ValueError:
            break  # the first row may be cut: nothing newer was found
        if not isinstance(values, dict):
            break
        for tag, value in values.items():
            if tag.endswith("/reward") and isinstance(value, (int, float)):
                return values.get("step"), float(value)
    return None, None
