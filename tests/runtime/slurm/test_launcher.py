"""A loop's own launcher, submitted unchanged: here a stand-in with the interface of the real one, on a real Slurm."""

from __future__ import annotations

from pathlib import Path

import pytest

from seatrial.core.jobs import Batch, Job, Profile, UnitState, UnitStatus
from seatrial.runtime import jobdir
from seatrial.runtime import slurm_submit as slurm
from seatrial.runtime.slurm_status import Poller
from tests.runtime.slurm.cluster import PrivateSlurm
from tests.runtime.slurm.harness import client, script, until

pytestmark = pytest.mark.real

RAY_SUB = Path(__file__).parents[2] / "data" / "ray" / "ray.sub"
PROFILE = Profile(account="acc", partition="main", time="0:10:00", containers={"loop": "image.sqsh"}, gpus_per_node=8)


def ended(directory: Path) -> UnitStatus:
    poller = Poller([directory])
    return until(lambda: found if (found := poller.poll().units[0]).verdict else None, "end of the job", 90)


@pytest.mark.parametrize(
    ("code", "state"),
    [
        ("pass", UnitState.DONE),
        ("raise SystemExit(5)", UnitState.FAILED),
        ("raise SystemExit(99)", UnitState.BLOCKED),
    ],
)
def test_the_client_of_a_launcher_is_judged_like_any_other(
    cluster: PrivateSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, state: UnitState
) -> None:
    monkeypatch.setenv("SLURM_CONF", cluster.env["SLURM_CONF"])
    tell = f"import os; print(os.environ['FAKE_PYXIS_IMAGE'], os.environ['WORD'], 'SLURM_JOB_ID' in os.environ, os.getcwd()); {code}"
    part = client(*script(tell), container="loop", environment={"WORD": "it's {index}"})
    directory = tmp_path / "batch"
    sent = slurm.submit(Batch(jobs=(Job(name="grpo", components=(part,), launcher=str(RAY_SUB)),)), PROFILE, "test", directory)
    unit = ended(directory)
    job = jobdir.job_dir(directory, "grpo")
    logs = job.path / "logs" / f"{sent[0].slurm}-logs"
    assert unit.state is state, (unit, (logs / "ray-driver.log").read_text())
    assert f"image.sqsh it's 0 False {RAY_SUB.parent}" in (logs / "ray-driver.log").read_text()
    assert job.log("client", 0, None).read_text() == (logs / "ray-driver.log").read_text()
    assert job.script.read_text().endswith(f"{RAY_SUB}\n")


def test_a_launcher_that_never_runs_the_client_is_not_done(cluster: PrivateSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_CONF", cluster.env["SLURM_CONF"])
    monkeypatch.setattr("seatrial.runtime.slurm_status.RESULT_GRACE_S", 2)
    broken = tmp_path / "ray.sub"
    broken.write_text("#!/bin/bash\nexit 0\n")
    directory = tmp_path / "batch"
    part = client("true", container="loop")
    slurm.submit(Batch(jobs=(Job(name="grpo", components=(part,), launcher=str(broken)),)), PROFILE, "test", directory)
    unit = ended(directory)
    assert unit.state is UnitState.BLOCKED
    assert "without leaving a result" in unit.reason


def test_a_launcher_is_validated_before_it_is_submitted(cluster: PrivateSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_CONF", cluster.env["SLURM_CONF"])
    batch = Batch(jobs=(Job(name="grpo", components=(client("true", container="loop"),), launcher=str(RAY_SUB)),))
    assert slurm.validate(batch, PROFILE, tmp_path) == (("grpo", "ok"),)
    ((_, said),) = slurm.validate(batch, PROFILE.model_copy(update={"partition": "nowhere"}), tmp_path)
    assert "nvalid partition" in said
