"""In Ray's own interpreter: two nodes, and what each of them holds."""

from __future__ import annotations

import atexit
import functools
import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

MB = 2**20


@contextmanager
def up() -> Iterator[Any]:
    """A cluster of two raylets on this machine, the second with a resource of its own; no Seatrial on the nodes' path."""
    from ray.cluster_utils import Cluster

    os.environ.pop("PYTHONPATH", None)  # nodes inherit the environment; this process has read it
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        yield cluster, cluster.add_node(num_cpus=1, resources={"second": 1})
    finally:
        cluster.shutdown()


@functools.cache
def kept() -> Any:
    """The cluster of all cases that do it no harm: one takes seconds of many processes."""
    around = ExitStack()
    atexit.register(around.close)
    return around.enter_context(up())


@contextmanager
def connected(nodes: Any) -> Iterator[Any]:
    """This process as a new job of a cluster; gives the second node."""
    import ray

    cluster, second = nodes
    ray.init(address=cluster.address, log_to_driver=False)
    try:
        yield second
    finally:
        ray.shutdown()


def holder() -> Any:
    """An actor on the second node that holds 200 MB until it is told to let go."""
    import ray

    class Holder:
        def hold(self) -> int:
            self.held = bytearray(200 * MB)
            self.held[::4096] = b"1" * len(self.held[::4096])
            return len(self.held)

        def drop(self) -> None:
            del self.held

    return ray.remote(Holder).options(num_cpus=0, resources={"second": 1}).remote()


def second_index() -> int:
    import ray

    alive = [node for node in ray.nodes() if node["Alive"]]
    return next(index for index, node in enumerate(alive) if "second" in node["Resources"])


def case_every_node_is_read_and_a_peak_that_is_over_counts() -> None:
    import ray

    from pytest_seatrial.memory_sampler import Cluster

    with connected(kept()):
        cluster, name = Cluster(), f"node {second_index()}"
        actor = holder()
        ray.get(actor.__ray_ready__.remote(), timeout=60)
        before = cluster.peaks("a").peaks
        assert {"node 0", "node 1"} <= set(before), before
        assert ray.get(actor.hold.remote(), timeout=60) == 200 * MB
        time.sleep(1.0)  # not for the assertion's sake: the node's thread must have looked once
        ray.get(actor.drop.remote(), timeout=60)
        after = cluster.peaks("a").peaks
        assert after[name] - before[name] > 190 * MB, (before, after)
        other = "node 1" if name == "node 0" else "node 0"
        assert after[other] - before[other] < 100 * MB, (before, after)
        fresh = cluster.peaks("b").peaks
        assert fresh[name] < after[name] - 150 * MB, (after, fresh)


def case_a_node_that_does_not_answer_is_an_error_that_names_it() -> None:
    from pytest_seatrial import memory_sampler
    from pytest_seatrial.memory_sampler import Cluster, ClusterError

    with up() as own, connected(own) as second:
        cluster, index = Cluster(), second_index()
        cluster.peaks("a")
        raylet = next(iter(second.all_processes["raylet"])).process.pid
        stopped = [raylet, *memory_sampler.descendants(raylet)]
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        said = "a smaller number"
        try:
            cluster.peaks("a", answer_s=3)
        except ClusterError as error:
            said = str(error)
        finally:
            for pid in stopped:
                os.kill(pid, signal.SIGCONT)
        assert said.startswith("no answer in 3 s"), said
        assert f"node {index} (" in said, said


def case_a_process_that_connects_anew_gets_new_watchers() -> None:
    from pytest_seatrial.memory_sampler import Cluster

    cluster = Cluster()
    assert cluster.peaks("a").peaks == {}
    for _ in range(2):
        with connected(kept()):
            assert set(cluster.peaks("a").peaks) >= {"node 0", "node 1"}
    assert cluster.peaks("a").peaks == {}


def case_the_fullest_node_is_the_number_of_a_test() -> None:
    import ray

    from pytest_seatrial import memory_sampler

    with connected(kept()):
        actor = holder()
        ray.get(actor.hold.remote(), timeout=60)
        found = memory_sampler.read_peaks("a", (0, 0))
        assert {"process tree", "node 0", "node 1"} <= set(found.peaks), found
        assert found.notes == [], found
    memory_sampler.stop()
