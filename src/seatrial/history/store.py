"""The store: one SQLite file that many processes read and write at once; its records, its tables, and which runs are asked for.

- What shares a baseline: project, kind, name, metric and machine. Anything else may differ between two runs of a baseline.
- A value that is no finite number is kept, with its mark instead of a value; it is never dropped, and never a number.
"""

from __future__ import annotations

import fnmatch
import math
import os
import re
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TypedDict, Unpack

from seatrial.core.errors import UserError
from seatrial.core.guarded import parse_step
from seatrial.evidence.lazy_redactor import LazyRedactor

Take = Literal["last", "mean", "min", "max", "first", "count"]
TAKES: tuple[Take, ...] = ("last", "mean", "min", "max", "first", "count")
"""How the points of a metric become its one value in a run."""
UNKNOWN = "unknown machine"


class Kind(StrEnum):
    """What a run was."""

    TEST = "test"
    TRIAL = "trial"
    CAMPAIGN = "campaign"
    BENCHMARK = "benchmark"
    METRICS = "metrics"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRun:
    """One run of one thing."""

    id: int | None = None
    project: str
    kind: Kind
    name: str
    """What was run, within the project and kind: empty for a whole test session, the loop and its levels for a trial."""
    commit: str | None = None
    branch: str | None = None
    dirty: bool = False
    time: float
    """When it started, in seconds since 1970."""
    machine: str = ""
    passed: bool | None = None
    """None where the run had no outcome."""
    trusted: bool = False
    """It may serve as a baseline: passed, clean, and on a trusted branch."""
    why_untrusted: str = ""
    source: str = ""
    digest: str
    """Of what was imported; a store holds it once."""
    poisoned: str = ""
    """Why a person took it out of the baselines, or empty."""

    @property
    def order(self) -> tuple[float, float]:
        """What sorts runs: time, then number; one that is not kept would get the next number."""
        return self.time, math.inf if self.id is None else self.id

    @property
    def baseline(self) -> bool:
        """It may serve as a baseline, and nobody took it out."""
        return self.trusted and not self.poisoned


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One value of a metric at a step, or without one."""

    metric: str
    step: int | None = None
    value: float | None
    mark: str = ""
    """Empty for a finite number; `nan`, `inf`, `-inf`, `null`, or `text` for what is no number at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunValue:
    """One metric in one run, taken as one value."""

    run: StoredRun
    value: float | None
    """None where the points allow none, as the mean of points with a NaN."""
    mark: str
    """Empty when every point is finite, otherwise the first mark among them: a finite last point does not hide a NaN before it."""
    count: int


def point(metric: str, value: Any, step: int | None = None) -> Point:
    """A point from any JSON value; what is no finite number gets its mark."""
    if type(value) is float and math.isfinite(value):  # nearly all are
        return Point(metric=metric, step=step, value=value)
    if isinstance(value, str):
        value = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}.get(value, value)
    if value is None:
        return Point(metric=metric, step=step, value=None, mark="null")
    if isinstance(value, bool | int | float):
        try:
            number = float(value)
        except OverflowError:
            return Point(metric=metric, step=step, value=None, mark="inf" if value > 0 else "-inf")
        if math.isfinite(number):
            return Point(metric=metric, step=step, value=number)
        return Point(metric=metric, step=step, value=None, mark="nan" if math.isnan(number) else "inf" if number > 0 else "-inf")
    return Point(metric=metric, step=step, value=None, mark="text")


class RunFilter(TypedDict, total=False):
    """Which runs; None asks for nothing. Called as the options of the command line are."""

    project: str | None
    name: str | None
    machine: str | None
    kind: str | None
    branch: str | None


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
_FIELDS = tuple(field.name for field in fields(StoredRun))  # in the order of RUN
STATED = tuple("commit_id" if name == "commit" else name for name in _FIELDS[1:-2])
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


def prepare_tables(store: sqlite3.Connection, path: Path, *, write: bool) -> None:
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


def row_of(run: StoredRun) -> tuple[object, ...]:
    """A run as a row, without its number."""
    cells = (getattr(run, name) for name in _FIELDS[1:])
    return tuple(str(cell) if isinstance(cell, Kind) else cell for cell in cells)


def run_of(row: Sequence[Any]) -> StoredRun:
    found = dict(zip(_FIELDS, row, strict=True))
    passed = None if found["passed"] is None else bool(found["passed"])
    own = {"kind": Kind(found["kind"]), "dirty": bool(found["dirty"]), "passed": passed, "trusted": bool(found["trusted"])}
    return StoredRun(**{**found, **own})


def where_clause(*, commit: str | None = None, baseline: bool = False, **equal: object) -> tuple[str, tuple[object, ...]]:
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


WAIT_S = 30.0


class Store:
    """An open store; use it as a context manager."""

    def __init__(self, path: Path, *, write: bool) -> None:
        self.path = path
        self.write = write
        self._known: dict[str, int] = {}
        self._redactor = LazyRedactor(os.environ)
        if not write and not path.is_file():
            raise UserError(f"{path}: no history there yet", "import runs first: seatrial history import PATH")
        with self._told():
            if write:
                path.parent.mkdir(parents=True, exist_ok=True)
            self._open = sqlite3.connect(path, timeout=WAIT_S, isolation_level=None)
            try:
                prepare_tables(self._open, path, write=write)
            except BaseException:
                self._open.close()
                raise

    def __enter__(self) -> Store:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._open.close()

    def add(self, run: StoredRun, points: Iterable[Point], *, again: bool = False) -> bool:
        """Keep a run, in one transaction; False when it is there already. With `again`, an earlier import of the same run with other
        content (same source and start: a trial that was resumed, a campaign that went on) makes way for this one; a mark on it stays."""
        return self.add_all([(run, points, again)])[0]

    def add_all(self, items: Iterable[tuple[StoredRun, Iterable[Point], bool]]) -> list[bool]:
        """Keep several runs in one transaction, each as `add` does: all of them or, when the writer is killed, none. Series of many runs
        are written in the order of the table, so that its pages are written once and not once per run."""
        made = [(self._cleared(run), again, *rows_of(points)) for run, points, again in items]
        numbers, pending, new = dict(self._known), list[tuple[object, ...]](), list[bool]()
        with self._transaction():
            for run, again, rows, series in made:
                if self._open.execute("SELECT 1 FROM runs WHERE digest = ?", (run.digest,)).fetchone():
                    new.append(False)
                    continue
                if again:
                    self._write_series(pending)
                    run = self._replaced(run)
                if names := self._names(series):
                    rows = [(names.get(row[0], row[0]), *row[1:]) for row in rows]
                    series = {names.get(metric, metric): found for metric, found in series.items()}
                key = self._open.execute(INSERT_RUN, row_of(run)).lastrowid
                self._number(series, numbers)
                self._open.executemany(
                    "INSERT INTO points VALUES (?, ?, ?, ?, ?, ?)",
                    ((key, numbers[metric], place, step, value, mark) for metric, place, step, value, mark in rows),
                )
                pending += [(numbers[metric], key, *found) for metric, found in series.items()]
                new.append(True)
            self._write_series(pending)
        self._known = numbers
        return new

    def runs(
        self, *, commit: str | None = None, trusted: bool = False, limit: int | None = None, **of: Unpack[RunFilter]
    ) -> list[StoredRun]:
        """Runs by time, the oldest first; `commit` is a prefix; `limit` takes the latest; `trusted` takes baselines only."""
        where, values = where_clause(commit=commit, baseline=trusted, **of)
        text = f"SELECT {RUN} FROM runs WHERE {where} ORDER BY time DESC, id DESC LIMIT ?"
        found = self._rows(text, (*values, -1 if limit is None else limit), RUN_CELLS)
        return [run_of(row) for row in reversed(found)]

    def run(self, key: int) -> StoredRun | None:
        found = self._rows(f"SELECT {RUN} FROM runs WHERE id = ?", (key,), RUN_CELLS)
        return run_of(found[0]) if found else None

    def by_digest(self, digest: str) -> StoredRun | None:
        found = self._rows(f"SELECT {RUN} FROM runs WHERE digest = ?", (digest,), RUN_CELLS)
        return run_of(found[0]) if found else None

    def distinct(self, column: str, of: Mapping[str, str]) -> list[str]:
        """What runs have in a column (`project`, `name`, `machine`, `kind` or `branch`), sorted; `of` are the words of other columns."""
        where, values = where_clause(commit=None, baseline=False, **of)
        text = f"SELECT DISTINCT {column} FROM runs WHERE {where} AND {column} IS NOT NULL ORDER BY {column}"
        return [row[0] for row in self._rows(text, values, (TEXT,))]

    def metrics(self, project: str | None = None, pattern: str | None = None) -> list[str]:
        """Names of metrics, sorted. `*` and `?` stand for anything; `[` for itself, since keys of parametrised tests hold it."""
        if project is None:
            names = [row[0] for row in self._rows("SELECT name FROM metrics ORDER BY name", (), (TEXT,))]
        else:
            text = (
                "SELECT name FROM metrics m WHERE EXISTS (SELECT 1 FROM series s JOIN runs r ON r.id = s.run"
                " WHERE s.metric = m.id AND r.project = ?) ORDER BY name"
            )
            names = [row[0] for row in self._rows(text, (project,), (TEXT,))]
        if pattern is None:
            return names
        if pattern in names:
            return [pattern]
        keeps = re.compile(fnmatch.translate(pattern.replace("[", "[[]"))).match
        return [name for name in names if keeps(name)]

    def values(
        self, metric: str, *, take: Take = "last", trusted: bool = False, limit: int | None = None, **of: Unpack[RunFilter]
    ) -> list[RunValue]:
        """One value of the metric per run that has it, by time, the oldest first; `limit` takes the latest runs; `trusted` takes
        baselines only (trusted and not poisoned)."""
        where, found = where_clause(baseline=trusted, **of)
        text = (
            f"SELECT s.{TAKEN[take]}, s.mark, s.count, {RUN} FROM series s JOIN runs ON runs.id = s.run"
            f" WHERE s.metric = (SELECT id FROM metrics WHERE name = ?) AND {where} ORDER BY time DESC, runs.id DESC LIMIT ?"
        )
        rows = self._rows(text, (metric, *found, -1 if limit is None else limit), (*VALUE_CELLS, *RUN_CELLS))
        return [RunValue(value=row[0], mark=row[1], count=row[2], run=run_of(row[3:])) for row in reversed(rows)]

    def of_run(self, key: int, *, take: Take = "last") -> dict[str, RunValue]:
        run = self.run(key)
        if run is None:
            return {}
        text = f"SELECT m.name, s.{TAKEN[take]}, s.mark, s.count FROM series s JOIN metrics m ON m.id = s.metric WHERE s.run = ?"
        rows = self._rows(text + " ORDER BY m.name", (key,), (TEXT, *VALUE_CELLS))
        return {name: RunValue(run=run, value=value, mark=mark, count=count) for name, value, mark, count in rows}

    def points(self, key: int, metric: str) -> list[Point]:
        which = "run = ? AND metric = (SELECT id FROM metrics WHERE name = ?)"
        found = self._rows(f"SELECT step, value, mark FROM points WHERE {which} ORDER BY place", (key, metric), POINT_CELLS)
        if not found:  # a single value without a step stands in series alone
            found = self._rows(f"SELECT NULL, last, mark FROM series WHERE {which}", (key, metric), POINT_CELLS)
        return [Point(metric=metric, step=step, value=value, mark=mark) for step, value, mark in found]

    def count(self, metric: str, **of: Unpack[RunFilter]) -> int:
        where, found = where_clause(**of)
        text = "SELECT count(*) FROM series s JOIN runs ON runs.id = s.run WHERE s.metric = (SELECT id FROM metrics m WHERE m.name = ?)"
        text += f" AND {where}"
        return int(self._rows(text, (metric, *found), (WHOLE,))[0][0])

    def mark(self, key: int, reason: str) -> bool:
        """Take a run out of the baselines, for a reason; False when there is no such run. Its values stay."""
        with self._transaction():
            return self._open.execute("UPDATE runs SET poisoned = ? WHERE id = ?", (self._redactor.text(reason), key)).rowcount == 1

    def restate(self, run: StoredRun) -> None:
        """Write anew what is known of a run that is there already, found by its digest; points and mark stay."""
        row = row_of(self._cleared(run))[:-2]  # all but digest and mark
        columns = ", ".join(f"{name} = ?" for name in STATED)
        with self._transaction():
            self._open.execute(f"UPDATE runs SET {columns} WHERE digest = ?", (*row, run.digest))

    def _cleared(self, run: StoredRun) -> StoredRun:
        """The run without secrets in its names: a branch, a path or an import option may hold one."""
        clear = self._redactor.tokens
        return replace(
            run,
            project=clear(run.project),
            name=clear(run.name),
            branch=run.branch and clear(run.branch),
            machine=clear(run.machine),
            source=clear(run.source),
            why_untrusted=self._redactor.text(run.why_untrusted),
        )

    def _names(self, metrics: Iterable[str]) -> dict[str, str]:
        """What metrics are called whose names hold a secret; names that become the same get a number."""
        names, used = dict[str, str](), set(metrics)
        for metric in sorted(used):
            first = name = self._redactor.tokens(metric)
            while name != metric and name in used:
                name = f"{first}#{len(used)}"
            if name != metric:
                names[metric] = name
                used.add(name)
        return names

    def _replaced(self, run: StoredRun) -> StoredRun:
        """Remove earlier imports of the run; the new one keeps a mark on them."""
        same = (run.project, run.kind, run.name, run.source, run.time)
        found = self._rows(
            "SELECT id, poisoned FROM runs WHERE project = ? AND kind = ? AND name = ? AND source = ? AND time = ?", same, (WHOLE, TEXT)
        )
        for key, poisoned in found:
            for table in ("points", "series"):
                self._open.execute(f"DELETE FROM {table} WHERE run = ?", (key,))
            self._open.execute("DELETE FROM runs WHERE id = ?", (key,))
            run = replace(run, poisoned=run.poisoned or poisoned)
        return run

    def _write_series(self, pending: list[tuple[object, ...]]) -> None:
        """Write and forget what is pending, in the order of the table: neighbours are written together."""
        pending.sort(key=lambda row: row[:2])
        self._open.executemany("INSERT INTO series VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", pending)
        pending.clear()

    def _number(self, metrics: Iterable[str], numbers: dict[str, int]) -> None:
        """Add the number of every metric that has none in `numbers`; one that was given out never changes."""
        new = [name for name in metrics if name not in numbers]
        self._open.executemany("INSERT OR IGNORE INTO metrics (name) VALUES (?)", ((name,) for name in new))
        for name in new:
            numbers[name] = self._open.execute("SELECT id FROM metrics WHERE name = ?", (name,)).fetchone()[0]

    def _rows(self, text: str, values: Sequence[object], cells: Sequence[Cell]) -> list[tuple[Any, ...]]:
        """The rows of a query; a cell that is not as we write it is damage, like a page that sqlite cannot read."""
        with self._told():
            found = self._open.execute(text, values).fetchall()
            for row in found:
                require_cells(row, cells)
            return found

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """All or nothing; the lock is taken at once, so that what was read holds until it is written."""
        with self._told():
            self._open.execute("BEGIN IMMEDIATE")
            try:
                yield
            except BaseException:
                self._open.execute("ROLLBACK")
                raise
            self._open.execute("COMMIT")

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Errors of sqlite and of the file system, with the file and what to do."""
        try:
            yield
        except (sqlite3.Error, OSError, OverflowError, UnicodeError) as error:
            fix = (
                "if it is damaged, set the file aside and import the runs again"
                if isinstance(error, sqlite3.DatabaseError | UnicodeError)
                else ""
            )
            if "locked" in str(error) or "busy" in str(error):
                fix = f"another process held it for {WAIT_S:.0f} s; try again"
            raise UserError(f"{self.path}: history: {error}", fix or "name another file with --store") from error


_SHOWN = 5


def require(store: Store, **of: Unpack[RunFilter]) -> None:
    """Raise a UserError unless a run is of all that is given; it names the first option that leaves none, and what the runs have."""
    before: dict[str, str] = {}
    for option, word in _given(of).items():
        there = store.distinct(option, before)
        if word not in there:
            where = f"those of {_told(before)}" if before else "all"
            known = ", ".join(map(repr, there[:_SHOWN])) + (f", … ({len(there)} in all)" if len(there) > _SHOWN else "")
            fix = f"--{option} takes one of: {known}" if there else "import runs first: seatrial history import PATH"
            raise UserError(f"--{option} {word}: no run of this {option} among {where} in {store.path}", fix)
        before[option] = word


def require_of(run: StoredRun, **of: Unpack[RunFilter]) -> None:
    """Raise a UserError unless this run is of all that is given."""
    for option, word in _given(of).items():
        own = getattr(run, option)
        if own != word:
            raise UserError(f"--{option} {word}: run {run.id} is of {option} {own!r}", f"leave --{option} out, or name another run")


def none_has(what: str, **of: Unpack[RunFilter]) -> str:
    """The sentence for metrics that no run has among those that are chosen."""
    given = _told(_given(of))
    return f"no run has {what}" + (f" among those of {given}" if given else "")


def _told(given: Mapping[str, str]) -> str:
    return " ".join(f"--{option} {word}" for option, word in given.items())


def _given(of: RunFilter) -> dict[str, str]:
    """Options and their words, in one order; an empty word is one, too."""
    return {option: str(of.get(option)) for option in RunFilter.__annotations__ if of.get(option) is not None}


@dataclass(frozen=True, slots=True)
class BaselineGroup:
    """One metric of runs that share a baseline, by time."""

    metric: str
    runs: tuple[StoredRun, ...]
    values: tuple[float, ...]
    left_out: tuple[RunValue, ...]
    """Runs whose value is no finite number."""

    @property
    def title(self) -> str:
        """The metric and what the runs share."""
        run = self.runs[0] if self.runs else self.left_out[0].run
        return " · ".join(filter(None, (self.metric, run.project, run.kind.value, run.name, run.machine)))

    def told(self) -> list[str]:
        """What was left out."""
        marks = [f"run {value.run.id}: {value.mark or value.value}" for value in self.left_out]
        shown = ", ".join(marks[:5]) + (f", … ({len(marks)} in all)" if len(marks) > 5 else "")
        return [f"  not used, no finite number: {shown}"] if marks else []


def groups(
    store: Store,
    patterns: Sequence[str],
    *,
    take: Take,
    trusted: bool = False,
    poisoned: bool = False,
    last: int | None = None,
    **of: Unpack[RunFilter],
) -> Iterator[BaselineGroup]:
    """The groups of all metrics that the patterns take; runs that are poisoned only where asked for."""
    require(store, **of)
    for pattern in patterns:
        metrics = store.metrics(of.get("project"), pattern)
        if not metrics:
            raise UserError(f"no metric matches {pattern!r} in {store.path}", "seatrial history show '*' lists metrics")
        found = 0
        for metric in metrics:
            split: dict[tuple[str, str, str, str], list[RunValue]] = {}
            for value in store.values(metric, take=take, trusted=trusted, **of):
                if poisoned or not value.run.poisoned:
                    split.setdefault((value.run.project, value.run.kind, value.run.name, value.run.machine), []).append(value)
            for values in split.values():
                found += 1
                chosen = values[-last:] if last else values
                runs, numbers, left_out = list[StoredRun](), list[float](), list[RunValue]()
                for one in chosen:
                    if one.mark or one.value is None or not math.isfinite(one.value):
                        left_out.append(one)
                    else:
                        runs.append(one.run)
                        numbers.append(one.value)
                yield BaselineGroup(metric, tuple(runs), tuple(numbers), tuple(left_out))
        if not found:
            raise UserError(none_has(repr(pattern), **of), "without --name and --machine, or with --every")
