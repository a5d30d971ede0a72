"""Events of a trial as it runs. The conductor sends them; the command line shows them as it likes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from seatrial.model.record import BitComparison, Finding, LevelResult, Plan, SideResult, Trial


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
    """One result of the preflight."""

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
    """A level has its verdict."""

    result: LevelResult


@dataclass(frozen=True, slots=True)
class SideRunning:
    """Tests that go before the levels are running."""

    name: str
    seconds: float
    line: str = ""


@dataclass(frozen=True, slots=True)
class SideJudged:
    """Tests that go before the levels have their verdict."""

    result: SideResult


@dataclass(frozen=True, slots=True)
class Compared:
    """A level was compared with its base, bit by bit."""

    level: int
    base: str
    found: BitComparison


@dataclass(frozen=True, slots=True)
class Ended:
    """The trial has its verdict."""

    trial: Trial
    directory: str


Event = Planned | Stage | Found | SideRunning | SideJudged | Running | Judged | Compared | Ended
Listener = Callable[[Event], None]
