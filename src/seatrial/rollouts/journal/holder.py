"""Who holds a lease: enough to know, on the same machine, whether that process is still there.

No clock is in it. A process is told from a later one of the same number by the ticks since boot at which it started, and machines
and containers are told apart by the boot and the process namespace: the same pid elsewhere says nothing.
"""

from __future__ import annotations

import os
import secrets
import socket
from pathlib import Path
from typing import Self

from pydantic import Field

from seatrial.model.record import Record

_SLURM = ("SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID", "SLURM_JOB_ID", "SLURM_RESTART_COUNT")


class Holder(Record):
    """One attempt of a shard, or one merge."""

    host: str
    boot: str
    namespace: str
    pid: int
    started: int
    """Ticks between boot and the start of the process."""
    token: str
    """Random: two attempts never share a file, whatever else goes wrong."""
    slurm: dict[str, str] = Field(default_factory=dict)
    number: int = 0
    """The fencing number; 0 until a lease gave it."""

    @classmethod
    def here(cls) -> Self:
        """This process, with a new token."""
        return cls(
            host=socket.gethostname(),
            boot=_boot(),
            namespace=_namespace(),
            pid=os.getpid(),
            started=_started(os.getpid()) or 0,
            token=secrets.token_hex(4),
            slurm={name: os.environ[name] for name in _SLURM if name in os.environ},
        )

    @property
    def label(self) -> str:
        """`0001-<token>`, as in the names of its files."""
        return f"{self.number:04d}-{self.token}"

    def gone(self) -> bool:
        """True only when it is certain: it ran on this machine, and does so no more."""
        if (self.boot, self.namespace) != (_boot(), _namespace()):
            return False
        return _started(self.pid) != self.started

    def __str__(self) -> str:
        job = "_".join(self.slurm[name] for name in _SLURM[:2] if name in self.slurm) or self.slurm.get("SLURM_JOB_ID", "")
        return f"attempt {self.number} (process {self.pid} on {self.host}{f', Slurm job {job}' if job else ''})"


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def _namespace() -> str:
    return str(Path("/proc/self/ns/pid").readlink())


def _started(pid: int) -> int | None:
    """When a process started, in ticks since boot; None when it is no more, or waits only to be collected."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The name of the program stands in parentheses and may hold anything.
    state, *rest = text.rpartition(")")[2].split()
    return None if state in "ZX" else int(rest[18])
