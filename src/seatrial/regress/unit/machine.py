"""The kind of this machine, as far as it says which runs may be compared.

- Names of hosts say nothing: those of containers and of cluster nodes change from run to run.
- Standard library only: this is loaded into every pytest that tracks.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence


def machine_here(gpus: Sequence[str] = ()) -> str:
    """Processors, and the GPUs that are named."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1  # macOS has no affinity
    cpus = f"{platform.machine()}, {count} CPUs"
    return f"{cpus}, {counted(gpus)}" if gpus else cpus


def counted(gpus: Sequence[str]) -> str:
    """GPUs as `2 x NAME`."""
    return ", ".join(f"{list(gpus).count(gpu)} x {gpu}" for gpu in sorted(set(gpus)))
