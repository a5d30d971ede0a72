"""Who ended, who failed, and who was only told to stop: what srun does not say, or says too late."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from seatrial.core.jobs import After, Component, Ending, Job, Profile, Ready, UnitState
from seatrial.runtime.jobdir import JobDir, job_dir
from seatrial.runtime.slurm import render
from seatrial.runtime.slurm_status import UnitFacts, judge_unit
from tests.runtime.slurm.cluster import PrivateSlurm
from tests.runtime.slurm.harness import Slurm, client, script, server, submit, until

pytestmark = pytest.mark.slow  # processes that are waited for; `make check` has two minutes

RANK_1_ENDS = "import os, sys, time\nif os.environ['SEATRIAL_RANK'] == '1':\n    time.sleep(1)\n    sys.exit({code})\n"
TERM_IS_FINE = (
    "import signal, sys, time\n"
    "def stop(*_):\n"
    "    print('told', flush=True)\n"
    "    time.sleep(1)\n"
    "    sys.exit(int(sys.argv[1]))\n"
    "signal.signal(signal.SIGTERM, stop)\n"
    "print('up', flush=True)\n"
    "while True: time.sleep(0.1)\n"
)
"""A client that stops in order, and says so by an exit code."""
SOON = TERM_IS_FINE.replace("time.sleep(1)", "time.sleep(0.3)")
"""The same without a cluster, whose second word may take a second to come."""
STEP_ONLY = "told to stop by a signal that this script did not get"


class Task:
    """One task of a client as a node runs it, without Slurm."""

    def __init__(self, place: Path, *command: str) -> None:
        self.dir: JobDir = job_dir(place, "job")
        self.dir.make()
        self.dir.endpoints(0).mkdir()
        self.dir.script.write_text(render(Job(name="job", components=(client(*command),)), Profile(), place, "x"), encoding="utf-8")
        self.log = place / "log"
        words = ["bash", str(self.dir.script), "component", "client", "0"]
        with self.log.open("wb") as log:
            environment = {**os.environ, "SEATRIAL_ATTEMPT": "7-0"}
            self.process = subprocess.Popen(words, stdout=log, stderr=log, env=environment, start_new_session=True)

    def up(self) -> None:
        until(lambda: "up" in self.log.read_text() or None, "start of the program", 60)

    def end(self) -> tuple[int, str]:
        """Its exit code, and what it wrote down."""
        code = self.process.wait(timeout=60)
        return code, (self.dir.endpoints(0) / "ended.7-0.client.0.0").read_text().strip()


@pytest.mark.parametrize("whole", [False, True], ids=["the task alone, by cgroups", "all its processes"])
def test_a_program_is_told_once_however_slurm_tells(tmp_path: Path, whole: bool) -> None:
    task = Task(tmp_path, *script(SOON, "5"))
    task.up()
    if whole:
        os.killpg(task.process.pid, signal.SIGTERM)
    else:
        task.process.terminate()
    assert task.end() == (5, "5 1")
    assert task.log.read_text().count("told") == 1


def test_the_warning_of_the_time_limit_reaches_the_program_as_term(tmp_path: Path) -> None:
    task = Task(tmp_path, *script(SOON, "5"))
    task.up()
    task.process.send_signal(signal.SIGUSR1)
    assert task.end() == (5, "5 0")


@pytest.mark.parametrize("words", [("true",), ("bash", "-c", "exit 137"), ("/no/such/program",)])
def test_a_task_leaves_its_exact_code(tmp_path: Path, words: tuple[str, ...]) -> None:
    code = {"true": 0, "bash": 137}.get(words[0], 127)
    assert Task(tmp_path, *words).end() == (code, f"{code} 0")


def judged(job: Job, result: Path) -> UnitState:
    folder = JobDir(result)
    return judge_unit(UnitFacts(job.name, 0, result=folder.result(0)), 0.0).state


@pytest.mark.real
@pytest.mark.parametrize(("code", "sibling"), [(0, "time.sleep(60)"), (9, "import signal; signal.signal(15, 1); time.sleep(60)")])
def test_a_task_of_a_service_that_ends_fails_the_job(cluster: Slurm, tmp_path: Path, code: int, sibling: str) -> None:
    # srun would wait for the sibling: for ever after a 0, and until it is killed after a failure.
    service = Component(name="service", command=script(RANK_1_ENDS.format(code=code) + sibling), tasks=2)
    job = submit(cluster, Job(name="job", components=(service, client("sleep", "4"))), tmp_path)
    result = job.result()
    assert (result.ending, result.component, result.exit_code) == (Ending.SERVICE_ENDED, "service.0", code)


@pytest.mark.real
def test_a_service_that_leaves_a_process_behind_has_ended_all_the_same(cluster: Slurm, tmp_path: Path) -> None:
    leaves = "import os, subprocess, time; subprocess.Popen(['sleep', '20'], start_new_session=True); time.sleep(1); os._exit(9)"
    service = Component(name="service", command=script(leaves))
    job = submit(cluster, Job(name="job", components=(service, client("sleep", "4"))), tmp_path)
    assert (job.result().ending, job.result().exit_code) == (Ending.SERVICE_ENDED, 9)


@pytest.mark.real
def test_a_client_that_fails_because_its_server_died_is_not_to_blame(cluster: Slurm, tmp_path: Path) -> None:
    dies = "import os, signal, sys, time\nsignal.signal(15, 1)\ntime.sleep(60 if os.environ['SEATRIAL_RANK'] == '0' else 1)\nsys.exit(3)"
    service = Component(name="service", command=script(dies), tasks=2)
    job = submit(cluster, Job(name="job", components=(service, client("bash", "-c", "sleep 3; exit 1"))), tmp_path)
    assert (job.result().ending, job.result().component) == (Ending.SERVICE_ENDED, "service.0")


@pytest.mark.real
def test_a_client_that_was_told_to_stop_is_never_done(cluster: Slurm, tmp_path: Path) -> None:
    job = submit(cluster, Job(name="job", components=(client(*script(TERM_IS_FINE, "0")),)), tmp_path)
    until(lambda: "up" in job.log("client") or None, "start of the client", 30)
    cluster.run("scancel", "--signal=TERM", job.id)  # the steps only, not the script
    assert (job.result().ending, job.result().exit_code, job.result().message) == (Ending.STOPPED, 0, STEP_ONLY)
    assert job.ended() == "FAILED"


@pytest.mark.real
def test_preempted_with_a_grace_time_comes_back(cluster: PrivateSlurm, tmp_path: Path) -> None:
    program = TERM_IS_FINE.replace("print('up'", "sys.exit(0) if __import__('os').environ.get('SLURM_RESTART_COUNT') else print('up'")
    here = Profile(time="0:10:00", exclusive=True, sbatch=("--nodelist=n1",))
    cluster.run("scontrol", "update", "PartitionName=low", "GraceTime=8")
    try:
        low = submit(cluster, Job(name="low", components=(client(*script(program, "0")),)), tmp_path, here, ("--partition=low",))
        until(lambda: "up" in low.log("client") or None, "start of the client", 30)
        high = submit(cluster, Job(name="high", components=(client("true"),)), tmp_path, here, ("--partition=high",))
        assert low.result().ending is Ending.STOPPED
        assert high.result().ending is Ending.DONE
        until(lambda: low.dir.result(0) if low.dir.result(0) and low.result().restart else None, f"second run: {low.log()}", 60)
        assert (low.result().ending, low.result().restart) == (Ending.DONE, 1)
    finally:
        cluster.run("scontrol", "update", "PartitionName=low", "GraceTime=0")


@pytest.mark.real
def test_a_client_that_could_not_be_run_is_not_to_blame(cluster: Slurm, tmp_path: Path) -> None:
    profile = Profile(time="0:10:00", srun=("--no-such-option",))
    job = submit(cluster, Job(name="job", components=(client("true"),)), tmp_path, profile)
    assert (job.result().ending, job.result().exit_code) == (Ending.CLIENT_FAILED, None)
    assert "srun exited with" in job.result().message
    assert judged(job.job, job.dir.path) is UnitState.BLOCKED


@pytest.mark.real
def test_a_result_that_contradicts_itself_is_no_input_and_no_end(cluster: Slurm, tmp_path: Path) -> None:
    fails_once = client("bash", "-c", 'test "$SEATRIAL_INDEX" = 0 || test -e again', workdir=str(tmp_path))
    array = Job(name="array", components=(fails_once,), array=2)
    submit(cluster, array, tmp_path).ended()
    results = tmp_path / "array" / "results"
    merge = Job(name="merge", components=(client("true"),), after=(After(job="array"),), settle_s=0)
    for text in ((results / "0.json").read_text(), (results / "0.json").read_text().replace('"index": 0', '"index": 1')[:90]):
        (results / "1.json").write_text(text)
        shutil.rmtree(tmp_path / "merge", ignore_errors=True)
        job = submit(cluster, merge, tmp_path, units={"array": 2})
        assert (job.result().ending, job.result().message) == (Ending.INPUTS_MISSING, "not done: 1")
    (tmp_path / "again").touch()
    again = submit(cluster, array, tmp_path, options=("--array=1",))
    again.ended()
    assert (again.result(1).ending, again.result(1).index) == (Ending.DONE, 1)


@pytest.mark.real
def test_an_older_attempt_does_not_replace_a_result_that_says_done(cluster: Slurm, tmp_path: Path) -> None:
    program = 'if test "$SLURM_JOB_ID" = "$(cat first)"; then sleep 6; exit 1; fi'
    job = Job(name="job", components=(client("bash", "-c", program, workdir=str(tmp_path)),))
    first = submit(cluster, job, tmp_path)
    (tmp_path / "first").write_text(first.id)
    first.running()
    second = submit(cluster, job, tmp_path)
    assert second.ended() == "COMPLETED"
    assert first.ended() == "COMPLETED"
    assert (first.result().ending, first.result().slurm) == (Ending.DONE, second.id)


@pytest.mark.real
@pytest.mark.parametrize("name", ["run#1", "it's", "ü b", "a&b;c", "x{job}y"])
def test_a_directory_may_be_called_anything(cluster: Slurm, tmp_path: Path, name: str) -> None:
    job = submit(cluster, Job(name="job", components=(client("true"),)), tmp_path / name)
    assert job.result().ending is Ending.DONE
    log = tmp_path / name / "job/logs/slurm.log"  # the result is on disk before the last line of the log
    until(lambda: "the client exited with 0" in log.read_text() or None, log.read_text, 60)


@pytest.mark.real
@pytest.mark.parametrize("options", ["errexit", "noglob", "nounset", "noclobber", "posix"])
def test_shell_options_of_the_caller_change_nothing(cluster: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: str) -> None:
    (tmp_path / "profile").write_text("echo hello\n")
    monkeypatch.setenv("BASH_ENV", str(tmp_path / "profile"))
    monkeypatch.setenv("SHELLOPTS", f"braceexpand:hashall:interactive-comments:{options}")
    done = submit(cluster, Job(name="one", components=(server(), client("true"))), tmp_path)
    ends = Component(name="service", command=script(RANK_1_ENDS.format(code=0) + "time.sleep(60)"), tasks=2)
    failed = submit(cluster, Job(name="two", components=(ends, client("sleep", "4"))), tmp_path)
    assert done.result().ending is Ending.DONE, done.log()
    assert (failed.result().ending, failed.result().exit_code) == (Ending.SERVICE_ENDED, 0)


@pytest.mark.real
def test_a_task_that_ends_while_its_copy_is_awaited_is_noticed(cluster: Slurm, tmp_path: Path) -> None:
    stays = "import signal; signal.signal(15, 1); time.sleep(60)"
    deaf = Component(
        name="server", command=script(RANK_1_ENDS.format(code=4) + stays), tasks=2, port=True, ready=Ready(path="/", deadline_s=60)
    )
    job = submit(cluster, Job(name="job", components=(deaf, client("true"))), tmp_path)
    result = job.result()
    assert (result.ending, result.exit_code) == (Ending.SERVICE_ENDED, 4)
    assert result.ended - result.started <= 5
