"""The history as JSON, CSV or Parquet.

- JSON is one object per run and line, in the schema of unit_results.json: one-liners that read such files read this one too.
- CSV and Parquet have one row per metric and run; with points, one per step.
- A value that is no finite number keeps its mark: NaN and infinities as marked strings in JSON, a column `mark` elsewhere.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from seatrial.model.errors import UserError
from seatrial.regress.history.record import Kind, Run, RunValue, Take
from seatrial.regress.history.show import stamp
from seatrial.regress.history.store import Store

_TEST = re.compile(r"(.+?::[^/\[]+(?:\[.*\])?)/(.+)", re.DOTALL)
"""A test's key ends with its function and parameters; what follows the next slash is the metric."""
_WORDS = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}
_OF_RUN = ("run", "start_time", "project", "kind", "name", "git_commit", "git_branch", "git_dirty", "machine", "passed", "trusted")
COLUMNS = (*_OF_RUN, "poisoned", "metric", "step", "value", "mark", "points")
FORMATS = ("json", "csv", "parquet")


def as_json(store: Store, runs: Sequence[Run], metrics: set[str] | None, take: Take) -> Iterator[str]:
    """One line per run that has one of the metrics (all of them: None)."""
    for run in runs:
        found = {name: one for name, one in store.of_run(run.id or 0, take=take).items() if metrics is None or name in metrics}
        if found or metrics is None:
            yield json.dumps(_object(run, found), ensure_ascii=False, allow_nan=False)


def _object(run: Run, found: dict[str, RunValue]) -> dict[str, Any]:
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


def rows(store: Store, runs: Sequence[Run], metrics: set[str] | None, take: Take, *, points: bool) -> Iterator[tuple[Any, ...]]:
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
    """One table."""
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
