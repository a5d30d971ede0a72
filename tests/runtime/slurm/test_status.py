"""Following jobs: what one poll asks, and what becomes of units when Slurm forgets, dies, lies or reuses ids."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from seatrial.core.errors import UserError
from seatrial.core.files import write_json
from seatrial.core.jobs import After, Batch, Ending, UnitState
from seatrial.evidence.redact import Redactor
from seatrial.runtime import jobdir, slurm_status, slurm_submit
from seatrial.runtime.jobdir import job_dir
from seatrial.runtime.slurm import comment
from seatrial.runtime.slurm_status import Poller, Snapshot
from tests.runtime.slurm.cluster import PrivateSlurm
from tests.runtime.slurm.conftest import MakeCluster
from tests.runtime.slurm.harness import until
from tests.runtime.slurm.stand_ins import StandIns, stand_ins
from tests.runtime.slurm.test_submit import PROFILE, job, leave

DISABLED = "Slurm accounting storage is disabled\n"
DOWN = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)\n"


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIns:
    found = stand_ins(tmp_path, monkeypatch)
    found.answer("sbatch", "12\n")
    found.answer("sacct", "", DISABLED, 1)
    return found


@pytest.fixture
def batch(fake: StandIns, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An array of 6 units, submitted as 12, long ago."""
    slurm_submit.submit(Batch(jobs=(job("collect", array=6),)), PROFILE, "main", tmp_path / "b")
    monkeypatch.setattr(slurm_status, "SUBMITTED_GRACE_S", -1)
    return tmp_path / "b"


def queue(directory: Path, states: dict[int, str], slurm: str = "12", name: str | None = None, mark: str = "(null)") -> str:
    """What squeue says of the units of `collect`."""
    submission = job_dir(directory, "collect").submission()
    assert submission is not None
    return "".join(f"{slurm}_{index}|{state}|NONE|None|{mark}|{name or submission.name}\n" for index, state in states.items())


def states(snapshot: Snapshot) -> list[str]:
    return [item.state.value for item in snapshot.units]


def test_one_call_when_slurm_knows_everything(fake: StandIns, batch: Path) -> None:
    fake.answer("squeue", queue(batch, dict.fromkeys(range(6), "RUNNING")))
    snapshot = Poller([batch]).poll()
    assert (snapshot.calls, states(snapshot)) == (1, ["running"] * 6)
    assert not snapshot.ended


def test_a_job_that_is_done_is_not_asked_for(fake: StandIns, batch: Path) -> None:
    for index in range(6):
        leave(batch, "collect", index, Ending.DONE, f"12_{index}")
    poller = Poller([batch])
    assert states(poller.poll()) == ["done"] * 6
    assert poller.poll().calls == 0
    assert fake.calls("squeue") == []


def test_one_squeue_and_one_sacct_for_many_batches(fake: StandIns, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(5):
        fake.answer("sbatch", f"{number + 1}\n")
        slurm_submit.submit(Batch(jobs=(job("collect"),)), PROFILE, "main", tmp_path / f"b{number}")
    monkeypatch.setattr(slurm_status, "SUBMITTED_GRACE_S", -1)
    found = job_dir(tmp_path / "b0", "collect").submission()
    assert found is not None
    fake.answer("sacct", f"1|NODE_FAIL|2026-11-15T07:05:44|2026-11-15T07:05:53|{found.name}\n")
    snapshot = Poller([tmp_path / f"b{number}" for number in range(5)]).poll()
    assert snapshot.calls == 2
    assert fake.calls("squeue")[0][6] == fake.calls("sacct")[0][6] == "1,2,3,4,5"
    assert [str(path.name) for path, _ in snapshot.batches] == ["b0", "b1", "b2", "b3", "b4"]
    assert states(snapshot) == ["blocked", *["lost"] * 4]
    assert snapshot.units[0].reason == "a node failed"


def test_where_there_is_no_accounting_it_is_asked_once(fake: StandIns, batch: Path) -> None:
    poller = Poller([batch])
    assert [poller.poll().calls for _ in range(3)] == [2, 1, 1]
    assert states(poller.poll()) == ["lost"] * 6


def test_another_cluster_that_shares_the_file_system_loses_nothing(fake: StandIns, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "slurm.conf"
    own.write_text("# comment\nClusterName=alpha\n")
    monkeypatch.setenv("SLURM_CONF", str(own))
    fake.answer("sbatch", "12\n")
    slurm_submit.submit(Batch(jobs=(job("collect"),)), PROFILE, "main", tmp_path / "b")
    monkeypatch.setattr(slurm_status, "SUBMITTED_GRACE_S", -1)
    assert states(Poller([tmp_path / "b"]).poll()) == ["lost"]
    own.write_text("ClusterName=beta\n")  # as on another machine, where the same path holds that one's own
    snapshot = Poller([tmp_path / "b"]).poll()
    assert states(snapshot) == ["unknown"]
    assert snapshot.controller == "submitted to the cluster alpha, and this machine belongs to beta"
    assert snapshot.calls <= 2


def test_ended_with_a_result_needs_no_accounting(fake: StandIns, batch: Path) -> None:
    for index in range(6):
        leave(batch, "collect", index, Ending.CLIENT_FAILED, f"12_{index}", 7)
    snapshot = Poller([batch]).poll()
    assert (snapshot.calls, states(snapshot), snapshot.ended) == (1, ["failed"] * 6, True)


def test_an_accounting_that_does_not_answer_makes_nothing_lost(fake: StandIns, batch: Path) -> None:
    fake.answer("sacct", "", "sacct: error: Problem talking to the database: Connection refused\n", 1)
    fake.answer("squeue", queue(batch, {0: "RUNNING"}))
    leave(batch, "collect", 1, Ending.CLIENT_FAILED, "12_1", 7)
    snapshot = Poller([batch]).poll()
    assert states(snapshot)[0] == "running"
    assert states(snapshot)[2:] == ["unknown"] * 4
    assert "Connection refused" in snapshot.controller


def test_what_only_accounting_believes_to_live_is_lost(fake: StandIns, batch: Path) -> None:
    name = queue(batch, {0: "x"}).strip().rpartition("|")[2]
    fake.answer("sacct", f"12_[0-5]|RUNNING|2026-11-15T07:05:44|Unknown|{name}\n")
    snapshot = Poller([batch]).poll()
    assert states(snapshot) == ["lost"] * 6
    assert snapshot.units[0].reason == "accounting says RUNNING, but the controller does not know it"


def test_a_silent_controller_makes_nothing_lost(fake: StandIns, batch: Path) -> None:
    leave(batch, "collect", 1, Ending.DONE, "12_1")
    leave(batch, "collect", 2, Ending.CLIENT_FAILED, "12_2", 7)
    fake.answer("squeue", "", DOWN, 1)
    snapshot = Poller([batch]).poll()
    assert states(snapshot) == ["unknown", "done", *["unknown"] * 4]
    assert "Unable to contact slurm controller" in snapshot.controller
    assert (snapshot.calls, snapshot.ended) == (1, False)


def test_a_reused_id_is_noticed_by_its_name(fake: StandIns, batch: Path) -> None:
    fake.answer("squeue", queue(batch, dict.fromkeys(range(6), "RUNNING"), name="somebody-elses"))
    snapshot = Poller([batch]).poll()
    assert states(snapshot) == ["lost"] * 6
    assert snapshot.units[0].reason == "the id 12 belongs to another job now: somebody-elses"
    other = "seatrial-merge-00000000"
    fake.answer("squeue", queue(batch, dict.fromkeys(range(6), "RUNNING"), name=other, mark=comment(batch)))
    assert states(Poller([batch]).poll()) == ["lost"] * 6


def test_a_job_that_was_renamed_is_ours_by_its_comment(fake: StandIns, batch: Path) -> None:
    fake.answer("squeue", queue(batch, dict.fromkeys(range(6), "RUNNING"), name="mine", mark=comment(batch)))
    assert states(Poller([batch]).poll()) == ["running"] * 6


def test_the_last_word_of_accounting_counts_and_only_of_our_job(fake: StandIns, batch: Path) -> None:
    name = queue(batch, {0: "x"}).strip().rpartition("|")[2]
    lines = [
        f"12_0|TIMEOUT|2026-11-15T07:05:45|2026-11-15T07:06:44|{name}",
        f"12_0|REQUEUED|2026-11-15T07:05:44|2026-11-15T07:05:45|{name}",
        "12_0|COMPLETED|2026-11-15T09:00:00|2026-11-15T09:05:45|another",
    ]
    fake.answer("sacct", "\n".join(lines) + "\n")
    found = Poller([batch]).poll().units[0]
    assert (found.state, found.scheduler) == (UnitState.BLOCKED, "TIMEOUT")


def test_a_torn_result_is_named_and_other_files_are_not_results(fake: StandIns, batch: Path) -> None:
    folder = job_dir(batch, "collect")
    folder.result_file(0).write_text('{"job": "coll')
    (folder.path / "results" / ".1.12_1-0").write_text(" " * 2048)
    (folder.path / "results" / "2.before-12_2-0.json").write_text("{}")
    snapshot = Poller([batch]).poll()
    assert states(snapshot) == ["blocked", *["lost"] * 5]
    assert str(folder.result_file(0)) in snapshot.units[0].reason


def test_a_submission_without_an_id_that_nobody_knows_is_lost_not_submitted_again(
    fake: StandIns, batch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = job_dir(batch, "collect")
    stored = folder.submission()
    assert stored is not None
    write_json(folder.submission_file, stored.model_copy(update={"slurm": None}))
    assert states(Poller([batch]).poll()) == ["lost"] * 6
    monkeypatch.setattr(slurm_status, "SUBMITTED_GRACE_S", 30)
    assert states(Poller([batch]).poll()) == ["waiting"] * 6
    assert len(fake.calls("sbatch")) == 1


def test_a_job_that_was_never_submitted_is_said_so(fake: StandIns, batch: Path) -> None:
    job_dir(batch, "collect").submission_file.unlink()
    os.utime(batch / jobdir.BATCH, (1, 1))
    found = Poller([batch]).poll().units[0]
    assert (found.state, found.reason) == (UnitState.LOST, "never submitted")


def test_jobs_that_run_on_this_machine_are_not_lost(fake: StandIns, batch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job_dir(batch, "collect").submission_file.unlink()
    os.utime(batch / jobdir.BATCH, (1, 1))
    monkeypatch.setattr(slurm_status, "SUBMITTED_GRACE_S", 30)
    leave(batch, "collect", 0, Ending.CLIENT_FAILED, "local", 3)
    with slurm_submit.locked(batch), (batch / slurm_status.LOCK).open() as other:
        with pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_SH | fcntl.LOCK_NB)
        assert states(Poller([batch]).poll()) == ["failed", *["waiting"] * 5]
    assert states(Poller([batch]).poll()) == ["failed", *["lost"] * 5]


def test_waiting_ends_at_its_deadline(fake: StandIns, batch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm_status, "FIRST_WAIT_S", 0.05)
    fake.answer("squeue", queue(batch, dict.fromkeys(range(6), "RUNNING")))
    slept: list[float] = []
    monkeypatch.setattr(slurm_status, "time", SimpleNamespace(time=time.time, monotonic=lambda: sum(slept), sleep=slept.append))
    found = list(slurm_status.snapshots(Poller([batch]), deadline_s=1))
    assert 2 <= len(found) <= 20
    assert 1 <= sum(slept) < 1.5
    assert not found[-1].ended


# ---- on the private cluster ------------------------------------------------------------------------------------------


def ended(poller: Poller, deadline_s: float = 90) -> Snapshot:
    return until(lambda: found if (found := poller.poll()).ended else None, "end of all units", deadline_s)


@pytest.mark.real
@pytest.mark.parametrize("accounting", [False, True])
def test_purged_ids(make_cluster: MakeCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, accounting: bool) -> None:
    """Slurm forgets after 2 s: results stay; without a result accounting knows the word, or the unit is lost."""
    monkeypatch.setattr(slurm_status, "SUBMITTED_GRACE_S", 1)
    cluster = make_cluster(nodes=2, accounting=accounting, min_job_age=2)
    monkeypatch.setenv("SLURM_CONF", cluster.env["SLURM_CONF"])
    monkeypatch.setattr(slurm_status, "RESULT_GRACE_S", 0)
    # Unit 2 exits with 137, which accounting masks to 9:0; the result of unit 3 is lost.
    command = ("bash", "-c", "case {index} in 2) exit 137;; 3) exit 5;; esac")
    (found,) = slurm_submit.submit(Batch(jobs=(job("collect", command, array=4),)), PROFILE, "main", tmp_path)
    gone = ("squeue", "-h", "-t", "all", "-j", found.slurm or "", "-o", "%i")
    cluster.wait(lambda: cluster.run(*gone).returncode == 1, "purge", 90)
    time.sleep(2)
    job_dir(tmp_path, "collect").result_file(3).unlink()
    snapshot = Poller([tmp_path]).poll()
    assert snapshot.calls == 2
    assert states(snapshot)[:3] == ["done", "done", "failed"]
    failed = snapshot.units[2].result
    assert failed is not None
    assert failed.exit_code == 137
    last = snapshot.units[3]
    assert last.state is (UnitState.BLOCKED if accounting else UnitState.LOST)
    assert last.scheduler == ("FAILED" if accounting else "")


@pytest.mark.real
def test_a_controller_that_is_killed_and_comes_back_loses_nothing(
    make_cluster: MakeCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = make_cluster(nodes=2)
    monkeypatch.setenv("SLURM_CONF", cluster.env["SLURM_CONF"])
    gate = tmp_path / "gate"
    command = ("bash", "-c", f"touch {{job}}/up.{{index}}; until [ -e {gate} ]; do sleep 0.2; done")
    slurm_submit.submit(Batch(jobs=(job("collect", command, array=4),)), PROFILE, "main", tmp_path / "b")
    poller = Poller([tmp_path / "b"])
    until(lambda: len(list((tmp_path / "b" / "collect").glob("up.*"))) == 4 or None, "four clients", 60)
    time.sleep(6)  # the controller saves its state now and then; a kill right after sbatch does lose jobs
    cluster.kill_controller()
    silent = poller.poll()
    assert states(silent) == ["unknown"] * 4
    assert silent.controller
    gate.touch()
    until(lambda: not job_dir(tmp_path / "b", "collect").not_done(range(4)) or None, "results without a controller", 60)
    assert states(poller.poll()) == ["done"] * 4
    cluster.start_controller()
    snapshot = poller.poll()
    assert (states(snapshot), snapshot.controller) == (["done"] * 4, "")


@pytest.mark.real
def test_a_reused_id_on_slurm(cluster: PrivateSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The id of a lost job is another's now: its states are not ours, and it is not cancelled."""
    monkeypatch.setenv("SLURM_CONF", cluster.env["SLURM_CONF"])
    other = cluster.run("sbatch", "--parsable", "--job-name=somebody-elses", "--wrap=sleep 100").stdout.strip()
    slurm_submit.submit(Batch(jobs=(job("a"),)), PROFILE, "main", tmp_path)
    ended(Poller([tmp_path]))
    folder = job_dir(tmp_path, "a")
    folder.result_file(0).unlink()
    stored = folder.submission()
    assert stored is not None
    write_json(folder.submission_file, stored.model_copy(update={"slurm": other, "submitted": 1}))
    found = Poller([tmp_path]).poll().units[0]
    assert (found.state, found.reason) == (UnitState.LOST, f"the id {other} belongs to another job now: somebody-elses")
    assert slurm_submit.cancel(tmp_path) == ()
    assert cluster.run("squeue", "-h", "-j", other, "-o", "%T").stdout.strip() in ("RUNNING", "PENDING")
    cluster.run("scancel", other)


@pytest.mark.real
def test_a_submission_whose_id_was_never_stored_is_found_by_name(
    cluster: PrivateSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_CONF", cluster.env["SLURM_CONF"])
    (sent,) = slurm_submit.submit(Batch(jobs=(job("a", ("sleep", "600"), array=2),)), PROFILE, "main", tmp_path)
    write_json(job_dir(tmp_path, "a").submission_file, sent.model_copy(update={"slurm": None}))
    snapshot = Poller([tmp_path]).poll()
    assert snapshot.calls == 1
    assert [item.slurm for item in snapshot.units] == [f"{sent.slurm}_0", f"{sent.slurm}_1"]
    assert slurm_submit.cancel(tmp_path) == ("a",)
    assert {item.state for item in ended(Poller([tmp_path])).units} == {UnitState.BLOCKED}


@pytest.mark.real
def test_a_dependency_that_fails_cancels_what_comes_after(cluster: PrivateSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_CONF", cluster.env["SLURM_CONF"])
    after = (After(job="collect"),)
    batch = Batch(jobs=(job("collect", ("bash", "-c", "exit {index}"), array=2), job("merge", after=after)))
    slurm_submit.submit(batch, PROFILE, "main", tmp_path)
    snapshot = ended(Poller([tmp_path]))
    assert states(snapshot) == ["done", "failed", "blocked"]
    assert "DependencyNeverSatisfied" in snapshot.units[2].reason


@pytest.mark.real
def test_an_ended_script_without_a_result_is_not_done(cluster: PrivateSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_CONF", cluster.env["SLURM_CONF"])
    script = "#!/bin/bash\n#SBATCH -J {a}\n#SBATCH -o /dev/null\ntrue\n"
    monkeypatch.setattr(slurm_submit, "render_batch", lambda jobs, profile, directory, names: {"a": script.format(**names)})
    slurm_submit.submit(Batch(jobs=(job("a"),)), PROFILE, "main", tmp_path)
    poller = Poller([tmp_path])
    late = until(lambda: found if (found := poller.poll().units[0]).scheduler == "COMPLETED" else None, "end", 60)
    assert (late.state, late.reason) == (UnitState.RUNNING, "ended; its result does not show yet")
    monkeypatch.setattr(slurm_status, "RESULT_GRACE_S", 0)
    found = poller.poll().units[0]
    assert (found.state, found.scheduler) == (UnitState.BLOCKED, "COMPLETED")
    assert "without leaving a result" in found.reason


def test_logs_of_a_client_that_failed_are_redacted_once_its_script_has_ended(fake: StandIns, batch: Path) -> None:
    log = job_dir(batch, "collect").log("client", 0, 0)
    log.write_text("a secret")
    fake.answer("squeue", queue(batch, dict.fromkeys(range(6), "RUNNING")))
    told: list[str] = []
    slurm_status.redact_logs(Poller([batch]).poll(), lambda path: path.unlink(), told.append)
    assert log.is_file()
    assert "not redacted yet" in told.pop()
    for index in range(6):
        leave(batch, "collect", index, Ending.CLIENT_FAILED, f"12_{index}", 1)
    snapshot = Poller([batch]).poll()
    assert states(snapshot) == ["running"] * 6
    fake.answer("squeue", queue(batch, dict.fromkeys(range(6), "FAILED")))
    slurm_status.redact_logs(snapshot, lambda path: Redactor({"X_API_KEY": "a secret"}).log(path), told.append)
    assert "secret" not in log.read_text()
    assert told == []


def test_a_log_that_cannot_be_redacted_changes_no_verdict(fake: StandIns, batch: Path) -> None:
    def refuse(path: Path) -> None:
        raise UserError(f"{path}: cannot write", "make it writable")

    job_dir(batch, "collect").log("client", 0, 0).write_text("text")
    fake.answer("squeue", queue(batch, dict.fromkeys(range(6), "CANCELLED")))
    told: list[str] = []
    slurm_status.redact_logs(Poller([batch]).poll(), refuse, told.append)
    assert "client.0-0.log: cannot write; make it writable" in told.pop()
    assert told == []


def test_redacting_keeps_the_mode_of_a_log_and_leaves_a_clear_one(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    log.write_text("TOKEN=ghp_0123456789abcdefghijABCDEFGHIJ012345\n")
    log.chmod(0o600)
    Redactor({}).log(log)
    assert ("ghp_" in log.read_text(), log.stat().st_mode & 0o777) == (False, 0o600)
    before = log.stat().st_ino
    Redactor({}).log(log)
    assert log.stat().st_ino == before
