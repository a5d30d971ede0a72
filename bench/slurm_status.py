"""What one poll of 300 units costs: Seatrial's, and one scheduler call per job, as NeMo-Run does.

    python bench/slurm_status.py

Brings up a private Slurm with accounting, submits one array of 300 units that wait or run, polls it both ways, checks
that both saw the same states, and takes the cluster down. CPU seconds are those of this process and its children; what
the controller and the database spend is not in them. Nothing is asserted about speed.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.runtime.slurm.cluster import PrivateSlurm, missing

from seatrial.core.jobs import Batch, Component, Job, Profile
from seatrial.runtime import slurm_submit
from seatrial.runtime.slurm_status import Poller

UNITS = 300
POLLS = 5
T = TypeVar("T")


def measured(work: Callable[[], T]) -> tuple[T, float, float]:
    """The answer, CPU seconds and wall seconds of some work."""

    def cpu() -> float:
        both = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return sum(used.ru_utime + used.ru_stime for used in both)

    before, began = cpu(), time.monotonic()
    answer = work()
    return answer, cpu() - before, time.monotonic() - began


def one_call_per_job(slurm: str) -> list[str]:
    """The state of every unit from a sacct of its own."""
    command = ["sacct", "-X", "-n", "-P", "-o", "State", "-j"]
    units = [f"{slurm}_{index}" for index in range(UNITS)]
    return [subprocess.run([*command, unit], check=True, capture_output=True, text=True).stdout.strip() for unit in units]


def main() -> int:
    lacking = missing(accounting=True, pyxis=False, namespaces=False)
    if lacking:
        print(f"slurm status: not measured, no Slurm here: {lacking}")
        return 0
    client = Component(name="client", role="client", command=("sleep", "600"))
    batch = Batch(jobs=(Job(name="bench", components=(client,), array=UNITS),))
    with tempfile.TemporaryDirectory(prefix="seatrial-bench-") as folder:
        directory = Path(folder) / "b"
        with PrivateSlurm(Path(folder) / "s", accounting=True, pyxis=False) as cluster:
            os.environ.update(cluster.env)
            (sent,), _, seconds = measured(lambda: slurm_submit.submit(batch, Profile(), "bench", directory))
            print(f"slurm submit: array of {UNITS} units in {seconds:.2f} s (bar: 1)")
            time.sleep(10)  # until as many units run as fit, and accounting knows it
            poller = Poller([directory])
            polls = [measured(poller.poll) for _ in range(POLLS)]
            snapshot = polls[-1][0]
            ours = min(used for _, used, _ in polls), min(wall for _, _, wall in polls)
            found, *peer = measured(lambda: one_call_per_job(sent.slurm or ""))
            slurm_submit.cancel(directory)
    print(f"slurm status, one poll of {UNITS} units: seatrial {snapshot.calls} call, {ours[0]:.3f} CPU-s (bar: 0.5), {ours[1]:.3f} s")
    print(f"slurm status, one call per job: {UNITS} calls, {peer[0]:.3f} CPU-s, {peer[1]:.3f} s")
    print(f"ratio: {peer[0] / ours[0]:.0f} in CPU seconds, {peer[1] / ours[1]:.0f} in seconds")
    # sacct lists units that wait only together, and answers nothing when it is asked for one of them.
    same = sum(unit.scheduler == (state or "PENDING") for unit, state in zip(snapshot.units, found, strict=True))
    print(f"states: {same} of {UNITS} equal")
    return 0 if same == UNITS else 1


if __name__ == "__main__":
    sys.exit(main())
