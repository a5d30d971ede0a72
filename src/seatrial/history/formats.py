"""Runs and metrics as lines of text, JSON, CSV or Parquet."""

from __future__ import annotations

import csv
import io
import json
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from seatrial.core.errors import UserError
from seatrial.core.text import counted
from seatrial.history.store import Kind, RunValue, Store, StoredRun, Take

_NEAREST = 5


def chosen(store: Store, patterns: Sequence[str], project: str | None = None) -> list[str]:
    """The metrics that the patterns name, each once; a pattern that names none is an error."""
    found: dict[str, None] = {}
    for pattern in patterns:
        names = store.metrics(project, pattern)
        if not names:
            where = f" in project {project}" if project else ""
            raise UserError(f"no metric {pattern!r}{where}", _nearest(pattern, store.metrics(project)))
        found |= dict.fromkeys(names)
    return list(found)


def _nearest(pattern: str, names: list[str]) -> str:
    """By words first: the last part of a test's metric is what people remember."""
    import difflib

    if not names:
        return "there is none at all; import runs that have metrics: seatrial history import PATH"
    word = pattern.strip("*")
    inside = [name for name in names if word and word in name]
    close = difflib.get_close_matches(pattern, names[:20_000], n=_NEAREST, cutoff=0.4)
    if near := list(dict.fromkeys([*inside[:_NEAREST], *close]))[:_NEAREST]:
        return f"nearest: {', '.join(near)}"
    return f"{counted(len(names), 'metric')} in all, such as {', '.join(names[:_NEAREST])}"


def number(value: float | None, mark: str = "") -> str:
    if value is None:
        return mark or "-"
    return f"{value:.7g}" + (f" ({mark} among the points)" if mark else "")


def stamp(run: StoredRun) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(run.time))


def marks(run: StoredRun) -> str:
    """What limits a run as a baseline."""
    if run.poisoned:
        return f"poisoned: {run.poisoned}"
    return "trusted" if run.trusted else f"not trusted: {run.why_untrusted}"


def columns(rows: Iterable[Sequence[str]]) -> list[str]:
    """Rows with their columns under each other; the last is not padded."""
    table = [list(row) for row in rows]
    if not table:
        return []
    widths = [max(len(row[place]) for row in table) for place in range(len(table[0]) - 1)]
    return ["  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]).rstrip() for row in table]


def metric_lines(metric: str, values: list[RunValue], take: Take, total: int) -> list[str]:
    head = f"{metric} ({take})"
    if total > len(values):
        head += f": the last {len(values)} of {counted(total, 'run')}"
    rows = [("run", "time", "commit", "branch", "value", "points", "what", "marks")]
    for one in values:
        run = one.run
        commit = (run.commit or "-")[:10] + ("+" if run.dirty and run.commit else "")
        what = f"{run.project} {run.kind} {run.name}"
        rows.append((str(run.id), stamp(run), commit, run.branch or "-", number(one.value, one.mark), str(one.count), what, marks(run)))
    return [head, *columns(rows), ""]


def point_lines(store: Store, run: StoredRun, metric: str) -> list[str]:
    points = store.points(run.id or 0, metric)
    rows = [("step", "value"), *((str(one.step if one.step is not None else "-"), number(one.value, one.mark)) for one in points)]
    return [f"{metric}: run {run.id}, {stamp(run)}, {counted(len(points), 'point')}", *columns(rows), ""]


def run_lines(runs: list[StoredRun]) -> list[str]:
    rows = [("run", "time", "project", "kind", "name", "commit", "branch", "passed", "machine", "marks")]
    for run in runs:
        passed = "-" if run.passed is None else "yes" if run.passed else "no"
        commit = (run.commit or "-")[:10] + ("+" if run.dirty and run.commit else "")
        rows.append(
            (str(run.id), stamp(run), run.project, str(run.kind), run.name, commit, run.branch or "-", passed, run.machine, marks(run))
        )
    return columns(rows)


_TEST = re.compile(r"(.+?::[^/\[]+(?:\[.*\])?)/(.+)", re.DOTALL)
"""A test's key ends with its function and parameters; what follows the next slash is the metric."""
_WORDS = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}
_OF_RUN = ("run", "start_time", "project", "kind", "name", "git_commit", "git_branch", "git_dirty", "machine", "passed", "trusted")
COLUMNS = (*_OF_RUN, "poisoned", "metric", "step", "value", "mark", "points")
FORMATS = ("json", "csv", "parquet")


def as_json(store: Store, runs: Sequence[StoredRun], metrics: set[str] | None, take: Take) -> Iterator[str]:
    """One line per run that has one of the metrics (all of them: None)."""
    for run in runs:
        found = {name: one for name, one in store.of_run(run.id or 0, take=take).items() if metrics is None or name in metrics}
        if found or metrics is None:
            yield json.dumps(_object(run, found), ensure_ascii=False, allow_nan=False)


def _object(run: StoredRun, found: dict[str, RunValue]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for name, one in found.items():
        parts = _TEST.fullmatch(name) if run.kind is Kind.TEST else None
        if parts:
            nested.setdefault(parts[1], {})[parts[2]] = _plain(one)
        else:
            nested[name] = _plain(one)
    return {
        "exit_status": None if run.passed is None else int(not run.passed),
        "git_commit": run.commit,
        "start_time": stamp(run),
        "metrics": nested,
        "git_branch": run.branch,
        "git_dirty": run.dirty,
        "project": run.project,
        "kind": str(run.kind),
        "name": run.name,
        "machine": run.machine,
        "trusted": run.trusted,
        "why_untrusted": run.why_untrusted,
        "poisoned": run.poisoned,
        "run": run.id,
        "marks": {name: one.mark for name, one in found.items() if one.mark},
    }


def _plain(one: RunValue) -> float | str | None:
    return _WORDS.get(one.mark) if one.value is None else one.value


def rows(store: Store, runs: Sequence[StoredRun], metrics: set[str] | None, take: Take, *, points: bool) -> Iterator[tuple[Any, ...]]:
    """Flat rows, in the order of `COLUMNS`."""
    for run in runs:
        tree = (run.commit, run.branch, run.dirty)
        start = (run.id, stamp(run), run.project, str(run.kind), run.name, *tree, run.machine, run.passed, run.trusted, run.poisoned)
        for name, one in store.of_run(run.id or 0, take=take).items():
            if metrics is not None and name not in metrics:
                continue
            if not points:
                yield (*start, name, None, one.value, one.mark, one.count)
                continue
            for point in store.points(run.id or 0, name):
                yield (*start, name, point.step, point.value, point.mark, one.count)


def as_csv(found: Iterator[tuple[Any, ...]]) -> Iterator[str]:
    """Lines with a header; floats in full precision."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(COLUMNS)
    for row in found:
        writer.writerow([repr(cell) if isinstance(cell, float) else cell for cell in row])
        if buffer.tell() > 1 << 16:
            yield buffer.getvalue()
            buffer.seek(0)
            buffer.truncate()
    yield buffer.getvalue()


def as_parquet(found: Iterator[tuple[Any, ...]]) -> bytes:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise UserError("Parquet needs pyarrow, which is not installed", "pip install 'seatrial[rollouts]'") from error
    kinds = {"run": pyarrow.int64(), "step": pyarrow.int64(), "points": pyarrow.int64(), "value": pyarrow.float64()}
    kinds |= dict.fromkeys(("git_dirty", "passed", "trusted"), pyarrow.bool_())
    cells = list(zip(*found, strict=True)) or [()] * len(COLUMNS)
    arrays = [pyarrow.array(column, kinds.get(name, pyarrow.string())) for name, column in zip(COLUMNS, cells, strict=True)]
    sink = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(arrays, names=list(COLUMNS)), sink)
    return sink.getvalue()
