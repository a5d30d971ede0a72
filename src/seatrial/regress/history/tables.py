"""The tables of a store, and rows to types and back.

- `points` is what was imported, in its order; `series` is made from it once, per metric and run. What a metric is with one value and
  no step stands in `series` alone.
- The mark of a series is the first one among its points; mean, least and greatest exist only when every point is finite.
"""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from seatrial.model.errors import UserError
from seatrial.model.guarded import parse_step
from seatrial.regress.history.record import Kind, Point, Run, Take

VERSION = 1
SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE runs (
  id INTEGER PRIMARY KEY AUTOINCREMENT, project TEXT NOT NULL, kind TEXT NOT NULL, name TEXT NOT NULL, commit_id TEXT, branch TEXT,
  dirty INTEGER NOT NULL, time REAL NOT NULL, machine TEXT NOT NULL, passed INTEGER, trusted INTEGER NOT NULL,
  why_untrusted TEXT NOT NULL, source TEXT NOT NULL, digest TEXT NOT NULL UNIQUE, poisoned TEXT NOT NULL);
CREATE INDEX runs_time ON runs (time);
CREATE TABLE metrics (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE);
CREATE TABLE series (
  metric INTEGER NOT NULL, run INTEGER NOT NULL, first REAL, last REAL, mean REAL, least REAL, greatest REAL, count INTEGER NOT NULL,
  mark TEXT NOT NULL, PRIMARY KEY (metric, run)) WITHOUT ROWID;
CREATE INDEX series_run ON series (run);
CREATE TABLE points (
  run INTEGER NOT NULL, metric INTEGER NOT NULL, place INTEGER NOT NULL, step INTEGER, value REAL, mark TEXT NOT NULL,
  PRIMARY KEY (run, metric, place)) WITHOUT ROWID;
"""
RUN = "runs.id, project, kind, runs.name, commit_id, branch, dirty, time, machine, passed, trusted, why_untrusted, source, digest, poisoned"
STATED = ("project", "kind", "name", "commit_id", "branch", "dirty", "time", "machine", "passed", "trusted", "why_untrusted", "source")
INSERT_RUN = f"INSERT INTO runs ({', '.join(STATED)}, digest, poisoned) VALUES ({', '.join('?' * (len(STATED) + 2))})"
TAKEN: dict[Take, str] = {"last": "last", "mean": "mean", "min": "least", "max": "greatest", "first": "first", "count": "count"}

EARLIEST, LATEST = -62_135_510_400.0, 253_402_214_400.0
"""The times that a calendar has: the years 1 to 9999."""
_KINDS = frozenset(str(kind) for kind in Kind)
Cell = tuple[type, ...]
WHOLE: Cell = (int,)
TEXT: Cell = (str,)
_NUMBER: Cell = (float, int, type(None))
_OPTIONAL: Cell = (str, type(None))
RUN_CELLS: tuple[Cell, ...] = (
    *(WHOLE, TEXT, TEXT, TEXT, _OPTIONAL, _OPTIONAL, WHOLE, (float,), TEXT, (int, type(None)), WHOLE, TEXT, TEXT, TEXT, TEXT),
)
"""The types of `RUN`."""
VALUE_CELLS: tuple[Cell, ...] = (_NUMBER, TEXT, WHOLE)
POINT_CELLS: tuple[Cell, ...] = ((int, type(None)), _NUMBER, TEXT)
Row = tuple[str, int, int | None, float | None, str]
Found = tuple[float | None, float | None, float | None, float | None, float | None, int, str]


def prepare(store: sqlite3.Connection, path: Path, *, write: bool) -> None:
    """Make the tables of a new store, or check the version of an old one."""
    if write:
        if store.execute("PRAGMA journal_mode").fetchone()[0] != "wal":
            store.execute("PRAGMA journal_mode=WAL")
        # A crash of the machine may lose the last runs, never the store; files of runs can be imported again.
        store.execute("PRAGMA synchronous=NORMAL")
        store.execute("PRAGMA cache_size=-65536")
        store.execute("PRAGMA wal_autocheckpoint=8000")
    else:
        store.execute("PRAGMA query_only=ON")
    if not _has_meta(store):
        if not write:
            raise UserError(f"{path}: not a history of Seatrial", "name the file that `seatrial history import` wrote, with --store")
        _make(store, path)
    found = store.execute("SELECT value FROM meta WHERE key = 'version'").fetchone()
    version = parse_step(str(found[0])) if found else None
    if version is None or version > VERSION:
        told = found[0] if found else "none"
        raise UserError(
            f"{path}: history of version {told}, and this Seatrial reads {VERSION}", "use the Seatrial that wrote it, or another --store"
        )


def _has_meta(store: sqlite3.Connection) -> bool:
    return store.execute("SELECT 1 FROM sqlite_master WHERE name = 'meta'").fetchone() is not None


def _make(store: sqlite3.Connection, path: Path) -> None:
    """The tables, in one transaction; of two writers that come at once, the second finds them there."""
    store.execute("BEGIN IMMEDIATE")
    try:
        if not _has_meta(store):
            if store.execute("SELECT 1 FROM sqlite_master").fetchone():
                raise UserError(f"{path}: another program's database", "name another file with --store")
            for text in SCHEMA.split(";\n"):
                if text.strip():
                    store.execute(text)
            store.execute("INSERT INTO meta VALUES ('version', ?)", (str(VERSION),))
    except BaseException:
        store.execute("ROLLBACK")
        raise
    store.execute("COMMIT")


def require_cells(row: Sequence[object], cells: Sequence[Cell]) -> None:
    """Raise sqlite's error for a cell of another type than we write, and for a number that is not finite."""
    for cell, kinds in zip(row, cells, strict=True):
        if not isinstance(cell, kinds) or (type(cell) is float and not math.isfinite(cell)):
            raise sqlite3.DatabaseError(f"a cell holds {repr(cell)[:40]}")
    if cells[-len(RUN_CELLS) :] == RUN_CELLS:
        kind, time = row[-len(RUN_CELLS) + 2], row[-len(RUN_CELLS) + 7]
        if kind not in _KINDS or not isinstance(time, float) or not EARLIEST < time < LATEST:
            raise sqlite3.DatabaseError(f"a run of the kind {repr(kind)[:40]} at the time {time!r}")


def rows_of(points: Iterable[Point]) -> tuple[list[Row], dict[str, Found]]:
    """Rows of the points in their order, and what each metric comes to. One value without a step needs no row of its own."""
    by_metric: dict[str, list[Point]] = {}
    for found in points:
        by_metric.setdefault(found.metric, []).append(found)
    rows: list[Row] = [
        (metric, place, one.step, one.value, one.mark)
        for metric, some in by_metric.items()
        if len(some) > 1 or some[0].step is not None
        for place, one in enumerate(some)
    ]
    return rows, {metric: summed(some) for metric, some in by_metric.items()}


def summed(points: Sequence[Point]) -> Found:
    """First, last, mean, least, greatest, count and mark. First and last go by step where every point has one."""
    if len(points) == 1:
        value = points[0].value
        return value, value, value, value, value, 1, points[0].mark
    if all(one.step is not None for one in points):
        points = sorted(points, key=lambda one: one.step or 0)
    mark = next((one.mark for one in points if one.mark), "")
    values = [one.value for one in points if one.value is not None]
    if mark or not values:
        return points[0].value, points[-1].value, None, None, None, len(points), mark
    return values[0], values[-1], math.fsum(values) / len(values), min(values), max(values), len(points), mark


def row_of(run: Run) -> tuple[object, ...]:
    """A run as a row, without its number."""
    return (
        run.project,
        str(run.kind),
        run.name,
        run.commit,
        run.branch,
        run.dirty,
        run.time,
        run.machine,
        run.passed,
        run.trusted,
        run.why_untrusted,
        run.source,
        run.digest,
        run.poisoned,
    )


def run_of(row: Sequence[Any]) -> Run:
    """A row as a run."""
    key, project, kind, name, commit, branch, dirty, time, machine, passed, trusted, why, source, digest, poisoned = row
    return Run(
        id=key,
        project=project,
        kind=Kind(kind),
        name=name,
        commit=commit,
        branch=branch,
        dirty=bool(dirty),
        time=time,
        machine=machine,
        passed=None if passed is None else bool(passed),
        trusted=bool(trusted),
        why_untrusted=why,
        source=source,
        digest=digest,
        poisoned=poisoned,
    )


def filters(*, commit: str | None = None, baseline: bool = False, **equal: str | None) -> tuple[str, tuple[object, ...]]:
    """A condition and its values; None asks for nothing."""
    parts, values = ["1"], list[object]()
    for column, value in equal.items():
        if value is not None:
            parts.append(f"runs.{column} = ?")
            values.append(str(value))
    if commit is not None:
        parts.append("substr(runs.commit_id, 1, ?) = ?")
        values += [len(commit), commit]
    if baseline:
        parts.append("runs.trusted = 1 AND runs.poisoned = ''")
    return " AND ".join(parts), tuple(values)
