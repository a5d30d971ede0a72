"""Triage of one log with the knowledge of its loop.

Triage matches known failures against an exception's own lines. Some are known by where they were raised instead: a
reward function may raise anything, and only the frame that called it says what it was. So where triage knows no
failure, the signatures of the loop are searched in the frames of the first cause, in their order. Of a failure that
was swallowed again and again, the advice says how often.
"""

from __future__ import annotations

import re
from pathlib import Path

from seatrial.model.knowledge import Signature
from seatrial.model.loop import Loop
from seatrial.model.record import Diagnosis
from seatrial.triage.diagnose import diagnose
from seatrial.triage.log import read_log
from seatrial.triage.shapes import CRASHED, HEADER, KILLED, RECORD
from seatrial.triage.signatures import Scan

REPEATED = re.compile(r"\[repeated (\d+)x across cluster\]")


def read_diagnosis(loop: Loop, log: Path) -> Diagnosis:
    """What triage concludes from a log of this loop."""
    known = loop.signatures()
    found = diagnose(log, loop.milestones(), tuple(s for s in known if not s.frame))
    if found.verdict is None or found.line is None:
        return found
    if found.signature is not None:
        silent = next((s for s in known if s.silent and s.id == found.signature), None)
        return _counted(found, log, silent) if silent else found
    frames = [] if KILLED.match(found.cause) or CRASHED.match(found.cause) else _frames(log, found.line)
    for signature in known:
        if not signature.harmless and any(re.search(signature.pattern, frame) for frame in frames) and _counts(log, signature):
            update = {"boundary": signature.boundary, "verdict": signature.verdict, "signature": signature.id, "advice": signature.advice}
            return found.model_copy(update=update)
    return found


def _counted(found: Diagnosis, log: Path, signature: Signature) -> Diagnosis:
    """Say how often it happened, where it happened more than once; Ray prints repeated lines once, with their number."""
    pattern = re.compile(signature.pattern)
    times = 0
    for line in read_log(log):
        if pattern.search(line.text):
            repeated = REPEATED.search(line.text)
            times += int(repeated[1]) if repeated else 1
    return found.model_copy(update={"advice": f"{times} such lines. {found.advice}"}) if times > 1 else found


def _counts(log: Path, signature: Signature) -> bool:
    """Whether the rest of the log lets the signature count."""
    if not (signature.also or signature.unless):
        return True
    scan = Scan((), (signature,))
    for line in read_log(log):
        scan.feed(line)
    scan.finish()
    return scan.counts(signature)


def _frames(log: Path, decisive: int) -> list[str]:
    """The `File "…", line n, in …` lines of the traceback that ends at the decisive line."""
    open_frames: dict[str, list[str]] = {}
    for line in read_log(log).between(1, decisive):
        body = RECORD.sub("", line.body, count=1)
        if HEADER in body:
            open_frames[line.process] = []
        elif line.number == decisive:
            return open_frames.get(line.process, [])
        elif body.lstrip().startswith('File "'):
            open_frames.setdefault(line.process, []).append(body.rstrip())  # a progress bar may hide whose header it was
    return []
