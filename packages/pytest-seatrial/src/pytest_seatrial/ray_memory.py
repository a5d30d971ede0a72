"""Peak memory on every node of the Ray cluster that this process is connected to.

- Ray is never imported nor started here: only where the tests did both is there a cluster to read.
- One watcher (an actor without CPUs or GPUs) per node watches its raylet's process tree and the node's GPUs. It is made at the first
  reading, and lives as long as this process stays connected. Nodes need no Seatrial: the watcher travels by value.
- A node that does not answer in time is an error that names it, never a smaller number.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any, NamedTuple

from pytest_seatrial import gpus, memory_sampler

ANSWER_S = 20.0


class ClusterError(RuntimeError):
    """A node that did not answer, or could not be read."""


class RayPeaks(NamedTuple):
    """Peaks in bytes by place, names of the GPUs, and what could not be read although nothing is there."""

    peaks: dict[str, int]
    gpus: list[str]
    notes: list[str]


class Watcher:
    """In a Ray worker: what the worker's node uses."""

    def __init__(self) -> None:
        # A worker is a child of its node's raylet, and so are all others of the node.
        self._sampler = memory_sampler.MemorySampler(os.getppid())
        self._test = ""

    def read(self, test: str) -> tuple[dict[str, int], list[str], str | None]:
        """Peaks since `test` first asked, the names of the GPUs, and why GPUs could not be read."""
        if test != self._test:
            self._test = test
            self._sampler.reset()
        return self._sampler.peaks(), self._sampler.names(), self._sampler.problem


class Cluster:
    """The watchers of one process."""

    def __init__(self) -> None:
        self._watchers: dict[tuple[str, str], Any] = {}

    def peaks(self, test: str, answer_s: float = ANSWER_S) -> RayPeaks:
        """Places are "node 0", "node 1 gpu 0", …, and peaks those since `test` first asked; nothing without a cluster."""
        read = RayPeaks({}, [], [])
        ray = connected()
        if ray is None:
            return read
        deadline = time.monotonic() + answer_s
        nodes = [node for node in ray.nodes() if node["Alive"]]
        watchers = [self._watcher(ray, node["NodeID"]) for node in nodes]
        asked = [watcher.read.remote(test) for watcher in watchers]
        answered, _ = ray.wait(asked, num_returns=len(asked), timeout=max(0.0, deadline - time.monotonic()))
        silent = [_place(index, node) for index, (node, ask) in enumerate(zip(nodes, asked, strict=True)) if ask not in answered]
        if silent:
            raise ClusterError(
                f"no answer in {answer_s:g} s about the memory of Ray {', '.join(silent)}: see its raylet.out and `ray status`"
            )
        for index, (node, ask) in enumerate(zip(nodes, asked, strict=True)):
            found, names, problem = self._answer(ray, ask, index, node)
            read.peaks.update(
                {f"node {index}" if place == memory_sampler.TREE else f"node {index} {place}": value for place, value in found.items()}
            )
            read.gpus.extend(names)
            read.notes.extend([f"node {index}: {problem}"] if problem else [])
        return read

    def _answer(self, ray: Any, ask: Any, index: int, node: dict[str, Any]) -> tuple[dict[str, int], list[str], str | None]:
        try:
            answer: tuple[dict[str, int], list[str], str | None] = ray.get(ask, timeout=5)
        except Exception as error:  # Ray raises what the node raised, or that the node or the watcher is gone
            self._watchers.pop(_key(ray, node["NodeID"]), None)
            said = f"{type(error).__name__}: {str(error)[:300]}"
            raise ClusterError(f"the memory of Ray {_place(index, node)} cannot be read: {said}") from error
        return answer

    def _watcher(self, ray: Any, node: str) -> Any:  # Ray has no types
        key = _key(ray, node)
        if key not in self._watchers:
            self._watchers[key] = _make(ray, node)
        return self._watchers[key]


def connected() -> Any:
    """The module `ray` when this process is connected to a cluster, or None."""
    ray = sys.modules.get("ray")
    return ray if ray is not None and hasattr(ray, "is_initialized") and ray.is_initialized() else None


def _make(ray: Any, node: str) -> Any:
    from ray import cloudpickle
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    ours = [sys.modules[name] for name in (__name__, memory_sampler.__name__, gpus.__name__)]
    for module in ours:
        cloudpickle.register_pickle_by_value(module)
    try:
        where = NodeAffinitySchedulingStrategy(node_id=node, soft=False)
        return ray.remote(Watcher).options(num_cpus=0, num_gpus=0, scheduling_strategy=where).remote()
    finally:
        for module in ours:
            cloudpickle.unregister_pickle_by_value(module)


def _key(ray: Any, node: str) -> tuple[str, str]:
    """A watcher ends with its job, and a process that connects anew is a new job."""
    return ray.get_runtime_context().get_job_id(), node


def _place(index: int, node: dict[str, Any]) -> str:
    return f"node {index} ({node.get('NodeManagerAddress')}, {node['NodeID'][:8]})"
