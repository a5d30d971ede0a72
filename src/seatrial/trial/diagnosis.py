"""Triage of one log with the knowledge of its loop.

Triage matches known failures against an exception's own lines. Some are known by where they were raised instead: a
reward function may raise anything, and only the frame that called it says what it was. So where triage knows no
failure, the signatures of the loop are searched in the frames of the first cause.
"""

from __future__ import annotations

import re
from pathlib import Path

from seatrial.model.loop import Loop
from seatrial.model.record import Diagnosis
from seatrial.triage.diagnose import diagnose
from seatrial.triage.log import read_log
from seatrial.triage.shapes import HEADER


def read_diagnosis(loop: Loop, log: Path) -> Diagnosis:
    """What triage concludes from a log of this loop."""
    found = diagnose(log, loop.milestones(), loop.signatures())
    if found.verdict is None or found.signature is not None or found.line is None:
        return found
    frames = _frames(log, found.line)
    for signature in loop.signatures():
        if not signature.harmless and any(re.search(signature.pattern, frame) for frame in frames):
            known = {"boundary": signature.boundary, "verdict": signature.verdict, "signature": signature.id, "advice": signature.advice}
            return found.model_copy(update=known)
    return found


def _frames(log: Path, decisive: int) -> list[str]:
    """The `File "…", line n, in …` lines of the traceback that ends at the decisive line."""
    open_frames: dict[str, list[str]] = {}
    for line in read_log(log).between(1, decisive):
        if HEADER in line.body:
            open_frames[line.process] = []
        elif line.number == decisive:
            return open_frames.get(line.process, [])
        elif line.body.lstrip().startswith('File "'):
            open_frames.setdefault(line.process, []).append(line.body)  # a progress bar may hide whose header it was
    return []
