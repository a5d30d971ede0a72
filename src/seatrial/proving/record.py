"""probe.json: what a probe of refits was asked, what it measured and what it concluded. The shipped schema is made from these types."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from seatrial.loops.refits.weights import Wrong
from seatrial.model.record import SCHEMA_VERSION, CheckResult, Record
from seatrial.model.verdict import Boundary, Verdict
from seatrial.probes.refit.header import TRANSPORTS

__all__ = ["TRANSPORTS", "Judged", "MismatchLine", "Probe", "RefitLine", "Wanted", "Wrong"]


class Wanted(Record):
    """What the probe was to show."""

    source: Literal["driver", "attach", "facts"]
    """Our own driver, a server that runs already, or facts that another framework's run left."""
    engine: str = ""
    model: str = ""
    steps: int | None = None
    """Updates of the policy, each with a refit after it; None where only the facts say."""
    transports: tuple[str, ...] = ()
    """Those that must have been used; none are asked for when empty."""
    fault: str | None = None


class RefitLine(Record):
    """One refit, for the table."""

    index: int
    step: int
    version: int
    replica: str
    transport: str
    kind: str | None
    names: int
    bytes: int
    changed: int | None
    elements: int | None
    stale: int
    wrong: int
    methods: dict[str, int]
    refused: str | None


class MismatchLine(Record):
    """token_mult_prob_error of one step; non-finite numbers are marked strings."""

    step: int
    value: float | str
    p50: float | str
    p90: float | str
    p99: float | str
    max_sequence: float | str
    outlier_share: float | str
    tokens: int
    sequences: int


class Judged(Record):
    """What the facts prove."""

    verdict: Verdict
    reason: str
    boundary: Boundary | None = None
    vacuous: bool = False
    checks: tuple[CheckResult, ...] = ()
    wrong: tuple[Wrong, ...] = ()
    refits: tuple[RefitLine, ...] = ()
    mismatch: tuple[MismatchLine, ...] = ()
    limitations: tuple[str, ...] = ()


class Probe(Record):
    """probe.json."""

    schema_version: int = Field(default=SCHEMA_VERSION)
    probe: Literal["refit"] = "refit"
    seatrial: str
    created: str
    """UTC, ISO 8601."""
    command: tuple[str, ...]
    """How Seatrial was called, redacted."""
    wanted: Wanted
    python: str | None = None
    seconds: float = 0
    judged: Judged
