"""A private Slurm for tests; see `private`. By hand: `python -m tests.runtime.slurm.cluster up ROOT`."""

from tests.runtime.slurm.cluster.private import PrivateSlurm
from tests.runtime.slurm.cluster.tools import missing

__all__ = ["PrivateSlurm", "missing"]
