"""Importers of metric files and of the directories of trials and campaigns. Imported only where such a path is found."""

from __future__ import annotations

import hashlib
import json
from datetime import datetime
from pathlib import Path
from typing import Any

from seatrial.core.errors import UserError
from seatrial.core.guarded import real_path
from seatrial.core.records import LevelResult, RepoState, Trial
from seatrial.core.series import Metrics
from seatrial.core.verdict import Verdict
from seatrial.history.import_results import Draft, DraftTree, digest_of, parse_draft, read_bytes
from seatrial.history.store import Kind, Point, point
from seatrial.metrics.read import read_metrics, read_run
from seatrial.report.outcomes import altered_words
from seatrial.trial import run_dir, verify

_COUNTS = ("expected", "ok", "failed", "missing", "coverage", "duplicates", "conflicts", "torn", "foreign")
_AT = {"pass": "pass_at", "best": "best_at", "majority": "majority_at"}
_NUMBERS = ("reward", "input_tokens", "output_tokens", "turns", "latency_s")


def read_campaign(path: Path) -> Draft:
    """What the campaign collected; its files are read as data, since this room knows nothing of campaigns."""
    merge, profile = path / "merged" / "merge.json", path / "profile" / "profile.json"
    content = read_bytes(path / "manifest.json")
    manifest = parse_draft(path / "manifest.json", content)
    parts, points, complete = [content], list[Point](), list[bool]()
    if merge.is_file():
        parts.append(read_bytes(merge))
        data = parse_draft(merge, parts[-1])
        points += [point(f"collected/{name}", data[name]) for name in _COUNTS]
        complete.append(data["missing"] == 0 and data["conflicts"] == 0)
    if profile.is_file():
        data = parse_draft(profile, read_bytes(profile))
        points += [one for group in data["groups"] for one in _group(group)]
        complete.append(data["groups"][0]["missing"] == 0 and data["journal"]["conflicts"] == 0)
        parts.append(repr(data | {"made": ""}).encode())
    if not points:
        raise UserError(f"{path}: neither merged/merge.json nor profile/profile.json", f"seatrial rollouts merge {path}")
    return Draft(
        kind=Kind.CAMPAIGN,
        project=manifest["name"],
        name=f"{manifest['name']} {manifest['inputs_sha256'][:8]}",
        time=datetime.fromisoformat(manifest["made"]).timestamp(),
        passed=all(complete),
        source=path,
        digest=digest_of(Kind.CAMPAIGN, *parts),
        points=points,
        again=True,
    )


def _group(group: dict[str, Any]) -> list[Point]:
    """The figures of one group; those that are unknown stay so (null)."""
    start = "overall" if group["by"] == "overall" else f"{group['by']}/{group['name']}"
    found = {"mean": group["mean"]["value"], **{name: group[name] for name in ("coverage", "truncated", "never", "always")}}
    for what, key in _AT.items():
        found |= {f"{what}@{one['k']}": one["value"] for one in group[key]}
    for what in _NUMBERS:
        if group[what] is not None:
            found |= {f"{what}/mean": group[what]["mean"], f"{what}/p95": group[what]["p95"]}
    found |= {f"metrics/{name}": numbers["mean"] for name, numbers in group["metrics"].items()}
    return [point(f"{start}/{name}", value) for name, value in found.items()]


def points_of(metrics: Metrics, prefix: str = "") -> tuple[list[Point], list[str]]:
    points = [
        point(prefix + tag, value, step)
        for tag, series in metrics.series.items()
        for step, value in zip(series.steps, series.values, strict=True)
    ]
    points += [point(prefix + tag, value) for tag, value in metrics.scalars.items()]
    flaws = [f"{prefix}{tag}: no points" for tag, series in metrics.series.items() if not len(series)]
    flaws += [str(damage) for damage in metrics.damage]
    flaws += [f"{prefix}{one.tag}: {len(one.steps)} steps written twice; the last writer counts" for one in metrics.overlaps]
    return points, flaws


def read_metric_files(path: Path) -> Draft:
    metrics = read_run([path])
    files = sorted(Path(source) for source in metrics.sources)
    points, flaws = points_of(metrics)
    time = max(file.stat().st_mtime for file in files) if files else path.stat().st_mtime
    return Draft(
        kind=Kind.METRICS,
        name=real_path(path).name if path.is_dir() else real_path(path).parent.name,
        time=time,
        source=path,
        digest=digest_of(Kind.METRICS, repr(time).encode(), *(read_bytes(file) for file in files)),
        points=points,
        flaws=flaws,
    )


FILE = "trial.json"


def read_trial(path: Path) -> Draft:
    content = read_bytes(path / FILE)
    trial, altered = run_dir.load(path), list[str]()
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


def _tree(state: RepoState) -> DraftTree:
    folder = Path(state.path)
    return DraftTree(commit=state.commit, branch=state.branch, dirty=bool(state.dirty), path=folder if folder.is_dir() else None)


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
