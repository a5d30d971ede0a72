"""One unit on this machine: every way it may end, what is on disk then, and that nothing is left running."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from seatrial.core import files
from seatrial.core.errors import BlockedError, UserError
from seatrial.core.jobs import Batch, Component, Ending, Job, Ready, Result
from seatrial.core.verdict import Boundary
from seatrial.runtime import process
from seatrial.runtime.interrupt import Interrupted, Interruptible
from seatrial.runtime.jobdir import job_dir
from seatrial.runtime.local_jobs import Copy, run_batch
from seatrial.runtime.process_tree import PidFile
from tests.runtime.children import DAEMON, ended, gone, send, wait_for, wait_until
from tests.runtime.small_jobs import (
    ALMOST_A_MINUTE,
    FETCH,
    Clock,
    client,
    left_behind,
    log,
    patient_clock,
    python,
    run_jobs,
    run_one,
    server,
    shell,
)

pytestmark = pytest.mark.slow


def test_done_with_the_result_on_disk_before_services_are_ended(tmp_path: Path) -> None:
    said: list[str] = []
    fetch = python("client", FETCH, "{urls:server}", role="client")
    result = run_one(tmp_path, server(replicas=2), fetch, said=said)
    assert (result.ending, result.component, result.exit_code, result.slurm, result.restart) == (Ending.DONE, "client.0", 0, "local", 0)
    assert result.node == socket.gethostname()
    assert 0 <= time.time() - result.ended < 600
    assert result.started <= result.ended
    assert log(tmp_path, "client.0") == ["0 1"]
    for copy in (0, 1):
        assert Result.model_validate_json((tmp_path / f"job/seen-0-{copy}").read_text()) == result
        assert "[seatrial] the unit ended (done): ending the run" in log(tmp_path, f"server.{copy}")
    assert any("server.1 started; its log: " in line for line in said)
    assert said[-1].startswith("job: done: ")


@pytest.mark.parametrize(("program", "code"), [("exit 1", 1), ("exit 255", 255), ("kill -KILL $$", 137), ("kill -TERM $$", 143)])
def test_the_exact_code_of_the_client(tmp_path: Path, program: str, code: int) -> None:
    result = run_one(tmp_path, server(), client(program))
    assert (result.ending, result.component, result.exit_code) == (Ending.CLIENT_FAILED, "client.0", code)
    assert "client-failed" in (tmp_path / "job/seen-0-0").read_text()


@pytest.mark.parametrize(("program", "code"), [("exit 0", 0), ("exit 9", 9), ("kill -SEGV $$", 139)])
def test_a_service_that_ends_first_fails_the_unit(tmp_path: Path, program: str, code: int) -> None:
    with Clock() as clock:
        short = shell("short", f'until [ -e "$SEATRIAL_JOB/up" ]; do sleep 0.02; done; {program}')
        result = run_one(tmp_path, server(), short, client('touch "$SEATRIAL_JOB/up"; exec sleep 60'))
    assert (result.ending, result.component, result.exit_code) == (Ending.SERVICE_ENDED, "short.0", code)
    assert clock.seconds < ALMOST_A_MINUTE
    assert str(job_dir(tmp_path, "job").log("short", 0, None)) in result.message
    assert "service-ended" in (tmp_path / "job/seen-0-0").read_text()


def test_a_client_that_ends_with_its_service_is_no_success(tmp_path: Path) -> None:
    """The service is dead, though a grandchild that holds its output hides that from a reader, when the client exits with 0."""
    hidden = shell("short", 'sleep 60 & echo $$ > "$SEATRIAL_JOB/pid"; until [ -e "$SEATRIAL_JOB/go" ]; do sleep 0.01; done')
    wins = client(
        'until [ -s "$SEATRIAL_JOB/pid" ]; do sleep 0.01; done; pid=$(cat "$SEATRIAL_JOB/pid"); touch "$SEATRIAL_JOB/go";'
        ' until grep -q "^State:.Z" /proc/$pid/status 2>/dev/null || [ ! -e /proc/$pid ]; do :; done; exit 0'
    )
    result = run_one(tmp_path, hidden, wins)
    assert (result.ending, result.component, result.exit_code) == (Ending.SERVICE_ENDED, "short.0", 0)


def test_a_service_that_dies_while_the_client_is_looked_at_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The service dies after every earlier look at it, and before the look that sees the client's 0."""
    peek = Copy.peek

    def kill_first(copy: Copy) -> int | None:
        code = peek(copy)
        if copy.step.name == "client.0" and code == 0:
            service = int(wait_for(tmp_path / "job/pid"))
            os.kill(service, signal.SIGKILL)
            wait_until(lambda: ended(service), "the service is dead")
        return code

    monkeypatch.setattr(Copy, "peek", kill_first)
    result = run_one(tmp_path, shell("short", 'echo $$ > "$SEATRIAL_JOB/pid"; exec sleep 60'), client("exit 0"))
    assert (result.ending, result.component, result.exit_code) == (Ending.SERVICE_ENDED, "short.0", 137)


def test_a_service_whose_children_live_on_is_noticed_at_once(tmp_path: Path) -> None:
    """The result is there while a child that ignores SIGTERM still lives, which then ends by itself."""
    stubborn = "trap '' TERM; until [ -e \"$SEATRIAL_JOB/noticed\" ]; do sleep 0.02; done"
    service = shell("short", f'({stubborn}) & echo $! > "$SEATRIAL_JOB/pid"; exit 4')
    lived: list[bool] = []

    def look() -> None:
        wait_for(job_dir(tmp_path, "job").result_file(0))
        lived.append(not ended(int(wait_for(tmp_path / "job/pid"))))
        (tmp_path / "job/noticed").touch()

    watcher = threading.Thread(target=look, daemon=True)
    watcher.start()
    result = run_one(tmp_path, service, client("sleep 60"))
    watcher.join()
    assert (result.ending, result.exit_code) == (Ending.SERVICE_ENDED, 4)
    assert lived == [True]


def test_a_dead_server_is_noticed_while_others_wait_for_it(tmp_path: Path) -> None:
    with Clock() as clock:
        result = run_one(tmp_path, shell("server", "sleep 0.3; exit 3", port=True, ready=Ready(deadline_s=60)), client("exit 0"))
    assert (result.ending, result.component, result.exit_code) == (Ending.SERVICE_ENDED, "server.0", 3)
    assert clock.seconds < ALMOST_A_MINUTE
    assert not (tmp_path / "job/logs/client.0.log").exists()


def test_a_server_that_hangs_does_not_hide_another_that_dies(tmp_path: Path) -> None:
    hang = python(
        "hang", "import os, socket, time; s = socket.create_server(('127.0.0.1', int(os.environ['SEATRIAL_PORT']))); time.sleep(60)"
    )
    hang = hang.model_copy(update={"port": True, "ready": Ready(deadline_s=60)})
    with Clock() as clock:
        result = run_one(tmp_path, hang, shell("short", "sleep 0.5"), client("exit 0"))
    assert (result.ending, result.component) == (Ending.SERVICE_ENDED, "short.0")
    assert clock.seconds < ALMOST_A_MINUTE


def test_not_ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    patient_clock(monkeypatch, "answered 503", step=20)
    result = run_one(tmp_path, server("server", "503", deadline_s=30), client("exit 0"))
    assert (result.ending, result.component, result.exit_code) == (Ending.NOT_READY, "server.0", None)
    assert "not ready within 30 s: server.0: http://127.0.0.1:" in result.message
    assert result.message.endswith("/health answered 503")
    assert "not-ready" in (tmp_path / "job/seen-0-0").read_text()


def test_a_port_that_was_lost_fails_the_unit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setattr("seatrial.runtime.local_jobs.free_port", lambda: taken.getsockname()[1])
        result = run_one(tmp_path, server(), client("exit 0"))
    assert (result.ending, result.component, result.exit_code) == (Ending.SERVICE_ENDED, "server.0", 1)


@pytest.fixture
def near(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time limit is near as soon as the client has written `up`."""
    monkeypatch.setattr(Job, "warning_s", lambda *_: 60 if (tmp_path / "job/up").exists() else 0)


@pytest.mark.usefixtures("near")
def test_the_time_limit_asks_the_client_first(tmp_path: Path) -> None:
    saves = 'trap \'sleep 0.3; touch "$SEATRIAL_JOB/saved"; exit 0\' TERM; touch "$SEATRIAL_JOB/up"; while :; do sleep 0.05; done'
    with Clock() as clock:
        result = run_one(tmp_path, server(), client(saves), minutes=1)
    assert (result.ending, result.component, result.exit_code) == (Ending.TIME_LIMIT, "client.0", 0)
    assert clock.seconds < ALMOST_A_MINUTE
    assert (tmp_path / "job/saved").exists()
    assert (tmp_path / "job/seen-0-0").stat().st_mtime >= (tmp_path / "job/saved").stat().st_mtime
    assert "time-limit" in (tmp_path / "job/seen-0-0").read_text()
    assert "[seatrial] the time limit is near: ending the run" in log(tmp_path, "client.0")


@pytest.mark.usefixtures("near")
def test_a_client_that_ignores_the_warning_is_killed_at_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("seatrial.runtime.local_jobs._MINUTE_S", 1.0)
    monkeypatch.setattr("seatrial.runtime.local_jobs._GRACE_S", 60.0)
    with Clock() as clock:
        result = run_one(tmp_path, client("trap '' TERM; touch \"$SEATRIAL_JOB/up\"; while :; do sleep 0.05; done"), minutes=1)
    assert (result.ending, result.exit_code) == (Ending.TIME_LIMIT, 137)
    assert 1 <= clock.seconds < ALMOST_A_MINUTE, "not before the limit, and with no grace after it"


def test_the_time_limit_counts_while_services_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("seatrial.runtime.local_jobs._MINUTE_S", 59.3)
    result = run_one(tmp_path, server("server", "503"), client("exit 0"), minutes=1, warn_s=59)
    assert (result.ending, result.component, result.exit_code) == (Ending.TIME_LIMIT, "", None)


def test_interrupted(tmp_path: Path) -> None:
    work = Job(name="job", components=(server(), client('echo $$ > "$SEATRIAL_JOB/pid-$SEATRIAL_INDEX"; exec sleep 60')), array=3)
    later = Job(name="later", components=(client("exit 0"),))
    with Interruptible() as stop:
        send(tmp_path / "job/pid-0", signal.SIGTERM)
        results = run_jobs(tmp_path, work, later)
        assert stop.signal == signal.SIGTERM
    assert [(result.ending, result.exit_code) for result in results] == [(Ending.STOPPED, None)] * 4
    assert "stopped" in (tmp_path / "job/seen-0-0").read_text()
    assert gone(int((tmp_path / "job/pid-0").read_text()))
    assert sorted(path.name for path in (tmp_path / "job/results").iterdir()) == ["0.json"]


def test_a_second_signal_kills_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("seatrial.runtime.local_jobs._GRACE_S", 60.0)
    stubborn = "trap '' TERM; while :; do sleep 0.1; done"
    work = Job(
        name="job", components=(shell("service", stubborn), client(f'echo $$ > "$SEATRIAL_JOB/pid"; {stubborn}')), array=2, parallel=2
    )
    send(tmp_path / "job/pid", signal.SIGINT, signal.SIGINT)
    with Clock() as clock, pytest.raises(Interrupted), Interruptible():
        run_batch(Batch(jobs=(work,)), tmp_path, lambda _: None)
    assert clock.seconds < ALMOST_A_MINUTE
    assert left_behind(tmp_path) == []
    stored = job_dir(tmp_path, "job").result(0)
    assert stored is not None
    assert stored.ending is Ending.STOPPED


@pytest.mark.parametrize(
    "hides", ["pass", "os.environ.clear()", "os.execve('/bin/sh', ['sh', '-c', 'echo $$ > daemon; exec sleep 60'], {})"]
)
def test_daemons_of_client_and_services_are_ended(tmp_path: Path, hides: str) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    service = python("service", DAEMON.format(before=hides, after="time.sleep(60)"), workdir=str(tmp_path / "a"))
    program = DAEMON.format(before=hides, after="while not os.path.exists('../a/daemon'): time.sleep(0.01)")
    result = run_one(tmp_path, service, python("client", program, role="client", workdir=str(tmp_path / "b")))
    assert result.ending is Ending.DONE
    assert gone(int(wait_for(tmp_path / "a/daemon")))
    assert gone(int(wait_for(tmp_path / "b/daemon")))


def test_several_tasks(tmp_path: Path) -> None:
    result = run_one(tmp_path, client('echo "rank $SEATRIAL_RANK"; exit 0', tasks=3))
    assert result.ending is Ending.DONE
    assert sorted(log(tmp_path, "client.0")) == ["0: rank 0", "1: rank 1", "2: rank 2"]


def test_a_task_that_fails_fails_the_copy(tmp_path: Path) -> None:
    with Clock() as clock:
        result = run_one(tmp_path, client('[ "$SEATRIAL_RANK" = 1 ] && exit 6; sleep 60', tasks=3))
    assert (result.ending, result.exit_code) == (Ending.CLIENT_FAILED, 6)
    assert clock.seconds < ALMOST_A_MINUTE


def test_a_task_of_a_service_that_ends_with_0_ends_the_service(tmp_path: Path) -> None:
    service = shell("service", '[ "$SEATRIAL_RANK" = 1 ] || sleep 60', tasks=2)
    result = run_one(tmp_path, service, client("sleep 60"))
    assert (result.ending, result.component, result.exit_code) == (Ending.SERVICE_ENDED, "service.0", 0)


def test_a_client_with_several_tasks_is_done_when_all_are(tmp_path: Path) -> None:
    with Clock() as clock:
        assert run_one(tmp_path, client('[ "$SEATRIAL_RANK" = 1 ] || sleep 0.5', tasks=2)).ending is Ending.DONE
    assert clock.seconds >= 0.5


@pytest.mark.parametrize("name", ["service", "client"])
def test_a_program_that_is_not_there_ends_as_a_shell_would_say(tmp_path: Path, name: str) -> None:
    missing = Component(name=name, command=("/no/such/program",), role="client" if name == "client" else "service")
    others = (client("sleep 60"),) if name == "service" else (server(),)
    result = run_one(tmp_path, *others, missing)
    ending = Ending.CLIENT_FAILED if name == "client" else Ending.SERVICE_ENDED
    assert (result.ending, result.component, result.exit_code) == (ending, f"{name}.0", 127)
    assert "cannot start /no/such/program" in job_dir(tmp_path, "job").log(name, 0, None).read_text()
    assert left_behind(tmp_path) == []


def test_a_client_cannot_win_against_a_service_that_was_never_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = process._start

    def slow_start(spec: process.ProcessSpec) -> subprocess.Popen[bytes]:
        if spec.argv[0] == "/no/such/program":
            time.sleep(0.5)
        return start(spec)

    monkeypatch.setattr(process, "_start", slow_start)
    result = run_one(tmp_path, Component(name="service", command=("/no/such/program",)), client("exit 0"))
    assert (result.ending, result.exit_code) == (Ending.SERVICE_ENDED, 127)


def test_a_result_that_cannot_be_written_is_no_success(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, value: object) -> None:
        raise BlockedError(boundary=Boundary.ENVIRONMENT, message=f"{path}: cannot write: No space left on device")

    monkeypatch.setattr("seatrial.runtime.local_jobs.write_json", full)
    with pytest.raises(BlockedError, match="No space left"):
        run_one(tmp_path, server(), client("exit 0"))
    assert left_behind(tmp_path) == []


def test_a_unit_that_another_seatrial_runs_is_refused(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "60"]) as other:
        record = PidFile(run_id="x", pid=1, started=0, owner=other.pid, owner_started=psutil.Process(other.pid).create_time())
        pids = tmp_path / "job/logs/client.0.log.pids"
        files.write_json(pids, record)
        with pytest.raises(UserError, match=f"process {other.pid} is still running this"):
            run_batch(Batch(jobs=(Job(name="job", components=(client("exit 0"),)),)), tmp_path, lambda _: None)
        other.kill()
    assert run_one(tmp_path, client("exit 0")).ending is Ending.DONE


def test_a_killed_seatrial_takes_its_components_along_and_the_next_one_ends_what_is_left(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    batch = tmp_path / "batch"
    service = python("service", DAEMON.format(before="pass", after="time.sleep(60)"), workdir=str(tmp_path / "a"))
    waits = client(
        f'[ -e {tmp_path}/again ] && exit 0; until [ -s {tmp_path}/a/daemon ]; do sleep 0.05; done; echo $$ > "$SEATRIAL_JOB/pid"; sleep 60'
    )
    job = Job(name="job", components=(service, waits))
    (tmp_path / "job.json").write_text(Batch(jobs=(job,)).model_dump_json())
    program = (
        "import sys\nfrom pathlib import Path\nfrom seatrial.runtime.local_jobs import run_batch\nfrom seatrial.core.jobs import Batch\n"
        "run_batch(Batch.model_validate_json(Path(sys.argv[1]).read_text()), Path(sys.argv[2]), print)"
    )
    with subprocess.Popen([sys.executable, "-c", program, str(tmp_path / "job.json"), str(batch)]) as seatrial:
        own = int(wait_for(batch / "job/pid"))
        seatrial.kill()
    wait_until(lambda: ended(own), "the client ended with its Seatrial")
    daemon = psutil.Process(int((tmp_path / "a/daemon").read_text()))
    assert daemon.is_running()
    assert job_dir(batch, "job").result(0) is None
    (tmp_path / "again").touch()
    (tmp_path / "a/daemon").unlink()
    results = run_batch(Batch(jobs=(job,)), batch, lambda _: None)
    assert [result.ending for result in results] == [Ending.DONE]
    assert not daemon.is_running() or daemon.status() == psutil.STATUS_ZOMBIE
    assert left_behind(tmp_path) == []
