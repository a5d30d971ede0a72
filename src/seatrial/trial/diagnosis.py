"""Triage of one log with the knowledge of its loop."""

from __future__ import annotations

from pathlib import Path

from seatrial.model.loop import Loop
from seatrial.model.record import Diagnosis
from seatrial.triage.diagnose import diagnose


def read_diagnosis(loop: Loop, log: Path) -> Diagnosis:
    """What triage concludes from a log of this loop."""
    return diagnose(log, loop.milestones(), loop.signatures())
