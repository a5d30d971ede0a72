"""Metrics as readers give them, into points; and metric files as runs of their own.

- Damage and steps that were written twice with different values are flaws: told, and the run is not trusted.
- A metric file says neither when nor on what it ran: its time is that of the file; its machine, commit and outcome must be stated.
- Two runs may leave the same values: the time belongs to the identity, so that the second is not taken for the first.
"""

from __future__ import annotations

from pathlib import Path

from seatrial.metrics.read import read_run
from seatrial.model.guarded import real_path
from seatrial.model.series import Metrics
from seatrial.regress.history.importers.draft import Draft, digest_of, read_bytes
from seatrial.regress.history.record import Kind, Point, point


def points_of(metrics: Metrics, prefix: str = "") -> tuple[list[Point], list[str]]:
    """Points, and flaws."""
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


def read(path: Path) -> Draft:
    """A metric file, or a directory of one run's metric files."""
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
