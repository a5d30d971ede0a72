"""Campaigns on a real Slurm: arrays that are preempted, requeued and killed, and in the end every unit has exactly one result."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from seatrial.model.job import Ending

from .campaigns import Desk, complete, ended, policy, stub_server
from .cluster import PrivateSlurm
from .conftest import MakeCluster, bring_up
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


def test_a_round_that_was_left_is_followed_and_never_doubled(own: PrivateSlurm, tmp_path: Path) -> None:
    with policy(latency_s=1.5) as stub:
        desk = Desk.make(tmp_path, own, work(stub.url, 4, 4), rows=4)
        left = desk.call(*desk.start("--detach"))
        assert (left.code, len(desk.rounds())) == (0, 1)
        again = desk.call("resume", "c", "--detach")
        assert again.code == 0
        assert "round 1 on slurm:low has not ended" in again.out
        first = desk.begin("resume", "c")
        assert first.stdout is not None
        assert "round 1 on slurm:low has not ended: following it" in first.stdout.readline()
        second = desk.begin("resume", "c")
        assert second.stdout is not None
        assert f"process {first.pid}" in second.stdout.readline()
        first.send_signal(signal.SIGINT)
        assert "the jobs go on" in (interrupted := ended(first)).out
        assert interrupted.code == 130
        stub.latency_s = 0.0
        answer = ended(second)
    assert answer.code == 0, answer.out
    assert (len(desk.rounds()), stub.calls) == (1, 16)
    assert complete(desk.place, 16)["duplicates"] == 0


def test_cancel_ends_the_jobs_and_whoever_carries_them_and_resume_goes_on(own: PrivateSlurm, tmp_path: Path) -> None:
    with policy(latency_s=1.0) as stub:
        desk = Desk.make(tmp_path, own, work(stub.url, 4, 4, parallel=2), rows=4)
        running = desk.begin(*desk.start())
        desk.working(range(2))
        cancelled = desk.call("cancel", "c")
        assert (cancelled.code, "cancelled collect\ncancelled merge\n" in cancelled.out) == (0, True)
        answer = ended(running)
        assert (answer.code, len(desk.rounds())) == (99, 1), answer.out
        assert "still owed" in answer.out
        assert "nothing to cancel" in desk.call("cancel", "c").out
        stub.latency_s = 0.0
        resumed = desk.call("resume", "c")
    assert resumed.code == 0, resumed.out
    assert "it had stopped: cancelled" in resumed.out
    assert len(desk.rounds()) == 2
    complete(desk.place, 16)
    desk.nothing_left()


def test_near_the_time_limit_open_rollouts_are_finished_and_the_rest_comes_in_the_next_round(own: PrivateSlurm, tmp_path: Path) -> None:
    with policy(latency_s=2.0) as stub:
        desk = Desk.make(tmp_path, own, work(stub.url, 2, 3), rows=2)
        running = desk.begin(*desk.start())
        desk.working(range(1))
        # What Slurm sends at that time; waiting for it would take a minute.
        assert own.run("scancel", "--batch", "--signal=USR1", f"{desk.slurm_id(1)}_0").returncode == 0
        until(lambda: desk.job(1).result(0), "end of the task", 30)
        stub.latency_s = 0.0
        answer = ended(running)
    assert answer.code == 0, answer.out
    first = desk.results(1)[0]
    assert first is not None
    assert (first.ending, first.exit_code) == (Ending.TIME_LIMIT, 99)
    assert desk.rounds()[1].tasks == ((0,),)
    assert stub.calls == 6
    assert complete(desk.place, 6)["duplicates"] == 0


def test_a_server_that_dies_in_a_task_costs_that_task_and_the_merge_says_what_is_missing(own: PrivateSlurm, tmp_path: Path) -> None:
    mark = tmp_path / "died"
    desk = Desk.make(tmp_path, own, stub_server(mark) + "[work]\nshards = 3\nrepeats = 2\n", rows=9)
    left = desk.call(*desk.start("--detach"))
    assert left.code == 0, left.out
    result, log = desk.merge_ended(1)
    died = desk.job(1).result(1)
    assert died is not None
    assert (died.ending, died.component, died.exit_code) == (Ending.SERVICE_ENDED, "policy.0", 1)
    assert died.ended - mark.stat().st_mtime < 5
    assert (result.ending, result.exit_code) == (Ending.CLIENT_FAILED, 99)
    assert "of 18 rollouts" in log, log
    assert not (desk.place.merged / "merge.json").exists()
    answer = desk.call("resume", "c")
    assert answer.code == 0, answer.out
    assert [found.tasks for found in desk.rounds()] == [((0,), (1,), (2,)), ((1,),)]
    complete(desk.place, 18)
    desk.nothing_left()


def test_more_shards_than_an_array_may_have_are_packed(tmp_path: Path, make_cluster: MakeCluster) -> None:
    small = make_cluster(nodes=1, settings={"MaxArraySize": "4"})
    with policy() as stub:
        desk = Desk.make(tmp_path, small, work(stub.url, 10, 1).replace("cpus = 8", "cpus = 2"), rows=10)
        shown = desk.call(*desk.start("--dry-run"))
        assert (shown.code, "#SBATCH --array=0-3\n" in shown.out) == (0, True), shown.out
        assert not desk.place.root.exists()
        answer = desk.call(*desk.start())
    assert answer.code == 0, answer.out
    assert [found.tasks for found in desk.rounds()] == [((0, 4, 8), (1, 5, 9), (2, 6), (3, 7))]
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
