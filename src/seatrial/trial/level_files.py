"""What the processes of a level left: metrics and import proofs, read from its directory.

Each level of a trial is a run of its own, and so is each trial: their metrics are never read as one.
A file that cannot be read is damage, never an empty answer.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from seatrial.evidence.imports import read_imports
from seatrial.files import number_to_json, write_text
from seatrial.loops import loop_of
from seatrial.metrics.read import read_metrics, read_run
from seatrial.model.errors import UserError
from seatrial.model.loop import Loop
from seatrial.model.record import ImportProof
from seatrial.model.series import Damage, Metrics, Overlap, Series
from seatrial.trial import rundir

IMPORTS = "imports.jsonl"
_SHOWN = 6


def read_level_metrics(loop: Loop, directory: Path) -> Metrics:
    """All metrics of a level; a file that cannot be read is damage."""
    series: dict[str, Series] = {}
    damage: list[Damage] = []
    overlaps: list[Overlap] = []
    sources: list[str] = []
    for prefix, paths in loop.metric_files(directory).items():
        try:
            found = read_metrics(paths, prefix)
        except UserError as error:
            damage.append(Damage(str(paths[0]), "whole file", 0, error.message))
            continue
        series.update(found.series)
        damage += found.damage
        overlaps += found.overlaps
        sources += found.sources
    return Metrics(series=series, damage=tuple(damage), overlaps=tuple(overlaps), sources=tuple(sources))


def metrics_of_run(path: Path, level: int | None = None, also: Sequence[Path] = ()) -> Metrics:
    """The metrics of one run: of a file, of a directory, or of a level of a trial, which `level` names. Several runs are a UserError."""
    place = _trial_of(path)
    if place is None:
        trials = sorted(file.parent for file in path.glob("*/trial.json")) if path.is_dir() else []
        if len(trials) == 1:
            return metrics_of_run(trials[0], level, also)
        if level is not None and not trials:
            raise UserError(f"--level {level}: {path} is no run directory of a trial", "leave --level out, or give a run directory")
        if trials:
            names = ", ".join(trial.name for trial in trials[:_SHOWN]) + (" …" if len(trials) > _SHOWN else "")
            raise UserError(f"{path}: holds {len(trials)} trials: {names}", f"give the run directory of one: {trials[0]}")
        return read_run([path, *also])
    if also:
        raise UserError(f"--also: {path} belongs to a trial, whose level is read whole", "leave --also out")
    trial = rundir.read(place)
    directories = {planned.number: rundir.level_directory(place, planned) for planned in trial.plan.levels}
    there = {number: directory for number, directory in directories.items() if directory.is_dir()}
    here = next((number for number, directory in there.items() if directory == path.absolute()), None)
    wanted = here if level is None else level
    if wanted is None and len(there) == 1:
        wanted = next(iter(there))
    listed = ", ".join(map(str, there)) or "none"
    if wanted is None:
        fix = f"choose one: --level {next(iter(there), 0)}"
        raise UserError(f"{path}: a trial with {len(there)} levels ({listed}), each of them a run of its own", fix)
    if wanted not in there or here not in (None, wanted):
        raise UserError(f"{path}: level {wanted} has no directory here", f"choose from {listed}")
    found = read_level_metrics(loop_of(trial.plan), there[wanted])
    return found if found.sources or found.damage else read_metrics([there[wanted] / "metrics.jsonl"])


def _trial_of(path: Path) -> Path | None:
    """The run directory that a path is, or whose level it is."""
    path = path.absolute()
    if not path.is_dir():
        return None
    candidates = (path, *([path.parent] if path.name == "levels" else []), *([path.parent.parent] if path.parent.name == "levels" else []))
    return next((place for place in candidates if (place / "trial.json").is_file()), None)


def write_level_metrics(metrics: Metrics, path: Path) -> None:
    """One row per step with every tag, in strict JSON."""
    rows: dict[int, dict[str, float | str]] = {}
    for tag, series in metrics.series.items():
        for step, value in zip(series.steps, series.values, strict=True):
            rows.setdefault(step, {})[tag] = number_to_json(value)
    lines = [json.dumps({"step": step, **rows[step]}, ensure_ascii=False, allow_nan=False) for step in sorted(rows)]
    write_text(path, "".join(line + "\n" for line in lines))


def level_imports(directory: Path) -> tuple[ImportProof, ...]:
    """What the processes of a level imported from where; nothing when the file is torn, which is judged with the level."""
    try:
        return read_imports(directory / IMPORTS)
    except UserError:
        return ()
