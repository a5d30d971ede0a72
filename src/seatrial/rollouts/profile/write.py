"""Writes a profile in all its forms, each atomically; profile.json, which the others belong to, comes last."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson

from seatrial.files import replacing, write_bytes, write_json, write_text
from seatrial.model.errors import UserError
from seatrial.rollouts.profile.markdown import profile_markdown
from seatrial.rollouts.profile.model import Numbers, Profile, Task
from seatrial.rollouts.profile.page import profile_html

_AT_K = ("pass_at", "best_at", "majority_at")
_QUANTITIES = ("reward", "input_tokens", "output_tokens", "turns", "latency_s")
_PLAIN = ("index", "id", "dataset", "agent", "source", "expected", "n", "missing", "coverage", "correct", "pass_rate", "truncated")


def write(profile: Profile, directory: Path) -> tuple[Path, ...]:
    """The files. Without pyarrow all but profile.parquet are written, then a UserError says so."""
    parquet = directory / "profile.parquet"
    paths = tuple(directory / name for name in ("tasks.jsonl", "profile.md", "profile.html", "profile.json"))
    with replacing(paths[0]) as stream:
        stream.writelines(_line(task, profile.summary.ks) for task in profile.tasks)
    write_text(paths[1], profile_markdown(profile))
    write_text(paths[2], profile_html(profile))
    packed = _parquet(profile)
    if packed is not None:
        write_bytes(parquet, packed)
    else:
        # One of an earlier profile would not belong to the others.
        parquet.unlink(missing_ok=True)
    write_json(paths[3], profile.summary)
    if packed is None:
        message = f"{parquet}: not written, since pyarrow is not installed; the other files of the profile are"
        raise UserError(message, 'pip install "seatrial[rollouts]"')
    return (*paths, parquet)


def _line(task: Task, ks: Sequence[int]) -> bytes:
    fields: dict[str, Any] = {name: getattr(task, name) for name in Task.__slots__}
    for name in _AT_K:
        fields[name] = {str(k): value for k, value in zip(ks, fields[name], strict=True)}
    return orjson.dumps(fields, option=orjson.OPT_APPEND_NEWLINE)


def _parquet(profile: Profile) -> bytes | None:
    """One row per task, flat; None where pyarrow is missing."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        return None
    tasks = profile.tasks
    columns: dict[str, Any] = {name: [getattr(task, name) for task in tasks] for name in _PLAIN}
    columns["agent"] = pyarrow.array(columns["agent"], pyarrow.string())
    columns["tags"] = pyarrow.array([list(task.tags) for task in tasks], pyarrow.list_(pyarrow.string()))
    columns["failed"] = [sum(task.failed.values()) for task in tasks]
    for kind in profile.overall.failed:
        columns[f"failed/{kind}"] = [task.failed.get(kind, 0) for task in tasks]
    for name in ("pass_low", "pass_high", "pass_rate", "truncated"):
        columns[name] = _floats([getattr(task, name) for task in tasks])
    for name in _AT_K:
        for place, k in enumerate(profile.summary.ks):
            columns[f"{name}/{k}"] = _floats([getattr(task, name)[place] for task in tasks])
    for name in _QUANTITIES:
        columns |= _flat(name, [getattr(task, name) for task in tasks])
    for name in profile.overall.metrics:
        columns |= _flat(f"metrics/{name}", [task.metrics.get(name) for task in tasks])
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(columns), buffer)
    return buffer.getvalue()


def _floats(values: Sequence[float | None]) -> Any:
    """A column keeps its type when nothing is in it."""
    import pyarrow

    return pyarrow.array(values, pyarrow.float64())


def _flat(name: str, found: Sequence[Numbers | None]) -> dict[str, Any]:
    fields = [field for field in Numbers.__slots__ if field != "n"]
    return {f"{name}/{field}": _floats([getattr(one, field) if one else None for one in found]) for field in fields}
