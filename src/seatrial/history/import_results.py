"""Importers of JSON results: benchmarks, pytest-benchmark and unit_results.json; and `Draft`, what every importer returns."""

from __future__ import annotations

import hashlib
import os
import platform
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import orjson

from seatrial.core.errors import UserError
from seatrial.core.guarded import BadValue, has_every_key, parse_json_once, parse_time, read_file
from seatrial.history.store import EARLIEST, LATEST, Kind, Point, point

_COMMIT = re.compile(r"[0-9a-f]{7,64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftTree:
    """The state of a repository that a run ran on, as far as the run says it."""

    commit: str | None = None
    branch: str | None = None
    dirty: bool | None = None
    path: Path | None = None
    """A checkout in which the commit can be looked up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """One run as its files tell it."""

    kind: Kind
    project: str | None = None
    name: str
    trees: tuple[DraftTree, ...] = ()
    time: float
    machine: str = ""
    """What it ran on; empty where the files do not say: never the machine on which they are read."""
    gpus: tuple[str, ...] = ()
    """GPUs that the files name, where they name no machine."""
    passed: bool | None = None
    source: Path
    digest: str
    points: list[Point]
    flaws: list[str] = field(default_factory=list)
    again: bool = False
    """A later import of the same run takes the place of this one."""


def require_valid(draft: Draft) -> None:
    """Raise a ValueError for a time that no calendar has, and for what is no text where text belongs."""
    if not EARLIEST < draft.time < LATEST:
        raise ValueError(f"the time {draft.time!r} is in no calendar")
    texts = {"project": draft.project, "name": draft.name, "machine": draft.machine}
    for what, value in [*texts.items(), *((what, getattr(tree, what)) for tree in draft.trees for what in ("commit", "branch"))]:
        if value is not None and not isinstance(value, str):
            raise ValueError(f"{what} is no text: {value!r}")


def digest_of(kind: Kind, *parts: bytes) -> str:
    made = hashlib.blake2b(str(kind).encode(), digest_size=20)
    for part in parts:
        made.update(len(part).to_bytes(8, "big"))
        made.update(part)
    return made.hexdigest()


def machine_here(gpus: Sequence[str] = ()) -> str:
    """Processors, and the GPUs that are named. The pytest plugin writes it in the same words, since runs are compared by it."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1  # macOS has no affinity
    cpus = f"{platform.machine()}, {count} CPUs"
    return f"{cpus}, {gpu_counts(gpus)}" if gpus else cpus


def gpu_counts(gpus: Sequence[str]) -> str:
    return ", ".join(f"{list(gpus).count(gpu)} x {gpu}" for gpu in sorted(set(gpus)))


def commit_in(value: Any) -> str | None:
    """A commit id, or None for `unknown` and the like."""
    return value if isinstance(value, str) and _COMMIT.fullmatch(value) else None


def read_bytes(path: Path) -> bytes:
    try:
        return read_file(path)
    except OSError as error:
        raise UserError(f"{path}: cannot read: {error.strerror or error}", "check the path and its permissions") from error


def parse_draft(path: Path, data: bytes) -> Any:
    """JSON without a key that stands twice, where Python would keep the last one without a word. The fast reader decides only where it can
    vouch for that. Otherwise, and for NaN, which it does not read, the slow one does."""
    try:
        found = orjson.loads(data)
    except orjson.JSONDecodeError:
        found = None
    if found is not None and has_every_key(found, data):
        return found
    try:
        return parse_json_once(data)
    except BadValue as error:
        raise UserError(f"{path}: not valid JSON: {error.what}", "the file is torn or was edited; restore it") from error


_SHAPE = 'a line is {"benchmark": "NAME", "metrics": {"NAME": 1.5}}'
_KEYS = {"benchmark", "metrics", "commit", "branch", "dirty", "time", "passed", "machine", "project"}


def looks_line(data: Any) -> bool:
    return isinstance(data, dict) and isinstance(data.get("benchmark"), str) and isinstance(data.get("metrics"), dict)


def looks_pytest(data: Any) -> bool:
    return isinstance(data, dict) and isinstance(data.get("benchmarks"), list) and "commit_info" in data


def read_lines(path: Path) -> list[Draft]:
    drafts, written = list[Draft](), path.stat().st_mtime
    lines = read_bytes(path).split(b"\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        data = parse_draft(Path(f"{path}:{number}"), line)
        if not looks_line(data):
            raise UserError(f"{path}:{number}: no benchmark", _SHAPE)
        if odd := sorted(data.keys() - _KEYS):
            raise UserError(f"{path}:{number}: unknown key {odd[0]!r}", f"known keys: {', '.join(sorted(_KEYS))}")
        drafts.append(_draft(path, number, data, written, line))
    return drafts


def _draft(path: Path, number: int, data: dict[str, Any], written: float, line: bytes) -> Draft:
    time = data.get("time", written)
    if not isinstance(time, int | float) or isinstance(time, bool):
        raise UserError(f"{path}:{number}: time: {time!r} is no number", "write seconds since 1970")
    passed, dirty = data.get("passed"), data.get("dirty")
    return Draft(
        kind=Kind.BENCHMARK,
        project=data.get("project"),
        name=data["benchmark"],
        trees=(
            DraftTree(
                commit=commit_in(data.get("commit")),
                branch=data.get("branch"),
                dirty=dirty if isinstance(dirty, bool) else None,
                path=path.parent,
            ),
        ),
        time=float(time),
        machine=str(data.get("machine") or ""),
        passed=passed if isinstance(passed, bool) else None,
        source=path,
        # Two runs may measure the same: the time belongs to the identity, and the place of the line where it names none.
        digest=digest_of(Kind.BENCHMARK, line, b"" if "time" in data else f"{written!r}:{number}".encode()),
        points=[point(name, value) for name, value in data["metrics"].items()],
    )


def read_pytest(path: Path) -> Draft:
    content = read_bytes(path)
    data = parse_draft(path, content)
    commit, machine = data.get("commit_info") or {}, data.get("machine_info") or {}
    cpu = machine.get("cpu") or {}
    try:
        time = parse_time(str(data.get("datetime")))
    except BadValue as error:
        raise UserError(f"{path}: datetime: {data.get('datetime')!r} is no time", "give the file as pytest-benchmark wrote it") from error
    points = [
        point(f"{one.get('fullname') or one['name']}/{name}", value)
        for one in data["benchmarks"]
        for name, value in one.get("stats", {}).items()
        if isinstance(value, int | float | None)
    ]
    said = f"{machine.get('machine', '')}, {cpu.get('count', '?')} CPUs, {cpu.get('brand_raw', '')}".strip(", ")
    branch = commit.get("branch")
    return Draft(
        kind=Kind.BENCHMARK,
        project=commit.get("project") or None,
        name="pytest-benchmark",
        trees=(
            DraftTree(
                commit=commit_in(commit.get("id")),
                branch=branch if isinstance(branch, str) and not branch.startswith("(") else None,
                dirty=commit.get("dirty"),
                path=path.parent,
            ),
        ),
        time=time,
        machine=said,
        passed=not any(one.get("stats", {}).get("rounds", 1) == 0 for one in data["benchmarks"]) if data["benchmarks"] else None,
        source=path,
        digest=digest_of(Kind.BENCHMARK, content),
        points=points,
    )


NAME = "unit"
_FIX = "give the file as the tracker wrote it"
_GOOD = {"passed", "skipped", "xfailed", "xpassed"}
"""Outcomes of a session that passed; pytest decides by the exit status what an xpass is."""
_SHOWN = 3


def looks_unit(data: Any) -> bool:
    return isinstance(data, dict) and {"metrics", "start_time", "exit_status"} <= data.keys()


def read_unit_results(path: Path, content: bytes | None = None) -> Draft:
    content = read_bytes(path) if content is None else content
    data = parse_draft(path, content)
    if not looks_unit(data):
        raise UserError(f"{path}: lacks metrics, start_time or exit_status", _FIX)
    gpus = data.get("gpu_types")
    known = [str(gpu) for gpu in gpus] if isinstance(gpus, list) else []
    status, dirty, branch = data["exit_status"], data.get("git_dirty"), data.get("git_branch")
    project, said = data.get("project"), data.get("machine")
    for form in ("%Y-%m-%d %H:%M:%S", "%Y-%m-%d %H:%M:%S.%f"):
        try:
            time = datetime.strptime(str(data["start_time"]), form).timestamp()
            break
        except (ValueError, OverflowError, OSError):
            continue
    else:
        raise UserError(f"{path}: start_time: {data['start_time']!r} is no time", "write it as 2025-03-24 23:34:12")
    ended, failed = type(status) is int and status == 0, _failed(path, data)
    return Draft(
        kind=Kind.TEST,
        project=project if isinstance(project, str) and project else None,
        name=NAME,
        trees=(
            DraftTree(
                commit=commit_in(data.get("git_commit")),
                branch=branch if isinstance(branch, str) and branch else None,
                dirty=dirty if isinstance(dirty, bool) else None,
                path=path.parent,
            ),
        ),
        time=time,
        machine=said if isinstance(said, str) and said else gpu_counts(known),
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
