"""Steps of a bisect as Slurm jobs: what counts as the command's own end, and that nothing is submitted twice or left behind."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from seatrial.bisect.bisect_records import BisectPlan
from seatrial.bisect.runners import CLIENT, JOB, JOBS, SlurmRunner, cancel_slurm_jobs, facts_of, job_of
from seatrial.bisect.step_preparer import PreparedStep
from seatrial.core.errors import UserError
from seatrial.core.jobs import Ending, Profile, Result, UnitState, UnitStatus
from seatrial.runtime.interrupt import Interrupted, Interruptible
from seatrial.runtime.jobdir import job_dir
from seatrial.runtime.slurm import SlurmRefused
from tests.bisect.prepared import plan_of, prepared_of
from tests.runtime.slurm.cluster import PrivateSlurm
from tests.runtime.slurm.harness import until
from tests.runtime.slurm.stand_ins import stand_ins

real = pytest.mark.real
PROFILE = Profile(time="0:10:00", cpus=1)
FOREVER = ("sleep", "600")


def nothing() -> set[int]:
    return set()


def status(state: UnitState, scheduler: str = "", reason: str = "", **result: Any) -> UnitStatus:
    """A unit that has ended; with `ending` it left a result."""
    made = {
        "job": JOB,
        "index": 0,
        "slurm": "7",
        "restart": 0,
        "component": CLIENT,
        "exit_code": None,
        "node": "n1",
        "started": 0,
        "ended": 9,
    }
    left = Result.model_validate(made | result) if result else None
    return UnitStatus(job=JOB, index=0, slurm="7", state=state, scheduler=scheduler, reason=reason, result=left)


FAILED = {"ending": Ending.CLIENT_FAILED}


@pytest.mark.parametrize(
    ("unit", "code", "ended", "scheduler"),
    [
        (status(UnitState.DONE, "COMPLETED", ending=Ending.DONE, exit_code=0), 0, "exited", ""),
        (status(UnitState.FAILED, "FAILED", "client-failed", **FAILED, exit_code=7), 7, "exited", ""),
        # The codes of Seatrial mean nothing here: the command is somebody else's.
        (status(UnitState.BLOCKED, "FAILED", "client-failed", **FAILED, exit_code=99), 99, "exited", ""),
        (status(UnitState.FAILED, "OUT_OF_MEMORY", "client-failed", **FAILED, exit_code=137), 137, "exited", "OUT_OF_MEMORY"),
        (status(UnitState.BLOCKED, "FAILED", "client-failed: srun", **FAILED), None, "exited", "client-failed: srun"),
        (status(UnitState.BLOCKED, "NODE_FAIL", "a node failed"), None, "exited", "NODE_FAIL, a node failed"),
        (status(UnitState.BLOCKED, "COMPLETED", "without leaving a result"), None, "exited", "without leaving a result"),
        (status(UnitState.LOST, "", "neither Slurm nor a result knows it"), None, "exited", "neither Slurm"),
        (status(UnitState.BLOCKED, "CANCELLED", "stopped", ending=Ending.STOPPED), None, "exited", "CANCELLED"),
        (status(UnitState.BLOCKED, "", "time-limit", ending=Ending.TIME_LIMIT, ended=61), None, "deadline", ""),
        # Somebody lowered the limit of the job: that is not the command's slowness.
        (status(UnitState.BLOCKED, "", "time-limit", ending=Ending.TIME_LIMIT, ended=59), None, "exited", "time-limit"),
        (status(UnitState.BLOCKED, "", "not believed", **FAILED, job="other", exit_code=1), None, "exited", "not believed"),
    ],
)
def test_only_the_commands_own_end_counts(tmp_path: Path, unit: UnitStatus, code: int | None, ended: str, scheduler: str) -> None:
    facts = facts_of(prepared_of(plan_of("true"), tmp_path), unit, minutes=1.0)
    assert (facts.exit_code, facts.ended) == (code, ended)
    assert scheduler in facts.scheduler
    assert bool(facts.scheduler) is bool(scheduler)


def test_in_ray_the_code_that_says_that_ray_broke_is_not_the_commands(tmp_path: Path) -> None:
    unit = status(UnitState.BLOCKED, "FAILED", "Ray did not come up", **FAILED, exit_code=99)
    facts = facts_of(prepared_of(plan_of("true"), tmp_path), unit, 1.0, in_ray=True)
    assert (facts.exit_code, "Ray did not come up" in facts.scheduler) == (None, True)


def test_the_job_leaves_the_command_all_of_its_time(tmp_path: Path) -> None:
    profile = Profile(gpus=2, cpus=3, memory_mb=500)
    job = job_of(plan_of("true", minutes=2.5), prepared_of(plan_of("true"), tmp_path), profile)
    assert (job.client.gpus, job.client.cpus, job.client.memory_mb, job.requeue) == (2, 3, 500, False)
    assert job.minutes is not None
    # Slurm warns up to a minute too early.
    assert 60 * job.minutes - job.warning_s(job.minutes) - 60 >= 60 * 2.5


def test_a_container_sees_the_bisect_directory_and_the_environment(tmp_path: Path) -> None:
    plan = plan_of("true", variables={"VIRTUAL_ENV": str(tmp_path / "env")})
    (tmp_path / "env").mkdir()
    job = job_of(plan, prepared_of(plan, tmp_path / "bisect"), Profile(image="image"))
    assert {f"{place}:{place}" for place in (tmp_path / "bisect", tmp_path / "env")} <= set(job.client.mounts)


@pytest.mark.parametrize(
    ("profile", "message"),
    [(Profile(nodes=2), "without Ray"), (Profile(ray="ray.sub"), "is not there")],
)
def test_a_profile_that_cannot_run_it_is_refused(tmp_path: Path, profile: Profile, message: str) -> None:
    with pytest.raises(UserError, match=message):
        job_of(plan_of("true"), prepared_of(plan_of("true"), tmp_path), profile)


def test_a_secret_is_not_written_into_a_job(tmp_path: Path) -> None:
    plan = plan_of("true", variables={"HF_TOKEN": "hf_" + "s" * 34})
    with pytest.raises(UserError, match="HF_TOKEN"):
        job_of(plan, prepared_of(plan, tmp_path, base={}), PROFILE)


def test_a_job_that_may_be_in_the_queue_is_not_submitted_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = stand_ins(tmp_path, monkeypatch)
    fake.answer("sbatch", "12\n")
    one = prepared_of(plan_of("true"), tmp_path)
    runner = SlurmRunner(plan_of("true"), PROFILE, "main", lambda _: None)
    runner._hand_over(one)
    runner._hand_over(one)
    assert len(fake.calls("sbatch")) == 1
    # Killed before sbatch was called: nothing is in the queue, whatever lies there.
    job_dir(one.step.directory / JOBS, JOB).submission_file.unlink()
    runner._hand_over(one)
    assert len(fake.calls("sbatch")) == 2


# --- on the private cluster


class Desk:
    """Somebody who runs steps on the cluster."""

    def __init__(self, cluster: PrivateSlurm, root: Path) -> None:
        self.cluster, self.root, self.told = cluster, root, list[str]()

    def steps(self, *plans: BisectPlan) -> list[PreparedStep]:
        return [prepared_of(plan, self.root, number) for number, plan in enumerate(plans, 1)]

    def runner(self, **more: Any) -> SlurmRunner:
        return SlurmRunner(plan_of("true", **more), PROFILE, "main", self.told.append)

    def queue(self) -> list[str]:
        """Ids of jobs that have not ended."""
        return self.cluster.run("squeue", "-h", "-o", "%i").stdout.split()

    def slurm(self, one: PreparedStep) -> str:
        """The id of the job of a step, awaited."""

        def look() -> str | None:
            found = job_dir(one.step.directory / JOBS, JOB).submission()
            return found.slurm if found else None

        return until(look, f"submission of step {one.step.number}", 60)

    def once_running(self, one: PreparedStep, action: Callable[[], object]) -> None:
        """Do something while the steps are followed, as soon as one of them runs."""

        def look() -> None:
            until(lambda: (one.step.output / "began").exists() or None, f"start of step {one.step.number}", 60)
            action()

        threading.Thread(target=look, daemon=True).start()


@pytest.fixture
def desk(cluster: PrivateSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    monkeypatch.setenv("SLURM_CONF", cluster.env["SLURM_CONF"])
    return Desk(cluster, tmp_path / "bisect")


def begun(*then: str) -> BisectPlan:
    """A plan whose command says that it runs."""
    return plan_of("bash", "-c", f"touch {{output}}/began; {' '.join(then)}")


@real
def test_steps_run_on_nodes_with_exact_codes_logs_and_places(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_" + "s" * 34)
    monkeypatch.setenv("GIT_DIR", "/mine/.git")
    says = 'pwd; echo "{port} $GIT_DIR:$SEATRIAL_COMMIT $HF_TOKEN"; echo 1 > {output}/made; exit 7'
    steps = desk.steps(plan_of("bash", "-c", says), plan_of("true"), plan_of("bash", "-c", "exit 99"))
    found = {one.step.number: facts for one, facts in desk.runner(jobs=3).run(steps, nothing)}
    assert {number: (facts.exit_code, facts.ended, facts.scheduler) for number, facts in found.items()} == {
        1: (7, "exited", ""),
        2: (0, "exited", ""),
        3: (99, "exited", ""),
    }
    log = found[1].log.read_text()
    assert f"{found[1].tree}\n{{port}} :{1:040x} [redacted" in log
    assert "hf_s" not in "".join(file.read_text() for file in steps[0].step.directory.rglob("*.log"))
    assert (found[1].output / "made").stat().st_mtime >= found[1].started
    assert not desk.queue()


@real
def test_only_so_many_are_in_the_queue(desk: Desk) -> None:
    most = []
    steps = desk.steps(*[plan_of("sleep", "0.5")] * 3)
    for _ in desk.runner(jobs=1).run(steps, nothing):
        most.append(len(list(desk.root.glob(f"steps/*/{JOBS}/*/submission.json"))))
    assert most == [1, 2, 3]


@real
def test_a_job_that_somebody_cancels_says_nothing_about_its_commit(desk: Desk) -> None:
    [one] = desk.steps(begun(*FOREVER))
    desk.once_running(one, lambda: desk.cluster.run("scancel", desk.slurm(one)))
    [(_, facts)] = list(desk.runner().run([one], nothing))
    assert (facts.exit_code, facts.ended) == (None, "exited")
    assert f"Slurm job {desk.slurm(one)}" in facts.scheduler


@real
def test_a_step_that_no_longer_matters_is_cancelled(desk: Desk) -> None:
    steps = desk.steps(begun("true"), begun(*FOREVER), begun("true"))
    ended = {}
    for one, facts in desk.runner(jobs=2).run(steps, lambda: {2, 3}):
        ended[one.step.number] = facts.ended
    assert ended == {1: "exited", 2: "interrupted", 3: "interrupted"}
    assert not desk.queue()
    assert not (steps[2].step.output / "began").exists()


@real
def test_an_interrupt_cancels_what_is_in_the_queue(desk: Desk) -> None:
    steps = desk.steps(begun(*FOREVER), begun(*FOREVER))
    with Interruptible():
        desk.once_running(steps[0], lambda: os.kill(os.getpid(), signal.SIGINT))
        with pytest.raises(Interrupted):
            list(desk.runner(jobs=2).run(steps, nothing))
    assert not desk.queue()


@real
def test_after_a_kill_a_job_is_found_again_and_another_bisect_cancels_it(desk: Desk) -> None:
    [one, other] = desk.steps(begun("sleep", "2"), begun(*FOREVER))
    for step in (one, other):
        desk.runner()._hand_over(step)  # what a Seatrial did that was then killed
    before = desk.slurm(one)
    [(_, facts)] = list(desk.runner().run([one], nothing))
    assert (facts.exit_code, desk.slurm(one)) == (0, before)
    assert cancel_slurm_jobs(desk.root, desk.told.append) == 1
    assert not desk.queue()
    assert cancel_slurm_jobs(desk.root, desk.told.append) == 0


@real
def test_a_partition_that_is_not_there_is_blocked_and_leaves_nothing(desk: Desk) -> None:
    steps = desk.steps(begun("true"))
    runner = SlurmRunner(plan_of("true"), Profile(partition="nowhere"), "main", desk.told.append)
    with pytest.raises(SlurmRefused, match="Invalid partition name"):
        list(runner.run(steps, nothing))
    assert not desk.queue()
