"""What a functional run leaves: functional.json, and checks.json and result.json of each script."""

from __future__ import annotations

from typing import Literal

from seatrial.model.record import CheckResult, Diagnosis, Record
from seatrial.model.verdict import Boundary, Verdict

VERSION = 1
Ended = Literal["exited", "deadline", "stalled", "interrupted", "not started"]


class ScriptResult(Record):
    """One script, judged."""

    name: str
    """Of its directory: the script's own name, with a number where two are alike."""
    script: str
    verdict: Verdict
    boundary: Boundary | None = None
    reason: str
    exit_code: int | None = None
    ended: Ended = "exited"
    seconds: float = 0
    steps: int | None = None
    """The last step that it had to reach; None when nobody said."""
    reached: int | None = None
    checks: tuple[CheckResult, ...] = ()
    gpus: int | None = None
    gpu_hours: float | None = None
    """Measured: seconds times GPUs."""
    notes: tuple[str, ...] = ()
    diagnosis: Diagnosis | None = None


class FunctionalRun(Record):
    """All scripts of one call."""

    version: int = VERSION
    id: str
    created: str
    seatrial: str
    verdict: Verdict
    results: tuple[ScriptResult, ...]
