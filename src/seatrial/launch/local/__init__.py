"""Jobs on this machine, by the rules of the Slurm script, with the same files (see `jobdir`).

- The client decides; a service that ends before it, even with 0, fails the unit. Only a result that says `done` is success.
- The result is on disk before any service is ended; when `run_batch` returns or raises, nothing of the jobs is left running.
- A unit that is done already is not run again; one whose inputs are not done is not run at all.
"""

from __future__ import annotations

from seatrial.launch.local.batch import run_batch

__all__ = ["run_batch"]
