"""A private Slurm for tests; see `private`. By hand: `python -m tests.slurm.cluster up ROOT`."""

from .private import PrivateSlurm
from .tools import missing

__all__ = ["PrivateSlurm", "missing"]
