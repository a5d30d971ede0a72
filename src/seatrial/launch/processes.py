"""What runs on this machine: who started whom, which run a process carries the marker of, whether it is alive.

All processes of the machine are looked at several times per run. On a node with a thousand of them psutil takes a second for that, most
of it to make sure of things that are not asked here; so what can be read from /proc is read there.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil

MARKER = "SEATRIAL_RUN"
"""The variable that every process of a run inherits, with the id of the run."""
CLOCK_SLACK_S = 2.0
"""Start times are computed from the boot time, which moves a little when the clock is set."""

_PREFIX = f"{MARKER}=".encode()
_PROC = Path("/proc/self/environ").is_file()
_EXEC_S = 1.0
"""How long one that is becoming another program is waited for: microseconds, more where the machine is crowded."""
_BARE_LOOKS = 10
"""So often one that shows arguments and no environment is looked at before it is believed: it may be in the next exec already."""
_EXITING, _KERNEL_THREAD = 0x4, 0x200000
"""Of the flags in /proc/PID/stat (PF_EXITING, PF_KTHREAD)."""


def processes(pids: Iterable[int]) -> Iterator[psutil.Process]:
    """These processes, as far as they are still there."""
    for pid in pids:
        try:
            yield psutil.Process(pid)
        except psutil.Error:
            continue  # it ended meanwhile


def by_parent() -> dict[int, list[int]]:
    """Children of every process, but for this one."""
    below: dict[int, list[int]] = {}
    for pid in psutil.pids():
        parent = _parent(pid) if pid != os.getpid() else None
        if parent is not None:
            below.setdefault(parent, []).append(pid)
    return below


def with_descendants(top: int, below: dict[int, list[int]]) -> Iterator[int]:
    """A process and all that it started, parents first."""
    waiting, seen = [top], set[int]()
    while waiting:
        pid = waiting.pop()
        if pid not in seen:
            seen.add(pid)
            yield pid
            waiting.extend(below.get(pid, ()))


def marked(run_id: str) -> Iterator[int]:
    """Every process with this marker, but for this one."""
    for pid in psutil.pids():
        if pid != os.getpid() and marker(pid) == run_id:
            yield pid


def marker(pid: int) -> str | None:
    """The marker of a process; None when it has none, has ended, or is somebody else's."""
    if _PROC:
        found = [entry for entry in _environ(pid).split(b"\0") if entry.startswith(_PREFIX)]
        return os.fsdecode(found[0][len(_PREFIX) :]) if found else None
    try:
        return psutil.Process(pid).environ().get(MARKER)
    except (psutil.Error, OSError):
        return None


def is_alive(process: psutil.Process) -> bool:
    """Whether it runs: one that has ended and was not collected yet does not."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def send(process: psutil.Process, number: signal.Signals) -> None:
    """Send a signal, if the process is there and takes ours."""
    try:
        process.send_signal(number)
    except psutil.Error:
        pass  # ended meanwhile, or not ours to end: who asks whether it is alive is told


def started_at(pid: int, started: float) -> bool:
    """Whether the process with this pid is alive and is the one that started then."""
    try:
        process = psutil.Process(pid)
        return is_alive(process) and abs(process.create_time() - started) <= CLOCK_SLACK_S
    except psutil.Error:
        return False


def _parent(pid: int) -> int | None:
    """The parent of a process; None when it has ended."""
    if _PROC:
        line = _read(pid, "stat")
        return int(line.rpartition(b")")[2].split()[1]) if line else None
    try:
        return psutil.Process(pid).ppid()
    except psutil.Error:
        return None


def _environ(pid: int) -> bytes:
    """The environment of a process; empty when it has none, has ended, or is somebody else's.

    In the middle of an exec a process shows none, and no arguments: it is looked at again, until it has been seen a few times with
    arguments and without an environment.
    """
    stops, bare = time.monotonic() + _EXEC_S, 0
    while (found := _read(pid, "environ")) == b"" and bare < _BARE_LOOKS and _may_exec(pid) and time.monotonic() < stops:
        if _read(pid, "cmdline"):
            bare += 1
        else:
            time.sleep(0.0002)
    return found or b""


def _may_exec(pid: int) -> bool:
    """Whether a process has not ended, is not about to, and is not a thread of the kernel."""
    line = _read(pid, "stat")
    if not line:
        return False
    state, _, _, _, _, _, flags = line.rpartition(b")")[2].split()[:7]
    return state not in b"ZX" and not int(flags) & (_EXITING | _KERNEL_THREAD)


def _read(pid: int, name: str) -> bytes | None:
    try:
        handle = os.open(f"/proc/{pid}/{name}", os.O_RDONLY)
    except OSError:
        return None
    try:
        parts = []
        while part := os.read(handle, 1 << 16):
            parts.append(part)
        return b"".join(parts)
    except OSError:
        return None  # it ended meanwhile, or is somebody else's
    finally:
        os.close(handle)
