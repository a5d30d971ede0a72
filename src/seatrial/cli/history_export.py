"""Where an export goes: standard output, or a file that is written whole or not at all."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from seatrial.regress.history.record import Take
    from seatrial.regress.history.store import Store


def write(
    store: Store, patterns: list[str], out: Path | None, form: str | None, project: str | None, name: str | None, take: Take, points: bool
) -> None:
    """Export the runs that the options choose."""
    from seatrial.model.errors import UserError
    from seatrial.regress.history import export
    from seatrial.regress.history.show import chosen

    form = form or (out.suffix.lstrip(".").replace("jsonl", "json") if out and out.suffix else "json")
    if form not in export.FORMATS:
        raise UserError(f"{form}: no form of an export", f"--format {', '.join(export.FORMATS)}")
    if form == "json" and points:
        raise UserError("JSON has one object per run, without steps", "add --format csv, or leave --points out")
    if form == "parquet" and out is None:
        raise UserError("Parquet is no text", "name a file with --out")
    metrics = set(chosen(store, patterns, project)) if patterns else None
    runs = store.runs(project=project, name=name)
    if form == "parquet" and out is not None:
        _whole(out, [export.as_parquet(export.rows(store, runs, metrics, take, points=points))])
        return
    if form == "csv":
        texts = export.as_csv(export.rows(store, runs, metrics, take, points=points))
    else:
        texts = (f"{line}\n" for line in export.as_json(store, runs, metrics, take))
    if out is not None:
        _whole(out, (text.encode() for text in texts))
        return
    for text in texts:
        sys.stdout.write(text)


def _whole(out: Path, parts: Iterable[bytes]) -> None:
    from seatrial.files import replacing

    with replacing(out) as stream:
        for part in parts:
            stream.write(part)
