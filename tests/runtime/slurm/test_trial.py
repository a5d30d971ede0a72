"""Real trials of the default loop as jobs of a real Slurm: to a verdict, through everything that cuts them short."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from seatrial.core.files import read_text
from seatrial.core.jobs import Ending
from seatrial.core.verdict import Boundary, ExitCode, Verdict
from seatrial.runtime.jobdir import JobDir, job_dir
from tests.real.drive import SEATRIAL, Ran, call, environ, processes_of, says, wait_for
from tests.runtime.slurm.cluster import PrivateSlurm
from tests.runtime.slurm.conftest import MakeCluster

pytestmark = pytest.mark.real

TOML = """
[slurm.test]
time = "0:10:00"
cpus = 2
gpus = 1
[slurm.short]
time = "0:01:00"
cpus = 2
[slurm.bad]
partition = "nowhere"
"""
STEPS = 40
"""Enough that what happens at the second step comes long before the last."""
LOG = "levels/0-smoke/run.log"


@dataclass(frozen=True, slots=True)
class Desk:
    """Where somebody sits who has access to the cluster."""

    where: Path
    cluster: PrivateSlurm

    @property
    def run(self) -> Path:
        return self.where / "run"

    def job(self, number: int = 1) -> JobDir:
        return job_dir(self.run / "jobs" / str(number), "trial")

    def slurm_id(self, number: int = 1) -> str:
        sent = self.job(number).submission()
        assert sent is not None
        assert sent.slurm is not None
        return sent.slurm

    def call(self, *words: str | Path) -> Ran:
        done = call(self.where, *words)
        return Ran(done.returncode, done.stdout, self.run)

    def submit(self, *words: str, profile: str = "test") -> Ran:
        return self.call("run", "trl", "--level", "0", "--out", self.run, "--on", f"slurm:{profile}", *words)

    def submit_long(self, profile: str = "test", steps: int = STEPS) -> None:
        """Submitted, and in the middle of its level."""
        done = self.submit("--detach", "--", "--max_steps", str(steps), profile=profile)
        assert done.code == 0, done.output
        wait_for("the second step", lambda: says(self.run / LOG, f"seatrial: step 2 of {steps}"), 240)

    def attach(self) -> subprocess.Popen[str]:
        words = [str(SEATRIAL), "attach", str(self.run)]
        return subprocess.Popen(words, cwd=self.where, env=environ(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def attached(self, process: subprocess.Popen[str], seconds: float = 300) -> Ran:
        output, _ = process.communicate(timeout=seconds)
        return Ran(process.returncode, output, self.run)


def sit_down(where: Path, cluster: PrivateSlurm, monkeypatch: pytest.MonkeyPatch) -> Desk:
    """From here on this process uses that cluster."""
    for key, value in cluster.env.items():
        monkeypatch.setenv(key, value)
    (where / "seatrial.toml").write_text(TOML)
    return Desk(where, cluster)


@pytest.fixture
def desk(tmp_path: Path, cluster: PrivateSlurm, monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    yield sit_down(tmp_path, cluster, monkeypatch)
    for file in tmp_path.glob("run/jobs/*/trial/submission.json"):
        sent = JobDir(file.parent).submission()
        if sent is not None and sent.slurm:
            cluster.run("scancel", sent.slurm)


def test_a_trial_runs_to_pass(desk: Desk) -> None:
    done = desk.submit()
    assert done.code == ExitCode.PASS, done.output
    assert (done.trial.status, done.trial.verdict) == ("done", Verdict.PASS)
    for text in ("submitted with the profile test", "running on n", "Pass level 0", "ended: done", "Result: Pass - "):
        assert text in done.output
    result = desk.job().result(0)
    assert result is not None
    assert (result.ending, result.exit_code) == (Ending.DONE, 0)
    script = desk.job().script.read_text()
    assert "--gres=gpu:1" in script
    assert f"{sys.executable} \\\n" in script
    again = desk.call("attach", desk.run)
    assert (again.code, "Result: Pass - " in again.output) == (ExitCode.PASS, True), "at any later time"


def test_a_requeued_trial_goes_on(desk: Desk) -> None:
    desk.submit_long()
    process = desk.attach()
    assert desk.cluster.run("scontrol", "requeue", desk.slurm_id()).returncode == 0
    done = desk.attached(process)
    assert done.code == ExitCode.PASS, done.output
    assert "requeued" in done.output
    assert done.level(0).steps_reached == STEPS
    assert says(done.place(0) / "attempts/1/run.log", "seatrial: step 2 of"), "the attempt that was cut is kept beside"
    result = desk.job().result(0)
    assert result is not None
    assert result.restart == 1


def test_a_cancelled_trial_is_blocked_and_can_be_resumed(desk: Desk) -> None:
    desk.submit_long()
    refused = desk.call("resume", desk.run)
    assert (refused.code, f"Slurm job {desk.slurm_id()} of this trial is running" in refused.output) == (ExitCode.USAGE, True)
    assert desk.cluster.run("scancel", desk.slurm_id()).returncode == 0
    done = desk.attached(desk.attach())
    assert done.code == ExitCode.BLOCKED, done.output
    level = done.level(0)
    assert (level.verdict, level.boundary) == (Verdict.BLOCKED, Boundary.CLUSTER)
    assert f"Slurm job {desk.slurm_id()}: CANCELLED" in level.reason
    assert done.trial.status == "running"
    assert read_text(desk.run / "summary.md").startswith("Result: Blocked - ")
    wait_for("nothing of it runs", lambda: not processes_of(desk.run), 20)
    again = desk.call("resume", desk.run, "--on", "slurm:test")
    assert (again.code, again.trial.verdict) == (ExitCode.PASS, Verdict.PASS), again.output
    assert desk.slurm_id(2) != desk.slurm_id(1)
    assert says(again.place(0) / "attempts/1/run.log", "seatrial: step 2 of")


def test_the_time_limit_blocks_and_costs_nothing(desk: Desk) -> None:
    desk.submit_long("short", steps=5000)
    done = desk.attached(desk.attach(), 180)
    assert done.code == ExitCode.BLOCKED, done.output
    result = desk.job().result(0)
    assert result is not None
    assert (result.ending, result.exit_code) == (Ending.TIME_LIMIT, ExitCode.INTERRUPTED)
    assert done.level(0).boundary is Boundary.CLUSTER
    assert "the time limit was near" in done.level(0).reason
    assert done.trial.status == "running"


def test_a_trial_that_failed_in_a_container_is_a_fail(desk: Desk) -> None:
    done = desk.submit("--fault", "nan-weight", "--set", "slurm.test.image=registry/loop")
    assert (done.code, done.trial.status, done.trial.verdict) == (ExitCode.FAIL, "done", Verdict.FAIL), done.output
    result = desk.job().result(0)
    assert result is not None
    assert (result.ending, result.exit_code) == (Ending.CLIENT_FAILED, ExitCode.FAIL)
    script = desk.job().script.read_text()
    assert "--container-image=registry/loop" in script
    assert f"{desk.run}:{desk.run}" in script


def test_a_dead_controller_is_waited_for_and_not_needed_for_the_verdict(
    tmp_path: Path, make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = make_cluster(nodes=1)
    desk = sit_down(tmp_path, cluster, monkeypatch)
    desk.submit_long()
    process = desk.attach()
    assert process.stdout is not None
    while "running on n1" not in (line := process.stdout.readline()):
        assert line, "the end of its output"
    cluster.kill_controller()
    refused = desk.call("resume", desk.run)
    assert (refused.code, "is not known" in refused.output) == (ExitCode.BLOCKED, True), refused.output
    done = desk.attached(process)
    assert done.code == ExitCode.PASS, done.output
    assert "Slurm does not answer" in done.output


def test_a_profile_that_slurm_refuses_is_said(desk: Desk) -> None:
    tried = desk.submit("--dry-run", profile="bad")
    assert (tried.code, "nvalid partition" in tried.output) == (ExitCode.BLOCKED, True), tried.output
    assert not desk.run.exists()
    done = desk.submit(profile="bad")
    assert (done.code, "nvalid partition" in done.output) == (ExitCode.BLOCKED, True), done.output
    assert f"seatrial resume {desk.run} --on slurm:bad" in done.output
    assert done.trial.status == "planned"
    mended = desk.call("resume", desk.run, "--on", "slurm:bad", "--set", "slurm.bad.partition=main")
    assert mended.code == ExitCode.PASS, mended.output
