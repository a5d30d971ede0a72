"""The run directory of a trial: the metrics of every level, the values of its checks, and how long it took.

- A metric is `<level>/<tag>`, `<level>/checks/<check>` or `<level>/seconds`: a trial of level 0 alone shares them with one of all.
- The name holds what else must be equal for a baseline: loop, model, and a digest of the loop's arguments and options.
- A trial whose files were altered since is no Pass, and is not trusted.
- A trial that is finished later (`seatrial resume`) takes the place of its earlier import.
"""

from __future__ import annotations

import hashlib
import json
from datetime import datetime
from pathlib import Path

from seatrial.metrics.read import read_metrics
from seatrial.model.record import LevelResult, RepoState, Trial
from seatrial.model.verdict import Verdict
from seatrial.regress.history.importers.draft import Draft, Tree, digest_of, read_bytes
from seatrial.regress.history.importers.series import points_of
from seatrial.regress.history.record import Kind, Point, point
from seatrial.report.outcome import altered_words
from seatrial.trial import rundir, verify

FILE = "trial.json"


def read(path: Path) -> Draft:
    """The trial of a run directory."""
    content = read_bytes(path / FILE)
    trial, altered = rundir.load(path), list[str]()
    checked = verify.verified(path, trial)
    if any(one.code != "unrecorded" for one in checked.alterations):  # what an older version recorded has no digests
        trial, altered = checked, [altered_words(checked.alterations)]
    own = [state for state in trial.plan.changes if not state.companion]
    points, flaws = list[Point](), altered
    for level in trial.levels:
        found, damage = _level(path, level)
        points += found
        flaws += damage
    environment = trial.environment
    return Draft(
        kind=Kind.TRIAL,
        project=own[0].name if own else trial.plan.loop,
        name=_name(trial),
        trees=tuple(_tree(state) for state in own),
        time=datetime.fromisoformat(trial.created).timestamp(),
        gpus=environment.gpus if environment else (),
        passed=trial.verdict is Verdict.PASS if trial.status == "done" else None,
        source=path,
        digest=digest_of(Kind.TRIAL, content),
        points=points,
        flaws=flaws,
        again=True,
    )


def _tree(state: RepoState) -> Tree:
    folder = Path(state.path)
    return Tree(commit=state.commit, branch=state.branch, dirty=bool(state.dirty), path=folder if folder.is_dir() else None)


def _name(trial: Trial) -> str:
    """Loop and model, and what else was asked of the loop."""
    plan = trial.plan
    asked = json.dumps([list(plan.arguments), sorted(plan.options.items())])
    more = f" +{hashlib.blake2b(asked.encode(), digest_size=4).hexdigest()}" if plan.arguments or plan.options else ""
    return f"{plan.loop} {Path(plan.model).name}{more}"


def _level(path: Path, level: LevelResult) -> tuple[list[Point], list[str]]:
    """What one level measured, and what of it could not be read."""
    start = f"{level.number}-{level.name}"
    points = [point(f"{start}/seconds", level.seconds), point(f"{start}/cpu_seconds", level.cpu_seconds)]
    points += [point(f"{start}/checks/{check.name}", check.value) for check in level.checks]
    folder = path / (level.directory or f"levels/{start}")
    file = folder / "metrics.jsonl"
    if not file.is_file():
        return points, [] if level.verdict is not Verdict.PASS else [f"{file}: not there"]
    found, flaws = points_of(read_metrics([file]), f"{start}/")
    return points + found, flaws
