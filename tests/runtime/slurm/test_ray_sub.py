"""The real launcher of a loop with real Ray over two nodes, by hand; its stand-in is in test_launcher.py.

It is not ours to carry along, so these tests run only where it is named: `SEATRIAL_RAY_SUB=/path/of/RL/ray.sub`, with the `ray`
of an environment that has `ray[default,client]` on PATH, and PMIx for Slurm (`apt-get install libpmix-dev` on Debian).
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from seatrial.core.jobs import Batch, Ending, Job, Profile, UnitState, UnitStatus
from seatrial.runtime import jobdir
from seatrial.runtime import slurm_submit as slurm
from seatrial.runtime.ray import check_nodes
from seatrial.runtime.slurm_status import Poller
from tests.runtime.rays import instruments
from tests.runtime.slurm.cluster import PrivateSlurm
from tests.runtime.slurm.conftest import MakeCluster
from tests.runtime.slurm.harness import client, until

RAY_SUB = os.environ.get("SEATRIAL_RAY_SUB", "")
pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not RAY_SUB, reason="SEATRIAL_RAY_SUB=/path/of/RL/ray.sub names no launcher"),
]
PROFILE = Profile(account="acc", partition="main", time="0:10:00", containers={"loop": "image.sqsh"}, gpus_per_node=4)
BEGIN = "import os, ray, time; ray.init(address='auto'); assert len(ray.nodes()) == 2; print('began', flush=True); "


@pytest.fixture
def ray_cluster(make_cluster: MakeCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PrivateSlurm:
    """Two nodes that end what a step leaves behind; by parents alone, as elsewhere, Slurm would not see Ray any more."""
    # PMIx makes directories named after job and step.
    settings = {"ProctrackType": "proctrack/pgid", "TmpFS": str(tmp_path)}
    cluster = make_cluster(nodes=2, cpus=4, gpus=4, network="namespaces", settings=settings)
    monkeypatch.setenv("SLURM_CONF", cluster.env["SLURM_CONF"])
    return cluster


def submitted(directory: Path, *command: str, **variables: str) -> str:
    part = client(*command, container="loop", nodes=2, tasks=2, environment=variables)
    return slurm.submit(Batch(jobs=(Job(name="grpo", components=(part,), launcher=RAY_SUB),)), PROFILE, "test", directory)[0].slurm or ""


def ended(cluster: PrivateSlurm, directory: Path, job: str) -> UnitStatus:
    """How the unit ended, when Slurm has ended the job too; nothing of it may be left."""
    poller = Poller([directory])
    unit = until(lambda: found if (found := poller.poll().units[0]).verdict else None, lambda: str(poller.poll()), 150)
    live = ("squeue", "--noheader", "--states=RUNNING,COMPLETING", f"--jobs={job}")
    until(lambda: cluster.run(*live).stdout == "" or None, "end of the job in Slurm", 60)
    listing = "ps ax -o args | grep -c '[r]aylet\\|[g]cs_server\\|[r]ay::'"
    assert cluster.run("srun", "--nodes=2", "--label", "sh", "-c", listing).stdout.split() in (
        ["0:", "0", "1:", "0"],
        ["1:", "0", "0:", "0"],
    )
    return unit


def python() -> str:
    found = shutil.which("ray")
    assert found, "no `ray` on PATH"
    return str(Path(found).with_name("python"))


def test_a_worker_of_every_node_answers(ray_cluster: PrivateSlurm, tmp_path: Path) -> None:
    out, batch = tmp_path / "facts.json", tmp_path / "batch"
    look = (python(), "-m", "seatrial.instruments.ray_nodes", "--out", str(out), "--nodes", "2")
    unit = ended(ray_cluster, batch, submitted(batch, *look, PYTHONPATH=str(instruments(tmp_path / "instruments"))))
    assert unit.state is UnitState.DONE, unit
    facts = json.loads(out.read_text())
    assert {node["host"] for node in facts["nodes"]} == {"n1", "n2"}
    assert all(finding.ok for finding in check_nodes(facts, 2, {}))


def test_the_exit_code_is_exact(ray_cluster: PrivateSlurm, tmp_path: Path) -> None:
    unit = ended(ray_cluster, tmp_path / "batch", submitted(tmp_path / "batch", python(), "-c", f"{BEGIN}raise SystemExit(5)"))
    assert unit.state is UnitState.FAILED
    assert unit.result
    assert (unit.result.ending, unit.result.exit_code, unit.result.node) == (Ending.CLIENT_FAILED, 5, "n1")


def begun(directory: Path) -> None:
    """Wait until the client runs; its log is where that of every job is."""
    log = jobdir.job_dir(directory, "grpo").log("client", 0, None)
    until(lambda: (log.is_file() and "began" in log.read_text()) or None, "start of the client", 120)


def test_a_requeued_job_goes_on(ray_cluster: PrivateSlurm, tmp_path: Path) -> None:
    batch = tmp_path / "batch"
    code = f"{BEGIN}time.sleep(0 if '-1-logs' in os.path.realpath('/proc/self/fd/1') else 600)"
    job = submitted(batch, python(), "-c", code)
    begun(batch)
    assert ray_cluster.run("scontrol", "requeue", job).returncode == 0
    unit = ended(ray_cluster, batch, job)
    assert unit.state is UnitState.DONE, unit
    assert unit.result
    assert (unit.result.slurm, unit.result.restart) == (job, 1)


def test_a_cancelled_job_is_blocked(ray_cluster: PrivateSlurm, tmp_path: Path) -> None:
    batch = tmp_path / "batch"
    job = submitted(batch, python(), "-c", f"{BEGIN}time.sleep(600)")
    begun(batch)
    assert slurm.cancel(batch) == ("grpo",)
    unit = ended(ray_cluster, batch, job)
    assert (unit.state, unit.scheduler) == (UnitState.BLOCKED, "CANCELLED")
