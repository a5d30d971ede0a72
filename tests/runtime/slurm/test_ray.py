"""Real Ray over two nodes of a real Slurm: each node has its own address, as `ray symmetric-run` demands."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from seatrial.core.jobs import Ending, Job
from seatrial.runtime.ray import check_nodes, ray_job
from seatrial.runtime.staged import stage
from tests.runtime.rays import environment, instruments, leftovers
from tests.runtime.slurm.conftest import MakeCluster
from tests.runtime.slurm.harness import Submitted, client, submit

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]

OPTIONS = ("--num-cpus=1", "--object-store-memory=80000000")


def ray_client(tmp_path: Path, *command: str, **variables: str) -> Job:
    """A job whose client runs inside Ray on two nodes, each of which has a process table of its own."""
    env = environment()
    inner = client(*command, environment={"PYTHONPATH": str(instruments(tmp_path / "instruments")), **variables})
    return ray_job(Job(name="job", components=(inner,)), 2, ray=str(env.python.with_name("ray")), python=sys.executable, options=OPTIONS)


def run(make_cluster: MakeCluster, job: Job, batch: Path) -> Submitted:
    cluster = make_cluster(nodes=2, gpus=0, network="namespaces", pyxis=False)
    stage(job, batch / job.name)
    return submit(cluster, job, batch)


def test_the_probe_sees_a_worker_of_every_node_and_nothing_stays(make_cluster: MakeCluster, tmp_path: Path) -> None:
    out = tmp_path / "facts.json"
    checkout = tmp_path / "checkout"
    (checkout / "fakepkg").mkdir(parents=True)
    (checkout / "fakepkg" / "__init__.py").write_text("")
    look = (str(environment().python), "-m", "seatrial.instruments.ray_nodes", "--out", str(out), "--nodes", "2")
    job = run(make_cluster, ray_client(tmp_path, *look, "--root", f"fakepkg={checkout}", "--env", f"PYTHONPATH={checkout}"), tmp_path)
    result = job.result(deadline_s=150)
    assert (result.ending, result.exit_code) == (Ending.DONE, 0), job.log("client")
    facts = json.loads(out.read_text())
    assert {node["host"] for node in facts["nodes"]} == {"n1", "n2"}
    assert all(finding.ok for finding in check_nodes(facts, 2, {"fakepkg": str(checkout)}))
    assert job.ended() == "COMPLETED"
    assert leftovers(f"ray-{job.id}-0") == []
    assert not Path("/tmp", f"ray-{job.id}-0").exists()


def test_the_exit_code_of_a_client_over_two_nodes_is_exact(make_cluster: MakeCluster, tmp_path: Path) -> None:
    code = "import ray; ray.init(); assert len(ray.nodes()) == 2; raise SystemExit(5)"
    job = run(make_cluster, ray_client(tmp_path, str(environment().python), "-c", code), tmp_path)
    result = job.result(deadline_s=150)
    assert (result.ending, result.exit_code) == (Ending.CLIENT_FAILED, 5), job.log("client")
    assert job.ended() == "FAILED"
    assert leftovers(f"ray-{job.id}-0") == []
    assert not Path("/tmp", f"ray-{job.id}-0").exists()
