"""probe.json of a conformance probe: what was asked, what each rung of each family showed, and what that is worth."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from seatrial.model.record import SCHEMA_VERSION, CheckResult, OwnVerdict, Record, RepoState
from seatrial.model.verdict import Boundary, Verdict
from seatrial.proving.bridge.own_tests import OwnTests


class Asked(Record):
    """What the probe was to show."""

    models: tuple[str, ...]
    """Families, or directories."""
    rungs: tuple[str, ...]
    models_named: bool = True
    """False when every family was taken: one that is known not to run here does not count then."""
    rungs_named: bool = False
    """True when rungs were asked for by name: one that cannot run here counts then."""
    device: str = "cpu"
    engine: str = "transformers"
    fault: str | None = None


class RungResult(Record):
    """One rung of one family."""

    rung: str
    title: str
    verdict: Verdict
    reason: str
    counted: bool = True
    """False: it does not apply, or it is known not to run here and nobody asked for it by name."""
    applicable: bool = True
    """Whether the question that the rung asks can be asked of this family."""
    boundary: Boundary | None = None
    figure: str = ""
    """The measured value, in a few letters."""
    checks: tuple[CheckResult, ...] = ()
    limitations: tuple[str, ...] = ()
    seconds: float = 0
    cpu_seconds: float = 0


class FamilyResult(Record):
    """All rungs of one family or checkpoint."""

    model: str
    verdict: Verdict
    reason: str
    counted: bool = True
    boundary: Boundary | None = None
    rungs: tuple[RungResult, ...] = ()


class ShimUse(Record):
    """One stand-in that took part, or was dropped because it is not needed."""

    id: str
    stands_for: str
    reason: str
    state: Literal["used", "dropped"]
    note: str = ""


class Judged(Record):
    """What the facts prove."""

    verdict: Verdict
    reason: str
    boundary: Boundary | None = None
    own: OwnVerdict | None = None
    """The verdict of the ladder by itself, where the comparison with the base replaced it."""
    families: tuple[FamilyResult, ...] = ()
    own_tests: OwnTests | None = None
    shims: tuple[ShimUse, ...] = ()
    versions: dict[str, str] = Field(default_factory=dict)
    """Of Python, torch, transformers, Megatron-Core and Megatron-Bridge, each with the file it was imported from."""
    limitations: tuple[str, ...] = ()
    follow_ups: tuple[str, ...] = ()


class Probe(Record):
    """probe.json."""

    schema_version: int = Field(default=SCHEMA_VERSION)
    probe: Literal["bridge"] = "bridge"
    seatrial: str
    created: str
    """UTC, ISO 8601."""
    command: tuple[str, ...]
    """How Seatrial was called, redacted."""
    asked: Asked
    changes: tuple[RepoState, ...] = ()
    python: str | None = None
    seconds: float = 0
    judged: Judged
