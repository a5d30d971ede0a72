"""Logs of a unit: which file it is, and its text as it grows.

`slurm` as the name of a component means the log of the job script itself.
"""

from __future__ import annotations

import codecs
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from seatrial.launch.interrupt import check_stop
from seatrial.launch.jobdir import job_dir
from seatrial.model.errors import UserError
from seatrial.model.job import Batch, Job

SCRIPT = "slurm"
_LOOK_S = 0.5


def find_job(batch: Batch, name: str | None) -> Job:
    """The job of this name; a batch of one job needs none."""
    known = [job.name for job in batch.jobs]
    for job in batch.jobs:
        if job.name == name or (name is None and len(known) == 1):
            return job
    wanted = f"no job {name!r} there" if name else "there are several jobs"
    raise UserError(f"{wanted}: {', '.join(known)}", "name one of them")


def log_file(directory: Path, job: Job, component: str | None, copy: int, index: int | None) -> Path:
    """The log of one copy of one component, the client's unless another is named."""
    known = {item.name: item.replicas for item in job.components}
    if index is None and job.array:
        raise UserError(f"job {job.name} has units 0 to {job.array - 1}", "say which with --index N")
    if index is not None and index not in job.units():
        raise UserError(f"job {job.name} has no unit {index}", f"its units are 0 to {len(job.units()) - 1}")
    unit = index if job.array else None
    folder = job_dir(directory, job)
    if component == SCRIPT:
        return folder.path / "logs" / (f"{SCRIPT}.log" if unit is None else f"{SCRIPT}-{unit}.log")
    name = component or job.client.name
    if name not in known:
        raise UserError(f"job {job.name} has no component {name!r}; known: {', '.join([*known, SCRIPT])}", "name one of them")
    if copy not in range(known[name]):
        raise UserError(f"component {name} has no copy {copy}", f"its copies are 0 to {known[name] - 1}")
    return folder.log(name, copy, unit)


def text_of(path: Path, ended: Callable[[], bool] | None = None) -> Iterator[str]:
    """The text of a log. With `ended` it goes on as the log grows, until that says so; a log that is absent may come."""
    place, decoder = 0, codecs.getincrementaldecoder("utf-8")(errors="backslashreplace")
    while True:
        over = ended is None or ended()
        if path.is_file():
            with path.open("rb") as stream:
                stream.seek(place)
                while data := stream.read(1 << 20):
                    place += len(data)
                    yield decoder.decode(data)
        if over:
            break
        check_stop()
        time.sleep(_LOOK_S)
    if place == 0 and not path.is_file():
        raise UserError(f"{path}: no log there (yet)", "the component has not started; `seatrial jobs list` says where its job stands")
