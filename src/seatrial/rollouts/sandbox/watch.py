"""How much memory, how many tasks and how many files a sandbox has, seen from outside.

- Its processes are those of its own /proc, reached through its first process: the whole pid namespace, however a program forks or
  daemonizes, and nobody else's.
- Memory is what is the processes' alone (anonymous, shared anonymous, swapped). Libraries are not counted, files in /tmp have a
  limit of their own. Memory that forked processes still share is counted for each, on the side of caution.
- Files: an empty one costs the kernel memory that no size limit of a file system sees.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

_COUNTED = (b"RssAnon:", b"RssShmem:", b"VmSwap:")
_WRITABLE = ("tmp", "dev/shm")


@dataclass(frozen=True, slots=True)
class Use:
    """At one moment."""

    memory: int
    """Bytes."""
    tasks: int
    """Threads of all processes but the first, which is bubblewrap's."""
    files: int


def look(first: int) -> Use | None:
    """What the sandbox whose first process is `first` uses; None while it is being made, and when it is gone."""
    root = Path(f"/proc/{first}/root")
    proc = root / "proc"
    try:
        if _shows_us(proc):
            return None
        processes = [entry for entry in proc.iterdir() if entry.name.isdigit() and entry.name != "1"]
        files = sum(_files(root / place) for place in _WRITABLE)
    except OSError:
        return None
    memory = tasks = 0
    for entry in processes:
        kib, threads = _process(entry / "status")
        memory += kib << 10
        tasks += threads
    return Use(memory, tasks, files)


def _shows_us(proc: Path) -> bool:
    """Whether it is still the machine's own /proc: in another pid namespace's there is no `self` for us."""
    try:
        return bool((proc / "self").readlink())
    except FileNotFoundError:
        return False


def _files(place: Path) -> int:
    found = os.statvfs(place)
    return found.f_files - found.f_ffree


def _process(path: Path) -> tuple[int, int]:
    """Memory in KiB, and threads; nothing for a process that has just ended."""
    try:
        text = path.read_bytes()
    except OSError:
        return 0, 0
    memory = threads = 0
    for line in text.splitlines():
        if line.startswith(_COUNTED):
            memory += int(line.split()[1])
        elif line.startswith(b"Threads:"):
            threads = int(line.split()[1])
    return memory, threads
