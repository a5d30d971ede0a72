"""Peak memory of a process tree and its GPUs, sampled by one thread; nothing runs before the first `read_peaks`."""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import NamedTuple

from pytest_seatrial import gpus

TREE = "process tree"
PROC = "/proc"
INTERVAL_S = 0.02
SHARE = 20
"""The thread waits at least so many times as long as its last look took."""


class NotLinux(RuntimeError):
    """Memory cannot be read here."""


class MemorySampler:
    """Peaks in bytes by place: "process tree" and "gpu 0", "gpu 1", …"""

    def __init__(self, root: int, library: str = gpus.LIBRARY) -> None:
        if not os.path.exists(f"{PROC}/self/statm"):  # noqa: PTH110
            raise NotLinux(
                f"the memory of processes is read from {PROC}, which only Linux has (this is {sys.platform}): skip this test here"
            )
        self.root = root
        self.problem: str | None = None
        self._own = root == os.getpid()
        self._library = library
        self._gpus: gpus.Gpus | None = None
        self._round = 0
        self._peaks: dict[str, int] = {}
        self._marks = marks() if self._own else (0, 0)
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="seatrial-memory", daemon=True)
        self._thread.start()

    def reset(self, at: tuple[int, int] | None = None) -> None:
        """Peaks begin anew; `at` is what `marks()` said when they did, if that was earlier."""
        with self._lock:
            self._round += 1
            self._peaks.clear()
            self._marks = at or (marks() if self._own else (0, 0))

    def peaks(self) -> dict[str, int]:
        """The peaks, with a look at this very moment; only the test's own thread resets, so that look counts."""
        self._look()
        with self._lock:
            found = dict(self._peaks)
            if self._own:
                found[TREE] = max(found[TREE], risen(self._marks, marks()))
        return found

    def stop(self) -> None:
        """End the thread."""
        self._stop.set()
        self._thread.join(timeout=5)
        if self._gpus is not None and not self._thread.is_alive():
            self._gpus.close()

    def _loop(self) -> None:
        wait = INTERVAL_S
        while not self._stop.wait(wait):
            began = time.thread_time()
            try:
                self._look()
            except gpus.GpuError:
                return  # whoever asks for the peaks gets it raised
            wait = max(INTERVAL_S, (time.thread_time() - began) * SHARE)

    def _look(self) -> None:
        begun = self._round
        seen = {TREE: tree(self.root), **self._on_gpus()}
        with self._lock:
            if begun != self._round:
                return  # seen before the reset, at least in part
            for place, value in seen.items():
                if value > self._peaks.get(place, -1):
                    self._peaks[place] = value

    def _on_gpus(self) -> dict[str, int]:
        if self.problem is not None:
            return {}
        try:
            if self._gpus is None:
                self._gpus = gpus.Gpus(self._library)
            return {f"gpu {index}": value for index, value in enumerate(self._gpus.used())}
        except gpus.GpuError as error:
            if gpus.devices_here():
                raise
            # A library without a driver, as in images for machines with GPUs: there is no GPU, and that is said once.
            self.problem = str(error)
            return {}

    def names(self) -> list[str]:
        """The names of the GPUs that are watched."""
        return [] if self._gpus is None else self._gpus.names()


def marks() -> tuple[int, int]:
    """The highest RSS in bytes that the kernel knows of this process, and of one of its ended children; zeros where there is none to ask.

    Elsewhere than on Linux the number has another unit, or the module `resource` is not there.
    """
    if sys.platform != "linux":
        return 0, 0
    try:
        import resource
    except ImportError:
        return 0, 0
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return own * 1024, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024


def risen(before: tuple[int, int], after: tuple[int, int]) -> int:
    """What one process surely had between two marks; 0 if no mark rose.

    A child that was started by vfork begins with the mark of its parent, so a child's mark says something only above the parent's.
    """
    own = after[0] if after[0] > before[0] else 0
    child = after[1] if after[1] > before[1] and after[1] > after[0] else 0
    return max(own, child)


def tree(root: int) -> int:
    """RSS in bytes of a process and its descendants now; 0 if it has ended."""
    return sum(_rss(pid) for pid in {root, *descendants(root)})


def descendants(root: int) -> list[int]:
    """Process ids below `root`."""
    parents: dict[int, list[int]] = {}
    for entry in os.listdir(PROC):  # noqa: PTH208  # a Path for each of thousands is what makes it slow
        if entry.isdigit() and (parent := _parent(int(entry))) is not None:
            parents.setdefault(parent, []).append(int(entry))
    found: list[int] = []
    todo = [root]
    while todo:
        children = parents.pop(todo.pop(), [])
        found += children
        todo += children
    return found


def _parent(pid: int) -> int | None:
    text = _read(f"{PROC}/{pid}/stat")
    return int(text.rpartition(b")")[2].split()[1]) if text else None


def _rss(pid: int) -> int:
    text = _read(f"{PROC}/{pid}/statm")
    return int(text.split()[1]) * os.sysconf("SC_PAGE_SIZE") if text else 0


def _read(path: str) -> bytes:
    try:
        handle = os.open(path, os.O_RDONLY)
    except OSError:
        return b""  # it ended meanwhile
    try:
        return os.read(handle, 4096)
    except OSError:
        return b""
    finally:
        os.close(handle)


class Peaks(NamedTuple):
    """Bytes by place, names of GPUs on other nodes, and what could not be read although nothing is there."""

    peaks: dict[str, int]
    gpus: list[str]
    notes: list[str]


class _Running:
    """What watches for this process. A copy of it, as goes with this module to other nodes, is empty."""

    def __init__(self) -> None:
        self.sampler: MemorySampler | None = None
        self.cluster: object = None

    def __reduce__(self) -> tuple[type[_Running], tuple[()]]:
        return _Running, ()


_RUNNING = _Running()


def begin(marks: tuple[int, int]) -> None:
    """A test begins, with what the kernel remembers of this process until now."""
    if _RUNNING.sampler is not None and _RUNNING.sampler.root == os.getpid():
        _RUNNING.sampler.reset(marks)


def read_peaks(test: str, marks: tuple[int, int]) -> Peaks:
    """Peaks since the test began, here and on every Ray node."""
    from pytest_seatrial.ray_memory import Cluster

    sampler = _RUNNING.sampler
    if sampler is None or sampler.root != os.getpid():  # a forked child has no thread of ours
        sampler = _RUNNING.sampler = MemorySampler(os.getpid())
        sampler.reset(marks)
    if not isinstance(_RUNNING.cluster, Cluster):
        _RUNNING.cluster = Cluster()
    here = sampler.peaks()
    there = _RUNNING.cluster.peaks(test)
    return Peaks(here | there.peaks, there.gpus, [*([sampler.problem] if sampler.problem else []), *there.notes])


def stop() -> None:
    """End the thread."""
    if _RUNNING.sampler is not None:
        _RUNNING.sampler.stop()
        _RUNNING.sampler = None
