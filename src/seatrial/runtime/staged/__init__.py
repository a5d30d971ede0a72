"""Small programs of ours that run on a node, where Seatrial itself may not be installed.

A command names one as `{job}/NAME`; `stage` puts those that a job names into its directory, which every node and every
container of the job sees.
"""

from __future__ import annotations

from pathlib import Path

from seatrial.core import files
from seatrial.core.jobs import Job

PROGRAMS = ("router.py", "ray_step.py")


def stage(job: Job, directory: Path) -> tuple[Path, ...]:
    """Copy the programs that the commands of `job` name into its directory; returns what was written."""
    words = {word for item in job.components for word in item.command}
    named = [name for name in PROGRAMS if f"{{job}}/{name}" in words or (job.launcher and name == "ray_step.py")]
    for name in named:
        files.write_bytes(directory / name, (Path(__file__).parent / name).read_bytes())
    return tuple(directory / name for name in named)
