"""Running one job on the private Slurm and reading what it left."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol, TypeVar

import psutil

from seatrial.core.jobs import Component, Job, Profile, Ready, Result
from seatrial.runtime.jobdir import JobDir, job_dir
from seatrial.runtime.slurm import render

T = TypeVar("T")
HTTP = (sys.executable, "-m", "http.server", "{port}", "--bind", "{bind}")
"""A real server that answers at once."""


class Slurm(Protocol):
    """What these tests use of the private cluster."""

    @property
    def env(self) -> dict[str, str]: ...

    def run(self, *argv: str) -> subprocess.CompletedProcess[str]: ...


def client(*command: str, **more: Any) -> Component:
    """The client of a job."""
    return Component(name="client", role="client", command=command, **more)


def script(code: str, *words: str) -> tuple[str, ...]:
    """A Python program as a command."""
    return (sys.executable, "-c", code, *words)


def server(**more: Any) -> Component:
    """A service that is ready soon."""
    return Component(name="server", command=more.pop("command", HTTP), port=True, ready=Ready(path="/", deadline_s=60), **more)


class Submitted:
    """One job in the private Slurm."""

    def __init__(self, cluster: Slurm, job: Job, batch: Path, profile: Profile, options: tuple[str, ...], units: dict[str, int]) -> None:
        self.cluster, self.job = cluster, job
        self.dir: JobDir = job_dir(batch, job)
        self.dir.make()
        self.dir.script.write_text(render(job, profile, batch, f"seatrial-{job.name}-test", units), encoding="utf-8")
        answer = cluster.run("sbatch", "--parsable", *options, str(self.dir.script))
        assert answer.returncode == 0, answer.stderr
        self.id = answer.stdout.strip()

    def state(self) -> str:
        """Slurm's word for the job; empty when it does not know it."""
        answer = self.cluster.run("squeue", "-h", "-a", "-t", "all", "-j", self.id, "-o", "%T")
        return answer.stdout.split("\n")[0].strip()

    def show(self) -> str:
        """All that the controller knows of it."""
        return self.cluster.run("scontrol", "-o", "show", "job", self.id).stdout

    def result(self, index: int = 0, deadline_s: float = 60) -> Result:
        """The result of a unit, awaited."""
        return until(lambda: self.dir.result(index), lambda: f"result {index} of {self.job.name}: {self.log()} {self.show()}", deadline_s)

    def ended(self, deadline_s: float = 60) -> str:
        """Slurm's word when the job is over."""
        over = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY")
        return until(lambda: self.state() if self.state() in over else None, lambda: f"end of job {self.id} ({self.state()})", deadline_s)

    def log(self, name: str = "slurm") -> str:
        """A log of the job, as far as it is written."""
        files = sorted(self.dir.path.glob(f"logs/{name}*.log"))
        return "".join(file.read_text(encoding="utf-8", errors="replace") for file in files)

    def running(self) -> None:
        """Wait until the client has started."""
        until(lambda: "client.0 started" in self.log() or None, lambda: f"start of the client: {self.log()} {self.show()}", 60)


def submit(
    cluster: Slurm,
    job: Job,
    batch: Path,
    profile: Profile | None = None,
    options: tuple[str, ...] = (),
    units: dict[str, int] | None = None,
) -> Submitted:
    """Render and submit one job."""
    return Submitted(cluster, job, batch, profile or Profile(time="0:10:00"), options, units or {})


def until(look: Callable[[], T | None], what: str | Callable[[], str], deadline_s: float) -> T:
    """The first answer that is not None, or a failure that says what was awaited."""
    ends = time.monotonic() + deadline_s
    while (found := look()) is None:
        assert time.monotonic() < ends, f"not within {deadline_s:g} s: {what if isinstance(what, str) else what()}"
        time.sleep(0.2)
    return found


def processes_with(marker: str) -> Iterator[psutil.Process]:
    """Processes that carry a word on their command line."""
    for process in psutil.process_iter():
        try:
            if marker in " ".join(process.cmdline()) and process.status() != psutil.STATUS_ZOMBIE:
                yield process
        except psutil.Error:
            continue
