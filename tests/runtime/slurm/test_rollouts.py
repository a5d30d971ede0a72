"""Campaigns on a real Slurm: arrays that are preempted, requeued and killed, and in the end every unit has exactly one result."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest

from seatrial.core.jobs import Ending
from tests.runtime.slurm.campaigns import Desk, complete, ended, policy, stub_server
from tests.runtime.slurm.cluster import PrivateSlurm
from tests.runtime.slurm.conftest import MakeCluster, bring_up
from tests.runtime.slurm.harness import until

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrivateSlurm]:
    """A cluster whose daemons may be killed."""
    cluster = bring_up(tmp_path_factory.mktemp("rollouts"), nodes=5)
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


def test_an_array_in_which_everything_happens_to_tasks(own: PrivateSlurm, tmp_path: Path) -> None:
    killed, requeued, preempted, lost, limited = range(5)
    with policy(latency_s=2.5) as stub:
        desk = Desk.make(tmp_path, own, work(stub.url, 30, 3, parallel=5), rows=60)
        running = desk.begin(*desk.start())
        desk.working(range(5))
        nodes = {task: desk.node(1, task) for task in range(5)}
        assert sorted(nodes.values()) == ["n1", "n2", "n3", "n4", "n5"]
        # What Slurm sends near the time limit, for which a test would wait a minute. While other units wait, scancel sends it and tries on.
        own.run("timeout", "1", "scancel", "--batch", "--signal=USR1", f"{desk.slurm_id(1)}_{limited}")
        assert own.run("scontrol", "requeue", f"{desk.slurm_id(1)}_{requeued}").returncode == 0
        urgent = ("sbatch", "--partition=high", f"--nodelist={nodes[preempted]}", "--exclusive", "--output=/dev/null", "--wrap=sleep 1")
        assert own.run(*urgent).returncode == 0
        os.kill(desk.lease(killed).holder.pid, signal.SIGKILL)
        own.kill_node(nodes[lost])
        try:
            # All of it has come about before anybody is done.
            until(lambda: "1 open rollouts have" in desk.log(1, limited) or None, lambda: desk.log(1, limited), 10)
            desk.left(1, requeued)
            desk.left(1, preempted)
            stub.latency_s = 0.02
            answer = ended(running, 120)
        finally:
            own.start_node(nodes[lost])
    assert answer.code == 0, answer.out
    first, second = desk.rounds()
    assert (len(first.tasks), sorted(chain.from_iterable(second.tasks))) == (30, [killed, limited])
    ends = [(found.ending, found.exit_code, found.restart) if found else None for found in desk.results(1)]
    assert ends[killed] == (Ending.CLIENT_FAILED, 137, 0)
    assert ends[limited] == (Ending.TIME_LIMIT, 99, 0)
    assert [ends[task] for task in (requeued, preempted, lost)] == [(Ending.DONE, 0, 1)] * 3
    assert ends[5:] == [(Ending.DONE, 0, 0)] * 25
    # The rollout that was open when a task ended: that near the time limit was finished, the four others were asked for again.
    assert 180 <= stub.calls <= 180 + 4
    merged = complete(desk.place, 180)
    assert (merged["duplicates"], merged["conflicts"], merged["foreign"]) == (0, 0, 0)
    result, log = desk.merge_ended(2)
    assert result.ending is Ending.DONE, log
    assert complete(desk.place, 180)["rollouts"] == merged["rollouts"]
    desk.nothing_left()


def test_a_round_that_was_left_is_followed_and_never_doubled(own: PrivateSlurm, tmp_path: Path) -> None:
    with policy(latency_s=4.0) as stub:
        desk = Desk.make(tmp_path, own, work(stub.url, 4, 4), rows=4)
        left = desk.call(*desk.start("--detach"))
        assert (left.code, len(desk.rounds())) == (0, 1)
        again = desk.call("resume", "c", "--detach")
        assert again.code == 0
        assert "round 1 on slurm:low has not ended" in again.out
        first = desk.begin("resume", "c")
        assert first.stdout is not None
        assert "round 1 on slurm:low has not ended: following it" in first.stdout.readline()
        second = desk.call("resume", "c")
        assert (second.code, f"process {first.pid}" in second.out) == (99, True), second.out
        first.send_signal(signal.SIGINT)
        interrupted = ended(first)
        assert (interrupted.code, "the jobs go on" in interrupted.out) == (130, True)
        stub.latency_s = 0.0
        answer = desk.call("resume", "c")
    assert answer.code == 0, answer.out
    assert (len(desk.rounds()), stub.calls) == (1, 16)
    assert complete(desk.place, 16)["duplicates"] == 0


def test_cancel_ends_the_jobs_and_whoever_carries_them_and_resume_goes_on(own: PrivateSlurm, tmp_path: Path) -> None:
    with policy(latency_s=1.5) as stub:
        desk = Desk.make(tmp_path, own, work(stub.url, 4, 4, parallel=2), rows=4)
        running = desk.begin(*desk.start())
        desk.working(range(2))
        cancelled = desk.call("cancel", "c")
        assert (cancelled.code, "cancelled job collect\ncancelled job merge\n" in cancelled.out) == (0, True)
        answer = ended(running)
        assert (answer.code, len(desk.rounds())) == (99, 1), answer.out
        assert "still owed" in answer.out
        assert "nothing to cancel" in desk.call("cancel", "c").out
        stub.latency_s = 0.0
        resumed = desk.call("resume", "c")
    assert resumed.code == 0, resumed.out
    assert "it had stopped: it was cancelled" in resumed.out
    assert len(desk.rounds()) == 2
    complete(desk.place, 16)
    desk.nothing_left()


def test_a_server_that_dies_in_a_task_costs_that_task_and_the_merge_says_what_is_missing(own: PrivateSlurm, tmp_path: Path) -> None:
    mark = tmp_path / "died"
    desk = Desk.make(tmp_path, own, stub_server(mark) + "[work]\nshards = 3\nrepeats = 2\nparallel = 2\n", rows=6)
    left = desk.call(*desk.start("--detach"))
    assert left.code == 0, left.out
    result, log = desk.merge_ended(1)
    died = desk.job(1).result(1)
    assert died is not None
    assert (died.ending, died.component, died.exit_code) == (Ending.SERVICE_ENDED, "policy.0", 1)
    assert died.ended - mark.stat().st_mtime < 3
    # With its result a task is over: its server is not left waiting while others of the array have yet to start.
    assert all(left_s < 6 for left_s in desk.lingered(1))
    assert (result.ending, result.exit_code) == (Ending.CLIENT_FAILED, 99)
    assert "incomplete: 2 of 12 units have no result (10 ok, 0 failed for good); the first: " in log, log
    assert not (desk.place.merged / "merge.json").exists()
    answer = desk.call("resume", "c")
    assert answer.code == 0, answer.out
    assert [found.tasks for found in desk.rounds()] == [((0,), (1,), (2,)), ((1,),)]
    complete(desk.place, 12)
    desk.nothing_left()


def test_more_shards_than_an_array_may_have_are_packed_and_left_alone_the_jobs_merge(tmp_path: Path, make_cluster: MakeCluster) -> None:
    small = make_cluster(nodes=1, settings={"MaxArraySize": "4"})
    with policy() as stub:
        desk = Desk.make(tmp_path, small, work(stub.url, 10, 1).replace("cpus = 8", "cpus = 2"), rows=10)
        shown = desk.call(*desk.start("--dry-run"))
        assert (shown.code, "#SBATCH --array=0-3\n" in shown.out) == (0, True), shown.out
        assert not desk.place.root.exists()
        refused = desk.call(*desk.start(profile="nowhere"))
        assert (refused.code, "collect was not accepted: sbatch: " in refused.out) == (99, True), refused.out
        assert "nothing to cancel" in desk.call("cancel", "c").out
        answer = desk.call("resume", "c", "--on", "slurm:low", "--detach")
        assert answer.code == 0, answer.out
        result, log = desk.merge_ended(2)
    assert result.ending is Ending.DONE, log
    assert desk.rounds()[1].tasks == ((0, 4, 8), (1, 5, 9), (2, 6), (3, 7))
    assert stub.calls == 10
    complete(desk.place, 10)


def test_a_dry_run_shows_shards_and_scripts_and_what_slurm_says(own: PrivateSlurm, tmp_path: Path) -> None:
    desk = Desk.make(tmp_path, own, work("http://127.0.0.1:9/v1", 30, 2, parallel=3), rows=60)
    shown = desk.call(*desk.start("--dry-run"))
    assert shown.code == 0
    for said in ("30 shards of 4 rollouts", "#SBATCH --array=0-29%3\n", "collect: ok\n", "merge: ok\n"):
        assert said in shown.out
    refused = desk.call(*desk.start("--dry-run", profile="nowhere"))
    assert (refused.code, "collect: sbatch: " in refused.out) == (99, True)
    unknown = desk.call(*desk.start("--dry-run", "--set", "collector.container=nope"))
    assert (unknown.code, "the profile knows no container 'nope'; known: none" in unknown.out) == (2, True)
    assert not desk.place.root.exists()
