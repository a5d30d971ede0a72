"""Peak memory of a process tree and its GPUs, and of every node of the Ray cluster that this process is connected to.

- One thread samples; nothing runs before the first `read_peaks`.
- Ray is never imported nor started here: only where the tests did both is there a cluster to read.
- One watcher (an actor without CPUs or GPUs) per node samples its raylet's process tree and the node's GPUs. It is made at the first
  reading, and lives as long as this process stays connected. Nodes need no Seatrial: the watcher travels by value.
- A node that does not answer in time is an error that names it, never a smaller number.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import Any, NamedTuple

from pytest_seatrial import gpus

TREE = "process tree"
PROC = "/proc"
INTERVAL_S = 0.02
ANSWER_S = 20.0  # of a Ray node
SHARE = 20  # the thread waits at least so many times as long as its last look took


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
        """The peaks, this very moment included; only the test's own thread resets, so that sample counts."""
        self._sample()
        with self._lock:
            found = dict(self._peaks)
            if self._own:
                found[TREE] = max(found[TREE], risen(self._marks, marks()))
        return found

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(timeout=5)
        if self._gpus is not None and not self._thread.is_alive():
            self._gpus.close()

    def _loop(self) -> None:
        wait = INTERVAL_S
        while not self._stop.wait(wait):
            began = time.thread_time()
            try:
                self._sample()
            except gpus.GpuError:
                return  # whoever asks for the peaks gets it raised
            wait = max(INTERVAL_S, (time.thread_time() - began) * SHARE)

    def _sample(self) -> None:
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
    parents: dict[int, list[int]] = {}
    for entry in os.listdir(PROC):  # noqa: PTH208  # a Path for each of thousands is what makes it slow
        if entry.isdigit() and (text := _read(f"{PROC}/{entry}/stat")):
            parents.setdefault(int(text.rpartition(b")")[2].split()[1]), []).append(int(entry))
    found: list[int] = []
    todo = [root]
    while todo:
        children = parents.pop(todo.pop(), [])
        found += children
        todo += children
    return found


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


class ClusterError(RuntimeError):
    """A node that did not answer, or could not be read."""


class Peaks(NamedTuple):
    """Peaks in bytes by place, names of GPUs on Ray nodes, and what could not be read although nothing is there."""

    peaks: dict[str, int]
    gpus: list[str]
    notes: list[str]


class Watcher:
    """In a Ray worker: what the worker's node uses."""

    def __init__(self) -> None:
        # A worker is a child of its node's raylet, and so are all others of the node.
        self._sampler = MemorySampler(os.getppid())
        self._test = ""

    def read(self, test: str) -> tuple[dict[str, int], list[str], str | None]:
        """Peaks since `test` first asked, the names of the GPUs, and why GPUs could not be read."""
        if test != self._test:
            self._test = test
            self._sampler.reset()
        return self._sampler.peaks(), self._sampler.names(), self._sampler.problem


class Cluster:
    def __init__(self) -> None:
        self._watchers: dict[tuple[str, str], Any] = {}

    def peaks(self, test: str, answer_s: float = ANSWER_S) -> Peaks:
        """Places are "node 0", "node 1 gpu 0", …, and peaks those since `test` first asked; nothing without a cluster."""
        read = Peaks({}, [], [])
        ray = sys.modules.get("ray")
        if ray is None or not hasattr(ray, "is_initialized") or not ray.is_initialized():
            return read
        deadline = time.monotonic() + answer_s
        nodes = [node for node in ray.nodes() if node["Alive"]]
        names = [f"node {index} ({node.get('NodeManagerAddress')}, {node['NodeID'][:8]})" for index, node in enumerate(nodes)]
        # A watcher ends with its job, and a process that connects anew is a new job.
        keys = [(ray.get_runtime_context().get_job_id(), node["NodeID"]) for node in nodes]
        for key in keys:
            if key not in self._watchers:
                self._watchers[key] = _make_watcher(ray, key[1])
        pending = [self._watchers[key].read.remote(test) for key in keys]
        answered, _ = ray.wait(pending, num_returns=len(pending), timeout=max(0.0, deadline - time.monotonic()))
        silent = [name for name, answer in zip(names, pending, strict=True) if answer not in answered]
        if silent:
            raise ClusterError(
                f"no answer in {answer_s:g} s about the memory of Ray {', '.join(silent)}: see its raylet.out and `ray status`"
            )
        for index, (name, key, answer) in enumerate(zip(names, keys, pending, strict=True)):
            try:
                found, gpu_names, problem = ray.get(answer, timeout=5)
            except Exception as error:  # Ray raises what the node raised, or that the node or the watcher is gone
                self._watchers.pop(key, None)
                why = f"{type(error).__name__}: {str(error)[:300]}"
                raise ClusterError(f"the memory of Ray {name} cannot be read: {why}") from error
            read.peaks.update({f"node {index}" if place == TREE else f"node {index} {place}": value for place, value in found.items()})
            read.gpus.extend(gpu_names)
            read.notes.extend([f"node {index}: {problem}"] if problem else [])
        return read


def _make_watcher(ray: Any, node: str) -> Any:  # Ray has no types
    from ray import cloudpickle
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    ours = [sys.modules[name] for name in (__name__, gpus.__name__)]
    for module in ours:
        cloudpickle.register_pickle_by_value(module)
    try:
        where = NodeAffinitySchedulingStrategy(node_id=node, soft=False)
        return ray.remote(Watcher).options(num_cpus=0, num_gpus=0, scheduling_strategy=where).remote()
    finally:
        for module in ours:
            cloudpickle.unregister_pickle_by_value(module)


_cluster = Cluster()
_sampler: MemorySampler | None = None


def begin(marks: tuple[int, int]) -> None:
    """A test begins, with what the kernel remembers of this process until now."""
    if _sampler is not None and _sampler.root == os.getpid():
        _sampler.reset(marks)


def read_peaks(test: str, marks: tuple[int, int]) -> Peaks:
    """Peaks since the test began, here and on every Ray node."""
    global _sampler
    if _sampler is None or _sampler.root != os.getpid():  # a forked child has no thread of ours
        _sampler = MemorySampler(os.getpid())
        _sampler.reset(marks)
    here, there = _sampler.peaks(), _cluster.peaks(test)
    return Peaks(here | there.peaks, there.gpus, [*([_sampler.problem] if _sampler.problem else []), *there.notes])


def stop() -> None:
    global _sampler
    if _sampler is not None:
        _sampler.stop()
        _sampler = None
