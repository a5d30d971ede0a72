"""The directory of a bisect: where its files are, who may write there, and what is left to clean.

- `bisect.json` (the plan) and `runs.jsonl` (the journal) are the truth; the stores, trees and reports can be made again from them.
- One writer at a time, as in a trial's run directory.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

from seatrial.files import read_model, write_json
from seatrial.model.errors import UserError
from seatrial.regress.bisect.environments.cache import BisectEnvironments
from seatrial.regress.bisect.record import VERSION, Plan
from seatrial.regress.bisect.running import cluster
from seatrial.regress.bisect.running.local import clean_up
from seatrial.regress.bisect.trees.making import BESIDE, delete
from seatrial.trial.rundir import locked, make, new_path

PLAN, JOURNAL, STEP = "bisect.json", "runs.jsonl", "step.json"
STORES, STEPS, PATCHES = "stores", "steps", "patches"
WORK = (STORES, STEPS + "/*/tree", STEPS + "/*/" + BESIDE)
"""What only a bisect under way needs."""


def create(root: Path, named: Path | None, plan: Plan) -> Path:
    """Make a new directory, at the place that the user named or below `root`, and store the plan."""
    path = named.absolute() if named else new_path(root, "bisect")
    if (path / PLAN).exists():
        raise UserError(f"{path}: holds a bisect already", f"{resume_command(path)}, or name another directory with --out")
    if path.is_dir() and any(path.iterdir()):
        raise UserError(f"{path}: is not empty", "name a new or an empty directory with --out")
    make(path)
    write_json(path / PLAN, plan)
    return path


def resume_command(path: Path) -> str:
    """What a person types to go on, whatever the path holds."""
    return f"seatrial bisect resume {shlex.quote(str(path))}"


def load(path: Path) -> Plan:
    """The plan of a bisect directory."""
    if not (path / PLAN).is_file():
        raise UserError(f"{path}: no {PLAN} there, so it is not the directory of a bisect", "name a directory that `seatrial bisect` made")
    plan = read_model(path / PLAN, Plan)
    if plan.version != VERSION:
        raise UserError(f"{path / PLAN}: version {plan.version}, and this Seatrial reads {VERSION}", "use the Seatrial that wrote it")
    return plan


def clean(path: Path, tell: Callable[[str], None]) -> tuple[str, ...]:
    """End what a killed bisect left running, and remove its trees and stores; plan, journal, logs and reports stay. So does the tree of
    a job that could not be cancelled, with the stores that it is a worktree of: both may be in use."""
    load(path)
    with locked(path):
        clean_up(path)
        cluster.clean_up(path, tell)
        BisectEnvironments().clean_up()
        kept = cluster.queued(path)
        for step in sorted(kept):
            tell(f"{step}: its tree and the stores are kept, because its job may still run; cancel it, then clean again")
        work = [found for pattern in WORK for found in sorted(path.glob(pattern))]
        gone = [found for found in work if found.parent not in kept and not (kept and found == path / STORES)]
        for found in gone:
            delete(found)
    return tuple(str(found.relative_to(path)) for found in gone)
