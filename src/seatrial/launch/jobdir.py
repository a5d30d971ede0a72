"""The directory of a batch: everything that is known of its jobs, as plain files on the shared file system.

```
<batch>/batch.json               the jobs as data, as they were submitted
<batch>/<job>/job.sh             the script that Slurm runs; a person can read it
<batch>/<job>/submission.json    what Slurm was given, and the id it gave back
<batch>/<job>/logs/              <component>.<copy>[-<index>].log, and slurm[-<index>].log of the script itself
<batch>/<job>/endpoints/<index>/ <component>.<copy>: "host port head_port", and ended.*: how each task ended; written on the node
<batch>/<job>/results/<index>.json
```
A result that says `done` is the marker that makes a requeue or a second submission of the unit do nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from seatrial.files import read_model, write_json
from seatrial.model.errors import UserError
from seatrial.model.job import Batch, Ending, Job, Result, Submission

BATCH = "batch.json"


@dataclass(frozen=True, slots=True)
class JobDir:
    """Paths of one job."""

    path: Path

    @property
    def script(self) -> Path:
        """job.sh."""
        return self.path / "job.sh"

    @property
    def submission_file(self) -> Path:
        """submission.json; absent when the job was never submitted."""
        return self.path / "submission.json"

    def log(self, component: str, copy: int, index: int | None) -> Path:
        """Log of one copy; `index` is None for a job without array."""
        return self.path / "logs" / (f"{component}.{copy}.log" if index is None else f"{component}.{copy}-{index}.log")

    def endpoints(self, index: int) -> Path:
        """Where the copies of a unit publish host and port."""
        return self.path / "endpoints" / str(index)

    def result_file(self, index: int) -> Path:
        """What a unit leaves behind."""
        return self.path / "results" / f"{index}.json"

    def result(self, index: int) -> Result | None:
        """The result of a unit, or None while there is none. One that is torn raises a UserError: it never counts."""
        file = self.result_file(index)
        return read_model(file, Result) if file.is_file() else None

    def submission(self) -> Submission | None:
        """What was submitted, or None."""
        return read_model(self.submission_file, Submission) if self.submission_file.is_file() else None

    def not_done(self, units: range) -> tuple[int, ...]:
        """Units that have no result that says done."""
        return tuple(index for index in units if not self.is_done(index))

    def is_done(self, index: int) -> bool:
        """Whether the result says so, of this job and unit, without contradicting itself."""
        result = self.result(index)
        if result is None or result.ending is not Ending.DONE:
            return False
        return (result.job, result.index, result.exit_code) == (self.path.name, index, 0)

    def make(self) -> None:
        """Make the directories, which the nodes then write to."""
        for name in ("logs", "endpoints", "results"):
            (self.path / name).mkdir(parents=True, exist_ok=True)


def job_dir(batch: Path, job: Job | str) -> JobDir:
    """The directory of a job; absolute, because nodes have other working directories."""
    return JobDir(batch.absolute() / (job if isinstance(job, str) else job.name))


def save(batch: Path, jobs: Batch) -> None:
    """Store the jobs as data."""
    write_json(batch / BATCH, jobs)


def load(batch: Path) -> Batch:
    """The jobs of a batch directory."""
    if not (batch / BATCH).is_file():
        raise UserError(f"{batch}: no {BATCH} there, so it is not a batch of jobs", "name a directory that `seatrial jobs submit` made")
    return read_model(batch / BATCH, Batch)


def find(root: Path) -> Iterator[Path]:
    """Batch directories at or below `root`, oldest first."""
    if (root / BATCH).is_file():
        yield root
        return
    yield from sorted((file.parent for file in root.glob(f"**/{BATCH}")), key=lambda path: (path / BATCH).stat().st_mtime)
