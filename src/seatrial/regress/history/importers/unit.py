"""unit_results.json: what the tracker wrote, ours or that of the guide it follows.

- A metric is `<test key>/<name>`; coverage is `coverage`, where it is a number.
- The session passed only with exit status 0 and without a test that failed: a file that says both contradicts itself, which is told.
  One failed test leaves the whole session out of the baselines.
- The machine is what the file says, or its GPUs; never the machine on which it is imported.
- The older schema names neither branch nor the state of the tree: such a run is trusted only if a person states both.
"""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

from seatrial.model.errors import UserError
from seatrial.regress.history.importers.draft import Draft, Tree, commit_in, digest_of, parse, read_bytes
from seatrial.regress.history.record import Kind, Point, point
from seatrial.regress.unit.machine import counted

NAME = "unit"
_FIX = "give the file as the tracker wrote it"
_GOOD = {"passed", "skipped", "xfailed", "xpassed"}
"""Outcomes of a session that passed; pytest decides by the exit status what an xpass is."""
_SHOWN = 3
"""So many tests are named."""


def looks(data: Any) -> bool:
    """Whether parsed JSON is such a file."""
    return isinstance(data, dict) and {"metrics", "start_time", "exit_status"} <= data.keys()


def read(path: Path, content: bytes | None = None) -> Draft:
    """The session."""
    content = read_bytes(path) if content is None else content
    data = parse(path, content)
    if not looks(data):
        raise UserError(f"{path}: lacks metrics, start_time or exit_status", _FIX)
    gpus = data.get("gpu_types")
    known = [str(gpu) for gpu in gpus] if isinstance(gpus, list) else []
    status, dirty, branch = data["exit_status"], data.get("git_dirty"), data.get("git_branch")
    project, said = data.get("project"), data.get("machine")
    ended, failed = type(status) is int and status == 0, _failed(path, data)
    return Draft(
        kind=Kind.TEST,
        project=project if isinstance(project, str) and project else None,
        name=NAME,
        trees=(
            Tree(
                commit=commit_in(data.get("git_commit")),
                branch=branch if isinstance(branch, str) and branch else None,
                dirty=dirty if isinstance(dirty, bool) else None,
                path=path.parent,
            ),
        ),
        time=_time(path, data["start_time"]),
        machine=said if isinstance(said, str) and said else counted(known),
        passed=ended and not failed,
        source=path,
        digest=digest_of(Kind.TEST, content),
        points=_points(path, data),
        flaws=[f"exit_status is 0, but {failed}"] if ended and failed else [],
    )


def _failed(path: Path, data: dict[str, Any]) -> str:
    """Which tests failed, by `outcomes` (of tests that tracked) and `tests` (counts of all); empty where none did, or nobody says."""
    outcomes, counts = (_table(path, data, name) for name in ("outcomes", "tests"))
    bad = [f"{test} ({outcome})" for test, outcome in outcomes.items() if not _good(outcome)]
    if bad:
        more = f", … ({len(bad)} in all)" if len(bad) > _SHOWN else ""
        return f"outcomes say otherwise: {', '.join(bad[:_SHOWN])}{more}"
    some = [f"{count} {outcome}" for outcome, count in counts.items() if not _good(outcome) and count != 0]
    return f"tests say otherwise: {', '.join(some)}" if some else ""


def _good(outcome: Any) -> bool:
    return isinstance(outcome, str) and outcome in _GOOD


def _table(path: Path, data: dict[str, Any], name: str) -> dict[str, Any]:
    """A table that the older schema lacks; anything else in its place cannot be judged, and must not be passed over."""
    found = data.get(name, {})
    if not isinstance(found, dict):
        raise UserError(f"{path}: {name}: is no table", _FIX)
    return found


def _time(path: Path, value: Any) -> float:
    for form in ("%Y-%m-%d %H:%M:%S", "%Y-%m-%d %H:%M:%S.%f"):
        try:
            return datetime.strptime(str(value), form).timestamp()
        except (ValueError, OverflowError, OSError):
            continue
    raise UserError(f"{path}: start_time: {value!r} is no time", "write it as 2025-03-24 23:34:12")


def _points(path: Path, data: dict[str, Any]) -> list[Point]:
    metrics = data["metrics"]
    if not isinstance(metrics, dict):
        raise UserError(f"{path}: metrics: is no table of tests", _FIX)
    points = []
    for test, table in metrics.items():
        if not isinstance(table, dict):
            raise UserError(f"{path}: metrics[{test!r}]: is no table of metrics", _FIX)
        points += [point(f"{test}/{name}", value) for name, value in table.items()]
    coverage = data.get("coverage")
    if isinstance(coverage, int | float) and not isinstance(coverage, bool):
        points.append(point("coverage", coverage))
    return points
