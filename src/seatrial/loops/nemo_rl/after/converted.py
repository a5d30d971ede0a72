"""Whether the model was converted by the Bridge under test.

NeMo-RL converts a model once, keeps it for all later runs, and takes it from there without a word of which Bridge made it: a
broken import would pass, and so would one that was never made. So each level has a place of its own for it (`runs/converted.py`).
"""

from __future__ import annotations

import re
from pathlib import Path

from seatrial.loops.lines import lines
from seatrial.loops.nemo_rl.runs.converted import FOLDER
from seatrial.loops.proof import proof
from seatrial.model.record import CheckResult
from seatrial.model.verdict import Boundary

TAKEN = re.compile(r"Checkpoint already exists at (\S+)\. Skipping import")


def converted(phase: str, directory: Path, log: Path) -> CheckResult:
    """No model was taken from where another run, with another Bridge, may have put it."""
    taken = [match[1] for _, _, text in lines(log) if (match := TAKEN.search(text))] if log.is_file() else []
    foreign = [path for path in taken if f"/{directory.name}/{FOLDER}/" not in path]
    value = f"{len(taken)} taken as converted, {len(foreign)} of them from elsewhere"
    message = f"{foreign[0]} was made by an earlier run: the import of the Bridge under test was not exercised" if foreign else ""
    return proof(f"the Bridge under test converted the model ({phase})", not foreign, value, Boundary.CONFIG, "0 from elsewhere", message)
