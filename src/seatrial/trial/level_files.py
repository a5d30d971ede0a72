"""What the processes of a level left: metrics and import proofs, read from its directory.

A file that cannot be read is damage, never an empty answer.
"""

from __future__ import annotations

import json
from pathlib import Path

from seatrial.evidence.imports import read_imports
from seatrial.files import number_to_json, write_text
from seatrial.metrics.read import read_metrics
from seatrial.model.errors import UserError
from seatrial.model.loop import Loop
from seatrial.model.record import ImportProof
from seatrial.model.series import Damage, Metrics, Overlap, Series

IMPORTS = "imports.jsonl"


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
