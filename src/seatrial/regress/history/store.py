"""The store: one sqlite file that many processes write into and read from at once.

- A run and its points are written in one transaction: a writer that is killed leaves the whole run or nothing of it.
- Writers wait for one another (WAL, busy timeout 30 s); a run whose digest is there already is not written again.
- `series` holds first, last, mean, least, greatest and count of every metric of every run, made when the run is written: what is
  asked over many runs never reads points.
- Reading makes nothing: a store that is absent is an error, not an empty one.
- The schema has a version; a store of a newer Seatrial is refused, never guessed at.
"""

from __future__ import annotations

import fnmatch
import os
import re
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from seatrial.evidence.lazy_redactor import LazyRedactor
from seatrial.model.errors import UserError
from seatrial.regress.history import tables
from seatrial.regress.history.record import Kind, Point, Run, RunValue, Take

WAIT_S = 30.0
"""How long a writer waits for another one."""


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
                tables.prepare(self._open, path, write=write)
            except BaseException:
                self._open.close()
                raise

    def __enter__(self) -> Store:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._open.close()

    def add(self, run: Run, points: Iterable[Point], *, again: bool = False) -> bool:
        """Keep a run, in one transaction; False when it is there already.

        With `again`, an earlier import of the same run with other content (same source and start: a trial that was resumed, a
        campaign that went on) makes way for this one; a mark on it stays.
        """
        return self.add_all([(run, points, again)])[0]

    def add_all(self, items: Iterable[tuple[Run, Iterable[Point], bool]]) -> list[bool]:
        """Keep several runs in one transaction, each as `add` does: all of them or, when the writer is killed, none.

        Series of many runs are written in the order of the table, so that its pages are written once and not once per run.
        """
        made = [(self._cleared(run), again, *tables.rows_of(points)) for run, points, again in items]
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
                key = self._open.execute(tables.INSERT_RUN, tables.row_of(run)).lastrowid
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
        self,
        *,
        project: str | None = None,
        kind: Kind | None = None,
        name: str | None = None,
        machine: str | None = None,
        commit: str | None = None,
        branch: str | None = None,
        trusted: bool = False,
        limit: int | None = None,
    ) -> list[Run]:
        """Runs by time, the oldest first; `commit` is a prefix; `limit` takes the latest; `trusted` takes baselines only."""
        where, values = tables.filters(
            project=project, kind=kind, name=name, machine=machine, branch=branch, commit=commit, baseline=trusted
        )
        text = f"SELECT {tables.RUN} FROM runs WHERE {where} ORDER BY time DESC, id DESC LIMIT ?"
        found = self._rows(text, (*values, -1 if limit is None else limit), tables.RUN_CELLS)
        return [tables.run_of(row) for row in reversed(found)]

    def run(self, key: int) -> Run | None:
        """The run of a number."""
        found = self._rows(f"SELECT {tables.RUN} FROM runs WHERE id = ?", (key,), tables.RUN_CELLS)
        return tables.run_of(found[0]) if found else None

    def by_digest(self, digest: str) -> Run | None:
        """The run of a digest."""
        found = self._rows(f"SELECT {tables.RUN} FROM runs WHERE digest = ?", (digest,), tables.RUN_CELLS)
        return tables.run_of(found[0]) if found else None

    def distinct(self, column: str, of: Mapping[str, str]) -> list[str]:
        """What runs have in a column (`project`, `name`, `machine`, `kind` or `branch`), sorted; `of` are the words of other columns."""
        where, values = tables.filters(commit=None, baseline=False, **of)
        text = f"SELECT DISTINCT {column} FROM runs WHERE {where} AND {column} IS NOT NULL ORDER BY {column}"
        return [row[0] for row in self._rows(text, values, (tables.TEXT,))]

    def metrics(self, project: str | None = None, pattern: str | None = None) -> list[str]:
        """Names of metrics, sorted. `*` and `?` stand for anything; `[` for itself, since keys of parametrised tests hold it."""
        if project is None:
            names = [row[0] for row in self._rows("SELECT name FROM metrics ORDER BY name", (), (tables.TEXT,))]
        else:
            text = (
                "SELECT name FROM metrics m WHERE EXISTS (SELECT 1 FROM series s JOIN runs r ON r.id = s.run"
                " WHERE s.metric = m.id AND r.project = ?) ORDER BY name"
            )
            names = [row[0] for row in self._rows(text, (project,), (tables.TEXT,))]
        if pattern is None:
            return names
        if pattern in names:
            return [pattern]
        keeps = re.compile(fnmatch.translate(pattern.replace("[", "[[]"))).match
        return [name for name in names if keeps(name)]

    def values(
        self,
        metric: str,
        *,
        project: str | None = None,
        kind: Kind | None = None,
        name: str | None = None,
        machine: str | None = None,
        take: Take = "last",
        trusted: bool = False,
        limit: int | None = None,
    ) -> list[RunValue]:
        """One value of the metric per run that has it, by time, the oldest first; `limit` takes the latest runs; `trusted` takes
        baselines only (trusted and not poisoned)."""
        where, found = tables.filters(project=project, kind=kind, name=name, machine=machine, baseline=trusted)
        text = (
            f"SELECT s.{tables.TAKEN[take]}, s.mark, s.count, {tables.RUN} FROM series s JOIN runs ON runs.id = s.run"
            f" WHERE s.metric = (SELECT id FROM metrics WHERE name = ?) AND {where} ORDER BY time DESC, runs.id DESC LIMIT ?"
        )
        rows = self._rows(text, (metric, *found, -1 if limit is None else limit), (*tables.VALUE_CELLS, *tables.RUN_CELLS))
        return [RunValue(value=row[0], mark=row[1], count=row[2], run=tables.run_of(row[3:])) for row in reversed(rows)]

    def of_run(self, key: int, *, take: Take = "last") -> dict[str, RunValue]:
        """All metrics of one run."""
        run = self.run(key)
        if run is None:
            return {}
        text = f"SELECT m.name, s.{tables.TAKEN[take]}, s.mark, s.count FROM series s JOIN metrics m ON m.id = s.metric WHERE s.run = ?"
        rows = self._rows(text + " ORDER BY m.name", (key,), (tables.TEXT, *tables.VALUE_CELLS))
        return {name: RunValue(run=run, value=value, mark=mark, count=count) for name, value, mark, count in rows}

    def points(self, key: int, metric: str) -> list[Point]:
        """The points of a metric in a run, in the order in which they were written."""
        which = "run = ? AND metric = (SELECT id FROM metrics WHERE name = ?)"
        found = self._rows(f"SELECT step, value, mark FROM points WHERE {which} ORDER BY place", (key, metric), tables.POINT_CELLS)
        if not found:  # a single value without a step stands in series alone
            found = self._rows(f"SELECT NULL, last, mark FROM series WHERE {which}", (key, metric), tables.POINT_CELLS)
        return [Point(metric=metric, step=step, value=value, mark=mark) for step, value, mark in found]

    def count(self, metric: str, *, project: str | None = None, name: str | None = None, machine: str | None = None) -> int:
        """How many runs have the metric."""
        where, found = tables.filters(project=project, name=name, machine=machine)
        text = "SELECT count(*) FROM series s JOIN runs ON runs.id = s.run WHERE s.metric = (SELECT id FROM metrics m WHERE m.name = ?)"
        text += f" AND {where}"
        return int(self._rows(text, (metric, *found), (tables.WHOLE,))[0][0])

    def mark(self, key: int, reason: str) -> bool:
        """Take a run out of the baselines, for a reason; False when there is no such run. Its values stay."""
        with self._transaction():
            return self._open.execute("UPDATE runs SET poisoned = ? WHERE id = ?", (self._redactor.text(reason), key)).rowcount == 1

    def restate(self, run: Run) -> None:
        """Write anew what is known of a run that is there already, found by its digest; points and mark stay."""
        row = tables.row_of(self._cleared(run))[:-2]  # all but digest and mark
        columns = ", ".join(f"{name} = ?" for name in tables.STATED)
        with self._transaction():
            self._open.execute(f"UPDATE runs SET {columns} WHERE digest = ?", (*row, run.digest))

    def unmark(self, key: int) -> bool:
        """Undo `mark`."""
        return self.mark(key, "")

    def _cleared(self, run: Run) -> Run:
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

    def _replaced(self, run: Run) -> Run:
        """Remove earlier imports of the run; the new one keeps a mark on them."""
        same = (run.project, run.kind, run.name, run.source, run.time)
        found = self._rows(
            "SELECT id, poisoned FROM runs WHERE project = ? AND kind = ? AND name = ? AND source = ? AND time = ?",
            same,
            (tables.WHOLE, tables.TEXT),
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

    def _rows(self, text: str, values: Sequence[object], cells: Sequence[tables.Cell]) -> list[tuple[Any, ...]]:
        """The rows of a query; a cell that is not as we write it is damage, like a page that sqlite cannot read."""
        with self._told():
            found = self._open.execute(text, values).fetchall()
            for row in found:
                tables.require_cells(row, cells)
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
