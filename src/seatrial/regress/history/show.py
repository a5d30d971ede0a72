"""Metrics and runs as lines of text.

- A value that is no finite number is shown by its mark, never left out.
- `*` after a run says that it is a baseline; what was marked by a person shows its reason.
- A metric that is unknown is an error that names the nearest ones.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from seatrial.model.errors import UserError
from seatrial.model.words import counted
from seatrial.regress.history.record import Run, RunValue, Take
from seatrial.regress.history.store import Store

_NEAREST = 5


def chosen(store: Store, patterns: Sequence[str], project: str | None = None) -> list[str]:
    """The metrics that the patterns name, each once; a pattern that names none is an error."""
    found: dict[str, None] = {}
    for pattern in patterns:
        names = store.metrics(project, pattern)
        if not names:
            raise UserError(_unknown(pattern, project), _nearest(pattern, store.metrics(project)))
        found |= dict.fromkeys(names)
    return list(found)


def _unknown(pattern: str, project: str | None) -> str:
    return f"no metric {pattern!r}" + (f" in project {project}" if project else "")


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
    """A value for a table: seven digits, or its mark."""
    if value is None:
        return mark or "-"
    return f"{value:.7g}" + (f" ({mark} among the points)" if mark else "")


def stamp(run: Run) -> str:
    """When it started, by the clock of this place."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(run.time))


def marks(run: Run) -> str:
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
    """One metric over runs."""
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


def point_lines(store: Store, run: Run, metric: str) -> list[str]:
    """Every point of a metric in one run."""
    points = store.points(run.id or 0, metric)
    rows = [("step", "value"), *((str(one.step if one.step is not None else "-"), number(one.value, one.mark)) for one in points)]
    return [f"{metric}: run {run.id}, {stamp(run)}, {counted(len(points), 'point')}", *columns(rows), ""]


def run_lines(runs: list[Run]) -> list[str]:
    """Runs, one line each."""
    rows = [("run", "time", "project", "kind", "name", "commit", "branch", "passed", "machine", "marks")]
    for run in runs:
        passed = "-" if run.passed is None else "yes" if run.passed else "no"
        commit = (run.commit or "-")[:10] + ("+" if run.dirty and run.commit else "")
        rows.append(
            (str(run.id), stamp(run), run.project, str(run.kind), run.name, commit, run.branch or "-", passed, run.machine, marks(run))
        )
    return columns(rows)
