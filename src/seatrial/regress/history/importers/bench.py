"""Benchmarks: JSON lines of ours, and the JSON of pytest-benchmark.

- A line of ours is `{"benchmark": NAME, "metrics": {NAME: NUMBER}}`, and may say `commit`, `branch`, `dirty`, `time` (seconds since
  1970), `passed` and `machine`; every line is a run. A line that is something else is an error, with its number.
- pytest-benchmark: one run; `<benchmark>/<stat>` for each of its statistics that is a number.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from seatrial.model.errors import UserError
from seatrial.model.guarded import BadValue, parse_time
from seatrial.regress.history.importers.draft import Draft, Tree, commit_in, digest_of, parse, read_bytes
from seatrial.regress.history.record import Kind, point

_SHAPE = 'a line is {"benchmark": "NAME", "metrics": {"NAME": 1.5}}'
_KEYS = {"benchmark", "metrics", "commit", "branch", "dirty", "time", "passed", "machine", "project"}


def looks_line(data: Any) -> bool:
    """Whether parsed JSON is a line of ours."""
    return isinstance(data, dict) and isinstance(data.get("benchmark"), str) and isinstance(data.get("metrics"), dict)


def looks_pytest(data: Any) -> bool:
    """Whether parsed JSON is a file of pytest-benchmark."""
    return isinstance(data, dict) and isinstance(data.get("benchmarks"), list) and "commit_info" in data


def read_lines(path: Path) -> list[Draft]:
    """One run per line."""
    drafts, written = list[Draft](), path.stat().st_mtime
    lines = read_bytes(path).split(b"\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        data = parse(Path(f"{path}:{number}"), line)
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
            Tree(
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
    """A file of pytest-benchmark."""
    content = read_bytes(path)
    data = parse(path, content)
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
            Tree(
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
