"""Handing batches to Slurm: with stand-ins for what must go wrong, and on the private cluster."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from seatrial.core.errors import BlockedError, UserError
from seatrial.core.files import write_json
from seatrial.core.jobs import After, Batch, Component, Ending, Job, Profile, Result, UnitState
from seatrial.runtime import jobdir, slurm_status, slurm_submit
from seatrial.runtime import slurm as commands
from seatrial.runtime.jobdir import job_dir
from seatrial.runtime.slurm import ControllerDown, SlurmRefused
from seatrial.runtime.slurm_status import Poller
from tests.runtime.slurm.cluster import PrivateSlurm
from tests.runtime.slurm.harness import until
from tests.runtime.slurm.stand_ins import StandIns, stand_ins

PROFILE = Profile(time="0:10:00")


def job(name: str, command: Sequence[str] = ("true",), **more: Any) -> Job:
    """A job of one client."""
    return Job(name=name, components=(Component(name="client", role="client", command=tuple(command)),), **more)


def chain(**more: Any) -> Batch:
    """An array and the job that merges it."""
    return Batch(jobs=(job("collect", array=6, **more), job("merge", after=(After(job="collect"),))))


def leave(directory: Path, name: str, index: int, ending: Ending, slurm: str, code: int | None = 0) -> None:
    """A result as a unit leaves it."""
    now = int(time.time())
    result = Result(
        job=name,
        index=index,
        slurm=slurm,
        restart=0,
        ending=ending,
        component="client.0",
        exit_code=code,
        node="n1",
        started=now,
        ended=now,
    )
    write_json(job_dir(directory, name).result_file(index), result)


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIns:
    found = stand_ins(tmp_path, monkeypatch)
    found.answer("sbatch", "12\n")
    return found


def test_a_batch_is_one_sbatch_per_job_with_dependencies_by_id(fake: StandIns, tmp_path: Path) -> None:
    found = slurm_submit.submit(chain(), PROFILE, "main", tmp_path / "b")
    scripts = [str(tmp_path / "b" / name / "job.sh") for name in ("collect", "merge")]
    assert fake.calls("sbatch") == [
        ["--parsable", scripts[0]],
        ["--parsable", "--dependency=afterok:12", "--kill-on-invalid-dep=yes", scripts[1]],
    ]
    assert [(item.job, item.slurm, item.profile, len(item.units)) for item in found] == [
        ("collect", "12", "main", 6),
        ("merge", "12", "main", 1),
    ]
    for item in found:
        assert job_dir(tmp_path / "b", item.job).submission() == item
        assert item.name in job_dir(tmp_path / "b", item.job).script.read_text()
    assert len({item.name for item in found}) == 2
    assert jobdir.load(tmp_path / "b") == chain()


def test_results_without_a_batch_never_count(fake: StandIns, tmp_path: Path) -> None:
    leave(tmp_path / "b", "collect", 0, Ending.DONE, "7_0")
    with pytest.raises(UserError, match="collect: is there already, and no batch"):
        slurm_submit.submit(chain(), PROFILE, "main", tmp_path / "b")
    assert fake.calls() == []


def test_of_two_that_submit_into_one_directory_only_one_does(fake: StandIns, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def late(batch: Batch, cluster: str) -> None:
        """What happens between the first look and the lock: somebody else submits."""
        monkeypatch.setattr(slurm_submit, "_check_foreign", lambda *_: None)
        slurm_submit.submit(batch, PROFILE, "main", tmp_path / "b")

    monkeypatch.setattr(slurm_submit, "_check_foreign", late)
    with pytest.raises(UserError, match="holds a batch already"):
        slurm_submit.submit(chain(), PROFILE, "main", tmp_path / "b")
    assert len(fake.calls("sbatch")) == 2


def test_jobs_may_come_after_others_however_they_end_and_after_foreign_ones(fake: StandIns, tmp_path: Path) -> None:
    fake.answer("squeue", "7|RUNNING|NONE|None|(null)|foreign\n8_1|RUNNING|NONE|None|(null)|foreign\n")
    batch = Batch(jobs=(job("a"), job("b", after=(After(job="a", when="any"),), after_ids=("7", "8_1"))))
    slurm_submit.submit(batch, PROFILE, "main", tmp_path / "b")
    assert fake.calls("sbatch")[1][1] == "--dependency=afterany:12,afterok:7,afterok:8_1"


def test_a_foreign_job_that_slurm_does_not_know_is_refused_because_slurm_would_not_wait(fake: StandIns, tmp_path: Path) -> None:
    fake.answer("squeue", "", "slurm_load_jobs error: Invalid job id specified\n", 1)
    fake.answer("sacct", "", "Slurm accounting storage is disabled\n", 1)
    with pytest.raises(UserError, match="Slurm does not know job 999999"):
        slurm_submit.submit(Batch(jobs=(job("a", after_ids=("999999",)),)), PROFILE, "main", tmp_path / "b")
    assert fake.calls("sbatch") == []
    assert not (tmp_path / "b").exists()
    fake.answer("sacct", "999999|COMPLETED|2026-11-15T07:05:43|2026-11-15T07:05:44|x\n")
    slurm_submit.submit(Batch(jobs=(job("a", after_ids=("999999",)),)), PROFILE, "main", tmp_path / "b")


def test_the_name_is_stored_before_sbatch_is_called(fake: StandIns, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*_: object) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "sbatch", killed)
    with pytest.raises(KeyboardInterrupt):
        slurm_submit.submit(chain(), PROFILE, "main", tmp_path / "b")
    stored = job_dir(tmp_path / "b", "collect").submission()
    assert stored is not None
    assert (stored.slurm, stored.units) == (None, (0, 1, 2, 3, 4, 5))
    assert stored.name in job_dir(tmp_path / "b", "collect").script.read_text()
    with pytest.raises(UserError, match="not ended yet: collect"):
        slurm_submit.resubmit(tmp_path / "b", PROFILE, "main")


def test_a_later_refusal_says_what_is_in_and_how_to_go_on(fake: StandIns, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[str | BlockedError] = ["12", SlurmRefused("sbatch: Invalid partition name specified"), "13", "14"]

    def one_after_the_other(*_: object) -> str:
        answer = answers.pop(0)
        if isinstance(answer, BlockedError):
            raise answer
        return answer

    monkeypatch.setattr(commands, "sbatch", one_after_the_other)
    with pytest.raises(SlurmRefused) as caught:
        slurm_submit.submit(chain(), PROFILE, "main", tmp_path / "b")
    assert "job merge was not accepted: sbatch: Invalid partition" in caught.value.message
    assert "Submitted: collect (12); not submitted: merge" in caught.value.message
    assert f"seatrial jobs resubmit {tmp_path / 'b'} --on slurm:main" in caught.value.fix
    assert "jobs cancel" in caught.value.fix
    assert job_dir(tmp_path / "b", "merge").submission() is None


def test_a_silent_controller_leaves_the_submission_to_be_found(fake: StandIns, tmp_path: Path) -> None:
    fake.answer("sbatch", "", "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation\n", 1)
    with pytest.raises(ControllerDown, match="Whether collect is in the queue is not known"):
        slurm_submit.submit(chain(), PROFILE, "main", tmp_path / "b")
    stored = job_dir(tmp_path / "b", "collect").submission()
    assert stored is not None
    fake.answer("squeue", "".join(f"30_{index}|RUNNING|NONE|None|(null)|{stored.name}\n" for index in range(6)))
    snapshot = Poller([tmp_path / "b"]).poll()
    assert [(item.state, item.slurm) for item in snapshot.units[:2]] == [(UnitState.RUNNING, "30_0"), (UnitState.RUNNING, "30_1")]
    assert snapshot.calls == 1
    assert fake.calls("squeue")[-1][5:7] == ["-n", stored.name]


def test_a_directory_holds_one_batch(fake: StandIns, tmp_path: Path) -> None:
    slurm_submit.submit(chain(), PROFILE, "main", tmp_path / "b")
    with pytest.raises(UserError, match="holds a batch already"):
        slurm_submit.submit(chain(), PROFILE, "main", tmp_path / "b")
    assert len(fake.calls("sbatch")) == 2


def test_nothing_is_written_where_there_is_no_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_ins(tmp_path, monkeypatch, ())
    with pytest.raises(BlockedError, match="no Slurm here"):
        slurm_submit.submit(chain(), PROFILE, "main", tmp_path / "b")
    assert not (tmp_path / "b").exists()


def test_an_array_beyond_the_cluster_is_refused_before_anything_is_submitted(fake: StandIns, tmp_path: Path) -> None:
    fake.answer("scontrol", "MaxArraySize            = 1001\n")
    with pytest.raises(UserError, match="array = 1002, but this cluster takes at most 1001") as caught:
        slurm_submit.submit(Batch(jobs=(job("small"), job("large", array=1002))), PROFILE, "main", tmp_path / "b")
    assert "1001 units" in caught.value.fix
    assert fake.calls("sbatch") == []
    slurm_submit.submit(Batch(jobs=(job("large", array=1000),)), PROFILE, "main", tmp_path / "b")
    assert len(fake.calls("scontrol")) == 1


def test_what_cannot_be_rendered_is_refused_before_anything_is_submitted(fake: StandIns, tmp_path: Path) -> None:
    strange = Component(name="client", role="client", command=("true",), container="nope")
    with pytest.raises(UserError, match="nope"):
        slurm_submit.submit(Batch(jobs=(job("a"), Job(name="b", components=(strange,)))), PROFILE, "main", tmp_path / "b")
    assert (fake.calls(), (tmp_path / "b").exists()) == ([], False)


def test_only_what_is_not_done_is_submitted_again(fake: StandIns, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / "b"
    slurm_submit.submit(chain(parallel=2), PROFILE, "main", directory)
    monkeypatch.setattr(slurm_status, "SUBMITTED_GRACE_S", 0)
    for index in (0, 1, 3, 5):
        leave(directory, "collect", index, Ending.DONE, f"12_{index}")
    leave(directory, "collect", 2, Ending.CLIENT_FAILED, "12_2", 7)
    before = job_dir(directory, "collect").submission()
    fake.answer("sbatch", "20\n")
    found = slurm_submit.resubmit(directory, PROFILE, "main")
    assert [(item.job, item.units, item.slurm) for item in found] == [("collect", (2, 4), "20"), ("merge", (0,), "20")]
    assert fake.calls("sbatch")[2][1] == "--array=2,4%2"
    assert fake.calls("sbatch")[3][1] == "--dependency=afterok:20"
    assert before is not None
    assert found[0].name != before.name
    for index in (2, 4):
        leave(directory, "collect", index, Ending.DONE, f"20_{index}")
    found = slurm_submit.resubmit(directory, PROFILE, "main")
    assert [item.job for item in found] == ["merge"]
    assert "--dependency" not in str(fake.calls("sbatch")[-1])
    leave(directory, "merge", 0, Ending.DONE, "20")
    assert slurm_submit.resubmit(directory, PROFILE, "main") == ()


def test_nothing_is_submitted_twice_while_the_controller_is_silent(fake: StandIns, tmp_path: Path) -> None:
    slurm_submit.submit(chain(), PROFILE, "main", tmp_path / "b")
    fake.answer("squeue", "", "slurm_load_jobs error: Unable to contact slurm controller (connect failure)\n", 1)
    with pytest.raises(ControllerDown, match="is not known"):
        slurm_submit.resubmit(tmp_path / "b", PROFILE, "main")
    with pytest.raises(ControllerDown, match="nothing was cancelled"):
        slurm_submit.cancel(tmp_path / "b")
    assert len(fake.calls("sbatch")) == 2


def test_only_our_own_live_jobs_are_cancelled(fake: StandIns, tmp_path: Path) -> None:
    fake.answer("sbatch", "12\n")
    (found,) = slurm_submit.submit(Batch(jobs=(job("a"),)), PROFILE, "main", tmp_path / "a")
    fake.answer("squeue", "12|RUNNING|NONE|None|(null)|somebody-elses\n")
    assert slurm_submit.cancel(tmp_path / "a") == ()
    assert fake.calls("scancel") == []
    fake.answer("squeue", f"12|RUNNING|NONE|None|(null)|{found.name}\n")
    assert slurm_submit.cancel(tmp_path / "a", ["a"]) == ("a",)
    assert fake.calls("scancel") == [["12"]]
    with pytest.raises(UserError, match="no job 'b' there; known: a"):
        slurm_submit.cancel(tmp_path / "a", ["b"])


def test_validation_names_each_job(fake: StandIns, tmp_path: Path) -> None:
    assert slurm_submit.validate(chain(), PROFILE, tmp_path / "b") == (("collect", "ok"), ("merge", "ok"))
    fake.answer("sbatch", "", "allocation failure: Requested node configuration is not available\n", 1)
    answers = dict(slurm_submit.validate(chain(), PROFILE, tmp_path / "b"))
    assert answers["merge"] == "sbatch: allocation failure: Requested node configuration is not available"
    assert not (tmp_path / "b").exists()


@pytest.fixture
def real(cluster: PrivateSlurm, monkeypatch: pytest.MonkeyPatch) -> PrivateSlurm:
    """The private cluster as the one of this process."""
    monkeypatch.setenv("SLURM_CONF", cluster.env["SLURM_CONF"])
    return cluster


@pytest.mark.real
def test_300_units_are_submitted_at_once_followed_and_judged(real: PrivateSlurm, tmp_path: Path) -> None:
    command = ("bash", "-c", "[ {index} != 17 ] || exit 3")
    batch = Batch(jobs=(job("collect", command, array=300), job("merge", after=(After(job="collect", when="any"),))))
    assert slurm_submit.validate(batch, PROFILE, tmp_path) == (("collect", "ok"), ("merge", "ok"))
    assert len(slurm_submit.submit(batch, PROFILE, "main", tmp_path)) == 2, "one job for 300 units, and one that comes after them"
    last = None
    for snapshot in slurm_status.snapshots(Poller([tmp_path]), deadline_s=300):
        assert snapshot.calls <= 2
        last = snapshot
    assert last is not None
    states = {(item.job, item.index): item.state for item in last.units}
    assert states.pop(("collect", 17)) is UnitState.FAILED
    assert set(states.values()) == {UnitState.DONE}
    assert len(states) == 300
    failed = next(item for item in last.units if item.index == 17)
    assert failed.result is not None
    assert failed.result.exit_code == 3


@pytest.mark.real
def test_cancel_and_resubmit_on_slurm(real: PrivateSlurm, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    command = ("bash", "-c", f"[ {{index}} = 0 ] || [ -e {gate} ] || sleep 600")
    batch = Batch(jobs=(job("collect", command, array=2), job("merge", after=(After(job="collect"),))))
    directory = tmp_path / "b"
    slurm_submit.submit(batch, PROFILE, "main", directory)
    poller = Poller([directory])
    until(lambda: poller.poll().units[0].state is UnitState.DONE or None, "unit 0", 60)
    with pytest.raises(UserError, match="not ended yet"):
        slurm_submit.resubmit(directory, PROFILE, "main")
    assert slurm_submit.cancel(directory) == ("collect", "merge")
    ended = until(lambda: found if (found := poller.poll()).ended else None, "end", 60)
    assert [item.state for item in ended.units] == [UnitState.DONE, UnitState.BLOCKED, UnitState.BLOCKED]
    gate.touch()
    again = slurm_submit.resubmit(directory, PROFILE, "main")
    assert [(item.job, item.units) for item in again] == [("collect", (1,)), ("merge", (0,))]
    ended = until(lambda: found if (found := poller.poll()).ended else None, "second end", 60)
    assert [item.state for item in ended.units] == [UnitState.DONE] * 3
    assert json.loads(job_dir(directory, "collect").submission_file.read_text())["units"] == [1]


@pytest.mark.real
def test_slurm_refuses_what_it_cannot_run(real: PrivateSlurm, tmp_path: Path) -> None:
    nowhere = Profile(partition="nowhere")
    (answer,) = slurm_submit.validate(Batch(jobs=(job("a"),)), nowhere, tmp_path)
    assert "Invalid partition name" in answer[1]
    with pytest.raises(SlurmRefused, match="Invalid partition name"):
        slurm_submit.submit(Batch(jobs=(job("a"),)), nowhere, "nowhere", tmp_path)
    assert job_dir(tmp_path, "a").submission() is None
    with pytest.raises(UserError, match="does not know job 4000000"):
        slurm_submit.submit(Batch(jobs=(job("a", after_ids=("4000000",)),)), PROFILE, "main", tmp_path / "b")


@pytest.mark.real
def test_a_unit_that_ends_leaves_the_other_units_alone(real: PrivateSlurm, tmp_path: Path) -> None:
    """One unit of an array has the array's own id: what it sends to its steps must not reach those of the others."""
    service = Component(name="service", command=("sleep", "600"))
    client = Component(name="client", role="client", command=("bash", "-c", "sleep $((10 - 3 * {index}))"))
    slurm_submit.submit(Batch(jobs=(Job(name="a", components=(service, client), array=4),)), PROFILE, "main", tmp_path)
    poller = Poller([tmp_path])
    snapshot = until(lambda: found if (found := poller.poll()).ended else None, "end", 90)
    assert [item.state for item in snapshot.units] == [UnitState.DONE] * 4, [item.reason for item in snapshot.units]
