"""Campaigns on a real Slurm: arrays that are preempted, requeued and killed, and in the end every unit has exactly one result."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from seatrial.model.job import Ending

from .campaigns import Desk, complete, ended, policy
from .cluster import PrivateSlurm
from .conftest import bring_up
from .harness import until

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrivateSlurm]:
    """A cluster whose daemons may be killed."""
    cluster = bring_up(tmp_path_factory.mktemp("rollouts"))
    yield cluster
    cluster.down()


def work(url: str, shards: int, repeats: int, **more: object) -> str:
    """The rest of a campaign's file, with a policy that runs elsewhere; a task takes a whole node."""
    lines = [f"{key} = {value}" for key, value in more.items()]
    return "\n".join(
        [
            f'[policy]\nurl = "{url}"\nmodel = "stub"',
            "[collector]\ncpus = 8",
            f"[work]\nshards = {shards}\nrepeats = {repeats}",
            *lines,
        ]
    )


def test_an_array_with_a_killed_a_requeued_a_preempted_task_and_a_dead_node(own: PrivateSlurm, tmp_path: Path) -> None:
    with policy(latency_s=1.5) as stub:
        desk = Desk.make(tmp_path, own, work(stub.url, 32, 2, parallel=4), rows=64)
        running = desk.begin(*desk.start())
        desk.working(range(4))
        nodes = {task: desk.node(1, task) for task in range(4)}
        assert sorted(nodes.values()) == ["n1", "n2", "n3", "n4"]
        killed, requeued, preempted, lost = range(4)
        os.kill(desk.lease(killed).holder.pid, signal.SIGKILL)
        assert own.run("scontrol", "requeue", f"{desk.slurm_id(1)}_{requeued}").returncode == 0
        urgent = ("sbatch", "--partition=high", f"--nodelist={nodes[preempted]}", "--exclusive", "--output=/dev/null", "--wrap=sleep 1")
        assert own.run(*urgent).returncode == 0
        own.kill_node(nodes[lost])
        try:
            stub.latency_s = 0.02
            answer = ended(running, 120)
        finally:
            own.start_node(nodes[lost])
    print(answer.out)
    assert answer.code == 0, answer.out
    first, second = desk.rounds()
    assert (len(first.tasks), second.tasks) == (32, ((killed,),))
    ends = [(found.ending, found.exit_code, found.restart) if found else None for found in desk.results(1)]
    assert ends[killed] == (Ending.CLIENT_FAILED, 137, 0)
    assert [ends[task] for task in (requeued, preempted, lost)] == [(Ending.DONE, 0, 1)] * 3
    assert ends[4:] == [(Ending.DONE, 0, 0)] * 28
    # Each of the four lost at most the one rollout that was open.
    assert 128 <= stub.calls <= 128 + 4
    merged = complete(desk.place, 128)
    assert (merged["duplicates"], merged["conflicts"], merged["foreign"]) == (0, 0, 0)
    result, log = desk.merge_ended(2)
    assert result.ending is Ending.DONE, log
    assert complete(desk.place, 128)["rollouts"] == merged["rollouts"]
    desk.nothing_left()
