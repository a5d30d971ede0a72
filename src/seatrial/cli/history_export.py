"""Where an export goes: standard output, or a file that is written whole or not at all."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from seatrial.regress.history.record import Take
    from seatrial.regress.history.store import Store


_ENDINGS = {".json": "json", ".jsonl": "json", ".ndjson": "json", ".csv": "csv", ".parquet": "parquet"}
T = TypeVar("T")


class Counted(Generic[T]):
    """Counts what goes through."""

    def __init__(self, items: Iterable[T]) -> None:
        self.items = items
        self.count = 0

    def __iter__(self) -> Iterator[T]:
        for item in self.items:
            self.count += 1
            yield item


def write(
    store: Store, patterns: list[str], out: Path | None, form: str | None, project: str | None, name: str | None, take: Take, points: bool
) -> None:
    """Export the runs that the options choose."""
    from seatrial.model.errors import UserError
    from seatrial.model.words import counted
    from seatrial.regress.history import among, export
    from seatrial.regress.history.show import chosen

    ending = _ENDINGS.get(out.suffix.lower()) if out else None
    known = f"--format takes one of {', '.join(export.FORMATS)}"
    if form and form not in export.FORMATS:
        raise UserError(f"--format {form}: no such format", known)
    if form and ending and form != ending:
        raise UserError(f"--format {form} and --out {out}: the ending says {ending}", "leave --format out, or give the file another ending")
    if out and not form and out.suffix and not ending:
        raise UserError(f"--out {out}: {out.suffix} is the ending of no format", f"{known}; endings that say it: {', '.join(_ENDINGS)}")
    form = form or ending or "json"
    if form == "json" and points:
        raise UserError("--points: JSON has one object per run, without steps", "add --format csv, or leave --points out")
    if form == "parquet" and out is None:
        raise UserError("--format parquet: not for standard output, it is no text", "name a file with --out")
    among.require(store, project=project, name=name)
    metrics = set(chosen(store, patterns, project)) if patterns else None
    if metrics is not None and not any(store.count(metric, project=project, name=name) for metric in metrics):
        raise UserError(among.none_has(", ".join(patterns), project=project, name=name), "seatrial history runs lists the runs")
    runs = store.runs(project=project, name=name)
    if form == "parquet" and out is not None:
        rows = Counted(export.rows(store, runs, metrics, take, points=points))
        _whole(out, [export.as_parquet(iter(rows))])
        sys.stdout.write(f"wrote {out}: {form}, {counted(rows.count, 'row')}\n")
        return
    if form == "csv":
        found: Counted[Any] = Counted(export.rows(store, runs, metrics, take, points=points))
        texts = export.as_csv(iter(found))
    else:
        found = Counted(export.as_json(store, runs, metrics, take))
        texts = (f"{line}\n" for line in found)
    if out is not None:
        _whole(out, (text.encode() for text in texts))
        sys.stdout.write(f"wrote {out}: {form}, {counted(found.count, 'row' if form == 'csv' else 'run')}\n")
        return
    for text in texts:
        sys.stdout.write(text)


def _whole(out: Path, parts: Iterable[bytes]) -> None:
    from seatrial.files import replacing

    with replacing(out) as stream:
        for part in parts:
            stream.write(part)
