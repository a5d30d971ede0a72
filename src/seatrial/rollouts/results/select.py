"""Tasks by their pass rate, written with the rows as the user wrote them: for filtering, or for a curriculum.

- Both bounds belong to the band. A task is taken when `min_n` of its rollouts worked: of fewer, the rate says too little.
- In order of the inputs, or the easiest first. With its rate a row gets one more column, `pass_rate`.
- What was left out is counted by reason. A file that the campaign was made from is never overwritten, and nothing is written when
  no task is left.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import orjson

from seatrial.files import replacing
from seatrial.model.errors import UserError
from seatrial.model.record import Record
from seatrial.rollouts import manifest as manifests
from seatrial.rollouts.manifest import Manifest
from seatrial.rollouts.place import Place
from seatrial.rollouts.profile.build import profile
from seatrial.rollouts.profile.model import Task
from seatrial.rollouts.results.targets import spare_campaigns
from seatrial.rollouts.units import Units
from seatrial.rollouts.work import Row

RATE = "pass_rate"
_SHOWN = 20


class Selected(Record):
    """What was written, and what was not."""

    path: str
    rows: int
    tasks: int
    """Of the campaign."""
    left_out: Mapping[str, int]
    """Tasks by the first reason that held them back."""


def select(
    place: Place,
    *,
    low: float,
    high: float,
    out: Path,
    dataset: str | None = None,
    tag: str | None = None,
    min_n: int = 1,
    sort: Literal["order", "pass-rate"] = "order",
    with_rate: bool = False,
    pass_at: float = 1.0,
    progress: Callable[[str], None] = lambda _: None,
) -> Selected:
    """Write the rows of all tasks whose pass rate is `low` to `high`; a rollout passes with a reward of `pass_at` and more."""
    if not 0 <= low <= high <= 1:
        raise UserError(f"a band from {low:g} to {high:g}", "a pass rate lies from 0 to 1; say the lower bound first")
    manifest = manifests.load(place)
    _keep_inputs(manifest, out)
    _known(manifest, dataset, min_n)
    tasks = profile(place, pass_at=pass_at, ks=(1,), progress=progress).tasks
    _has_tag(tasks, tag)
    reasons = [_why_not(task, low, high, dataset, tag, min_n) for task in tasks]
    chosen = [task for task, reason in zip(tasks, reasons, strict=True) if reason is None]
    left_out = dict(Counter(reason for reason in reasons if reason))
    if not chosen:
        said = ", ".join(f"{count} {reason}" for reason, count in left_out.items())
        raise UserError(f"none of {len(tasks)} tasks is left: {said}; {out} was not written", "widen the band, or collect more rollouts")
    if sort == "pass-rate":
        chosen.sort(key=lambda task: -(task.pass_rate or 0.0))
    with Units(place, manifest) as units, replacing(out) as stream:
        stream.writelines(_line(units.row(task.index), task, with_rate) for task in chosen)
    return Selected(path=str(out), rows=len(chosen), tasks=len(tasks), left_out=left_out)


def _why_not(task: Task, low: float, high: float, dataset: str | None, tag: str | None, min_n: int) -> str | None:
    if dataset is not None and task.dataset != dataset:
        return "of another dataset"
    if tag is not None and tag not in task.tags:
        return f"without the tag {tag}"
    if task.pass_rate is None or task.n < min_n:
        return f"with fewer than {min_n} rollouts"
    if task.pass_rate < low:
        return f"below {low:g}"
    return f"above {high:g}" if task.pass_rate > high else None


def _known(manifest: Manifest, dataset: str | None, min_n: int) -> None:
    names = [file.dataset for file in manifest.files]
    if dataset is not None and dataset not in names:
        raise UserError(f"no dataset is called {dataset}", f"there are: {', '.join(names)}")
    most = max(len(labels) for labels in manifest.repeats.values())
    if not 1 <= min_n <= most:
        raise UserError(f"at least {min_n} rollouts: tasks have up to {most}", f"choose from 1 to {most}")


def _has_tag(tasks: Sequence[Task], tag: str | None) -> None:
    tags = sorted({name for task in tasks for name in task.tags})
    if tag is not None and tag not in tags:
        more = f" and {len(tags) - _SHOWN} more" if len(tags) > _SHOWN else ""
        raise UserError(
            f"no task has the tag {tag}", f"there are: {', '.join(tags[:_SHOWN])}{more}" if tags else "leave it out: no task has any"
        )


def _keep_inputs(manifest: Manifest, out: Path) -> None:
    """Refuse what would destroy a campaign or what this one was made from, however it is spelled."""
    if out.is_dir():
        raise UserError(f"{out}: is a directory", "name a file")
    spare_campaigns(out)
    for file in manifest.files:
        if manifests.is_input(out, file):
            raise UserError(f"{out}: is the input of dataset {file.dataset}", "write to another file")


def _line(row: Row, task: Task, with_rate: bool) -> bytes:
    if not with_rate:
        return orjson.dumps(row.data, option=orjson.OPT_APPEND_NEWLINE)
    if RATE in row.data:
        raise UserError(f"{row.source}: the row has a {RATE} of its own", "select without adding the rate, or rename that column")
    return orjson.dumps({**row.data, RATE: task.pass_rate}, option=orjson.OPT_APPEND_NEWLINE)
