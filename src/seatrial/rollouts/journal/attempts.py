"""Leases and attempt files: who may write in a directory, and the file that each attempt writes alone.

- A claim is a new file `lease-NNNN.json`, one above the last, made by a link, so exactly one process gets it, on network file systems
  too. The highest number holds the lease. Lease files are never deleted: numbers must not come twice.
- A lease is taken over at once when its holder released it or is known to be gone (same machine, no such process); else after STALE_S
  without a change, by the watcher's monotonic clock. No two clocks are compared.
- A holder that lost its lease learns so at its next `renew` (LeaseLostError) and must stop. What it writes until then lies in its own
  file and loses by rule.
- `attempt-NNNN-<token>.jsonl` is written by one process and never reopened. A record is one write; every GROUP_ROWS records or GROUP_S
  seconds the file is synced. A kill loses nothing that was appended, a lost node at most the last group.
- A write that fails is taken back, so the file ends in a whole record, and the attempt takes no more.
"""

from __future__ import annotations

import os
import re
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from pydantic import Field, ValidationError

from seatrial.core.errors import BlockedError
from seatrial.core.files import write_error, write_json
from seatrial.core.guarded import read_file
from seatrial.core.journal import Journal
from seatrial.core.records import Record, replace
from seatrial.core.verdict import Boundary
from seatrial.runtime.interrupt import check_stop

_SLURM = ("SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID", "SLURM_JOB_ID", "SLURM_RESTART_COUNT")


class LeaseHolder(Record):
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


GROUP_ROWS = 100
GROUP_S = 1.0

_ATTEMPT_NAME = re.compile(r"attempt-(\d{4,})-([0-9a-f]+)\.jsonl")


@dataclass(frozen=True, slots=True, order=True)
class AttemptFile:
    """A file of a shard; they sort as winners do: the lowest number first."""

    number: int
    token: str
    path: Path


def attempt_files(shard_dir: Path) -> list[AttemptFile]:
    """The attempts of a shard, in order; none when it has no directory yet."""
    try:
        names = [path.name for path in shard_dir.iterdir()]
    except FileNotFoundError:
        return []
    return sorted(AttemptFile(int(match[1]), match[2], shard_dir / match[0]) for name in names if (match := _ATTEMPT_NAME.fullmatch(name)))


class Attempt(Journal):
    """The journal of one attempt (see `rollout_record.encode`)."""

    @classmethod
    def open(cls, shard_dir: Path, holder: LeaseHolder, *, clock: Callable[[], float] = time.monotonic) -> Self:
        """A new file, named after `lease.holder`: the number that fences others off is the one that orders winners."""
        if not holder.number:
            raise ValueError("an attempt needs the number of a lease: pass lease.holder")
        return cls(shard_dir / f"attempt-{holder.label}.jsonl", new=True, rows=GROUP_ROWS, seconds=GROUP_S, clock=clock)


RENEW_S = 5.0
"""`renew` writes at most so often."""
STALE_S = 60.0
"""So long must nothing change before a holder elsewhere counts as gone."""

_POLL_S = 0.2
_LEASE_NAME = re.compile(r"lease-(\d{4,})\.json")


class LeaseLostError(Exception):
    """A newer attempt holds the lease: stop; its results count."""


class LeaseHeldError(BlockedError):
    """Somebody else holds the lease, and is alive as far as can be known."""


class LeaseFile(Record):
    """lease-NNNN.json."""

    holder: LeaseHolder
    counter: int = 0
    """Changes while the holder lives."""
    released: bool = False


class Lease:
    """The right to write, until somebody with a higher number has it."""

    def __init__(self, directory: Path, holder: LeaseHolder, clock: Callable[[], float]) -> None:
        self.directory = directory
        self.holder = holder
        """With its fencing number."""
        self._clock = clock
        self._counter = 0
        self._renewed = clock()

    @classmethod
    def acquire(
        cls,
        directory: Path,
        holder: LeaseHolder,
        wait_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> Self:
        """Get the lease; waits at most `wait_s` for its holder and then raises a LeaseHeldError. Less than STALE_S finds no dead node."""
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise write_error(directory, error) from error
        began = since = clock()
        seen: tuple[int, bytes | None] | None = None
        while True:
            number = newest(directory)
            now, content = clock(), _content(directory, number)
            if (number, content) != seen:
                seen, since = (number, content), now
            # A file that cannot be read may be that of a process that lives: it is watched.
            found = _parsed(content)
            free = content is None or (found is not None and (found.released or found.holder.gone()))
            if free or now - since >= STALE_S:
                claimed = replace(holder, number=number + 1)
                if _claim(directory, claimed):
                    return cls(directory, claimed, clock)
            if now - began >= wait_s:
                who = str(found.holder) if found else "somebody whose lease cannot be read"
                message = f"{directory}: {who} holds the lease and is alive as far as can be known; waited {wait_s:.0f} s"
                fix = f"wait for it or end it; a holder on a lost node is taken over after {STALE_S:.0f} s"
                raise LeaseHeldError(Boundary.CLUSTER, message, fix)
            check_stop()
            sleep(_POLL_S)

    def renew(self) -> None:
        """Say that we live; raises a LeaseLostError when a newer attempt holds the lease. Cheap: call it every second or two."""
        self.check()
        if self._clock() - self._renewed >= RENEW_S:
            self._write(released=False)

    def check(self) -> None:
        """Raise a LeaseLostError when a newer attempt holds the lease."""
        if (number := newest(self.directory)) > self.holder.number:
            raise LeaseLostError(f"{self.directory}: attempt {number} holds the lease, attempt {self.holder.number} must stop")

    def release(self) -> None:
        self._write(released=True)

    def _write(self, *, released: bool) -> None:
        self._counter += 1
        self._renewed = self._clock()
        write_json(_path(self.directory, self.holder.number), LeaseFile(holder=self.holder, counter=self._counter, released=released))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()


def newest(directory: Path) -> int:
    """The highest number that any lease or attempt in a directory has; 0 when there is none."""
    leases = [int(match[1]) for path in directory.iterdir() if (match := _LEASE_NAME.fullmatch(path.name))]
    return max([*leases, *(file.number for file in attempt_files(directory))], default=0)


def holder_of(directory: Path) -> LeaseFile | None:
    """The newest lease; None when there is none that can be read."""
    return _parsed(_content(directory, newest(directory))) if directory.is_dir() else None


def _path(directory: Path, number: int) -> Path:
    return directory / f"lease-{number:04d}.json"


def _content(directory: Path, number: int) -> bytes | None:
    try:
        return read_file(_path(directory, number))
    except FileNotFoundError:
        return None


def _parsed(content: bytes | None) -> LeaseFile | None:
    try:
        return None if content is None else LeaseFile.model_validate_json(content)
    except ValidationError:
        return None


def _claim(directory: Path, holder: LeaseHolder) -> bool:
    """Make the lease file of that number; False when somebody else was faster."""
    path, temporary = _path(directory, holder.number), directory / f".lease-{holder.token}"
    write_json(temporary, LeaseFile(holder=holder))
    try:
        path.hardlink_to(temporary)
    except FileExistsError:
        # A network file system may repeat a link whose answer was lost: then the file that exists is ours.
        return path.samefile(temporary)
    except OSError as error:
        raise write_error(path, error) from error
    finally:
        temporary.unlink(missing_ok=True)
    return True
