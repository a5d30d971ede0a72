"""What a cluster does to jobs: requeue, preemption, dead nodes, a dead controller, time limits, a full disk. Nothing is lost."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from seatrial.core.jobs import Component, Ending, Job, Profile
from tests.runtime.slurm.cluster import PrivateSlurm
from tests.runtime.slurm.conftest import bring_up
from tests.runtime.slurm.harness import client, processes_with, script, submit, until

pytestmark = pytest.mark.real

COUNTS = (
    "import os, pathlib, time\n"
    "path = pathlib.Path(os.environ['MARK'])\n"
    "path.open('a').write('x')\n"
    "time.sleep({second} if len(path.read_text()) > 1 else 600)\n"
)
"""A client that waits for ever the first time it runs, and ends the second time."""


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrivateSlurm]:
    """A cluster whose daemons may be killed."""
    cluster = bring_up(tmp_path_factory.mktemp("outages"))
    yield cluster
    cluster.down()


def second_time(mark: Path, seconds: int = 1) -> Component:
    """A client that ends only when it is run for the second time."""
    return client(*script(COUNTS.format(second=seconds)), environment={"MARK": str(mark)})


def test_a_requeued_job_starts_again_and_says_so(own: PrivateSlurm, tmp_path: Path) -> None:
    job = submit(own, Job(name="job", components=(second_time(tmp_path / "mark"),)), tmp_path)
    job.running()
    until(lambda: (tmp_path / "mark").exists() or None, "first run", 30)
    assert own.run("scontrol", "requeue", job.id).returncode == 0
    result = until(lambda: found if (found := job.dir.result(0)) and found.restart == 1 else None, f"second run: {job.log()}", 60)
    assert result.ending is Ending.DONE
    assert "restart 1" in job.log()
    assert not list(processes_with(str(tmp_path / "mark")))


def test_a_preempted_job_comes_back_and_is_done(own: PrivateSlurm, tmp_path: Path) -> None:
    whole = Profile(time="0:10:00", exclusive=True)
    low = submit(own, Job(name="low", components=(second_time(tmp_path / "mark"),)), tmp_path, whole, ("--partition=low", "--nodes=4"))
    until(lambda: (tmp_path / "mark").exists() or None, "first run", 30)
    high = submit(own, Job(name="high", components=(client("sleep", "1"),)), tmp_path, whole, ("--partition=high", "--nodes=4"))
    assert high.result().ending is Ending.DONE
    result = until(lambda: found if (found := low.dir.result(0)) and found.ending is Ending.DONE else None, f"second run: {low.log()}", 90)
    assert result.restart == 1


def test_a_node_that_dies_costs_time_and_nothing_else(own: PrivateSlurm, tmp_path: Path) -> None:
    job = submit(own, Job(name="job", components=(second_time(tmp_path / "mark"),)), tmp_path, options=("--nodelist=n4",))
    until(lambda: (tmp_path / "mark").exists() or None, "first run", 30)
    own.kill_node("n4")
    try:
        # It asked for n4: it waits for it, as a job that may run anywhere would not.
        until(lambda: job.state() == "PENDING" or None, f"requeue ({job.state()})", 90)
        assert job.dir.result(0) is None
    finally:
        own.start_node("n4")
    result = job.result(deadline_s=90)
    assert (result.ending, result.restart) == (Ending.DONE, 1)


def test_a_controller_that_was_killed_loses_nothing(own: PrivateSlurm, tmp_path: Path) -> None:
    service = Component(name="service", command=("sleep", "600"))
    job = submit(own, Job(name="job", components=(service, client("sleep", "10"))), tmp_path)
    job.running()
    time.sleep(7)  # what it was told less than some seconds ago the controller forgets: see the next test
    own.kill_controller()
    try:
        result = job.result(deadline_s=60)  # written while nobody answers
    finally:
        own.start_controller()
    assert result.ending is Ending.DONE
    assert job.ended(90) == "COMPLETED"


def test_near_the_time_limit_the_client_is_asked_to_stop_and_exit_0_is_no_success(own: PrivateSlurm, tmp_path: Path) -> None:
    obeys = "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); time.sleep(600)"
    ignores = "import signal, time; signal.signal(signal.SIGTERM, lambda *_: None); [time.sleep(1) for _ in range(600)]"
    jobs = [
        submit(own, Job(name=name, components=(client(*script(code)),), minutes=1, warn_s=45), tmp_path)
        for name, code in (("obeys", obeys), ("ignores", ignores))
    ]
    first, second = (job.result(deadline_s=150) for job in jobs)
    assert (first.ending, first.exit_code) == (Ending.TIME_LIMIT, 0)
    assert jobs[0].ended() == "FAILED"
    assert (second.ending, second.exit_code) == (Ending.TIME_LIMIT, None)
    assert jobs[1].ended() in ("TIMEOUT", "FAILED")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of one megabyte."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small disk needs root")
    place = tmp_path / "small"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "seatrial", str(place)], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


FILLS = (
    "import pathlib, sys, time\n"
    "while not pathlib.Path(sys.argv[1]).exists(): time.sleep(0.1)\n"
    "for _ in range(300): print('x' * 8192, flush=True)\n"
    "time.sleep(600)\n"
)
"""A service that fills the disk of its log once the client runs: before that, there is no room for the mark of the client's end."""
WAITS = 'touch "$0"; for _ in $(seq 200); do (($(df --output=avail "$1" | tail -n 1) < 16)) && exit "$2"; sleep 0.2; done; exit 99'
"""A client that ends when the disk is full, however long that takes on a busy machine."""


@pytest.mark.parametrize("code", [0, 3])
def test_a_full_disk_cannot_swallow_the_result(own: PrivateSlurm, small_disk: Path, tmp_path: Path, code: int) -> None:
    began = str(tmp_path / "began")
    filler = Component(name="filler", command=script(FILLS, began))
    waits = client("bash", "-c", WAITS, began, str(small_disk), str(code))
    job = submit(own, Job(name="job", components=(filler, waits)), small_disk)
    result = job.result(deadline_s=90)
    assert os.statvfs(small_disk).f_bavail < 4
    assert (result.ending, result.exit_code) == (Ending.CLIENT_FAILED if code else Ending.DONE, code)


def test_without_room_for_a_result_nothing_is_started(own: PrivateSlurm, small_disk: Path, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    hold = submit(own, Job(name="job", components=(client("touch", str(ran)),)), small_disk, options=("--hold",))
    with (small_disk / "ballast").open("wb") as ballast:
        try:
            ballast.write(b"\0" * (2 << 20))
            ballast.flush()
        except OSError:
            pass  # full, as intended
    own.run("scontrol", "release", hold.id)
    assert hold.ended() == "FAILED"
    assert hold.dir.result(0) is None
    assert not ran.exists()


def test_a_job_that_the_controller_forgot_has_its_result_all_the_same(own: PrivateSlurm, tmp_path: Path) -> None:
    # The last test of this cluster: its controller gives the forgotten id to the next job, which the node then refuses.
    mark = tmp_path / "mark"
    job = submit(own, Job(name="job", components=(client("sh", "-c", f"touch {mark}; sleep 3"),)), tmp_path)
    until(lambda: mark.exists() or None, lambda: f"start of the client: {job.log()}", 60)  # srun needs the controller until then
    own.kill_controller()
    try:
        # A controller kills what it does not know: -9, some 4 s after its own start (measured). So the job ends before that start.
        assert job.result().ending is Ending.DONE
        for saved in (own.root / "state").glob("job_state*"):  # it may have been saved while it waited, and is then not forgotten
            saved.unlink()
    finally:
        own.start_controller()
    assert job.state() == ""
    assert job.result().ending is Ending.DONE
