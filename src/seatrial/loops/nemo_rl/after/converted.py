"""Whether the model was converted by the Bridge under test.

NeMo-RL converts a model once, keeps it for all later runs, and takes it from there without a word of which Bridge made it: a
broken import would pass, and so would one that was never made. So each level has a place of its own for it (`runs/converted.py`),
and must leave a model there.
"""

from __future__ import annotations

import re
from pathlib import Path

from seatrial.loops.lines import lines
from seatrial.loops.nemo_rl.runs.converted import FOLDER, place
from seatrial.loops.proof import proof
from seatrial.model.record import CheckResult
from seatrial.model.verdict import Boundary

TAKEN = re.compile(r"Checkpoint already exists at (\S+)\. Skipping import")
USED = re.compile(r"Using default megatron checkpoint dir: (\S+)")
"""Each worker says it. A trial may be judged where the user's own place for converted models is not known."""
MADE = "**/iter_0000000/*"
"""Where NeMo-RL puts a model that it converted, below its place and the model's name."""
UNUSED = "the import of the Bridge under test was not exercised"


def converted(phase: str, directory: Path, log: Path) -> CheckResult:
    """The level's own place holds a converted model, and none was taken from where another run, with another Bridge, may have
    put it."""
    texts = [text for _, _, text in lines(log)] if log.is_file() else []
    taken = [match[1] for text in texts if (match := TAKEN.search(text))]
    foreign = [path for path in taken if not _own(path, directory)]
    named = {match[1] for text in texts if (match := USED.search(text)) and _own(match[1], directory)}
    own = place(directory, directory.parents[1].name)
    there = any(path.is_file() for where in (own, *map(Path, sorted(named))) for path in where.glob(MADE))
    value = f"{len(taken)} taken as converted, {len(foreign)} of them from elsewhere; {'one' if there else 'none'} in the level's own place"
    message = f"{foreign[0]} was made by an earlier run: {UNUSED}" if foreign else "" if there else f"{own} holds none: {UNUSED}"
    name = f"the Bridge under test converted the model ({phase})"
    return proof(name, there and not foreign, value, Boundary.CONFIG, "one of its own, 0 from elsewhere", message)


def _own(path: str, directory: Path) -> bool:
    """Whether a path is in the place of this level."""
    return f"/{directory.name}/{FOLDER}/" in f"{path}/"
