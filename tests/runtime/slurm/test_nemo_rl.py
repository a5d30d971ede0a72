"""Trials of the NeMo-RL loop as jobs of a real Slurm: in a container on one node, and by the checkout's own ray.sub.

`uv`, the trainer behind it and Ray are stand-ins, as in real/test_nemo_outcomes.py. The real ray.sub was run by hand.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from seatrial.core.verdict import Boundary, ExitCode, Verdict
from seatrial.runtime.jobdir import job_dir
from tests.real.drive import Ran, call, wait_for
from tests.real.test_nemo_outcomes import Machine, _machine, machine
from tests.runtime.slurm.cluster import PrivateSlurm

__all__ = ["_machine", "machine"]
pytestmark = [pytest.mark.real, pytest.mark.timeout(2700)]
MEMORY = 17e9
RAY_SUB = Path(__file__).parents[2] / "data" / "ray" / "ray.sub"
TOML = """
[slurm.box]
time = "0:10:00"
cpus = 2
gpus = 2
image = "registry/nemo-rl"
setup = ["echo before the client"]
[slurm.sub]
account = "acc"
partition = "main"
time = "0:10:00"
image = "registry/nemo-rl"
ray = "ray.sub"
"""


def machine_memory() -> float:
    """Bytes that are free, as a process of its own sees them: in this one there is always enough (tests/conftest.py)."""
    rows = dict(line.split(":") for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines())
    return 1024 * float(rows["MemAvailable"].split()[0])


class Desk:
    """Where somebody sits who has access to the cluster and to the checkouts."""

    def __init__(self, where: Path, machine: Machine) -> None:
        self.where, self.machine = where, machine
        (where / "seatrial.toml").write_text(TOML)

    def run(self, profile: str, *words: str, nemo_rl: Path | None = None) -> Ran:
        # The trial runs in a job, out of reach, and asks for the memory of a real loop: tests beside this one may hold it for a while.
        wait_for("16 GB of memory are free", lambda: machine_memory() > MEMORY, 1500)
        bench = self.machine.bench
        checkouts = ("--nemo-rl", nemo_rl or bench.nemo_rl, "--change", f"bridge={bench.bridge}", "--python", self.machine.python)
        common = ("--level", "0", "--set", "options.tests=off", "--out", self.where / "run", "--on", f"slurm:{profile}")
        done = call(self.where, "run", "nemo-rl", *checkouts, *common, *words)
        return Ran(done.returncode, done.stdout, self.where / "run")


@pytest.fixture
def desk(tmp_path: Path, machine: Machine, cluster: PrivateSlurm, monkeypatch: pytest.MonkeyPatch) -> Desk:
    for key, value in cluster.env.items():
        monkeypatch.setenv(key, value)
    (tmp_path / "hf").mkdir()
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    return Desk(tmp_path, machine)


def mounted(script: str, place: Path) -> bool:
    return f"{place}:{place}" in script


def test_a_trial_on_one_node_in_a_container(desk: Desk) -> None:
    bench = desk.machine.bench
    done = desk.run("box")
    assert (done.code, done.trial.verdict) == (ExitCode.PASS, Verdict.PASS), done.output
    job = job_dir(desk.where / "run" / "jobs" / "1", "trial")
    script = job.script.read_text()
    for place in (bench.bridge, bench.nemo_rl, desk.where / "run", desk.where / "hf", desk.machine.python.parents[1]):
        assert mounted(script, place), place
    assert "before the client" in job.log("client", 0, None).read_text()
    assert done.level(0).checks, "read and judged inside the job"


def test_the_checkouts_own_launcher_is_submitted_from_its_root(desk: Desk, tmp_path: Path) -> None:
    root = tmp_path / "RL"
    shutil.copytree(desk.machine.bench.nemo_rl, root, symlinks=True)
    shutil.copy(RAY_SUB, root / "ray.sub")
    tried = desk.run("sub", "--dry-run", nemo_rl=root)
    assert (tried.code, "sbatch --test-only: ok" in tried.output) == (0, True), tried.output
    assert f"cd -- {root}\n" in tried.output
    assert f"    {root}/ray.sub\n" in tried.output
    assert "export CONTAINER=registry/nemo-rl\n" in tried.output
    assert " resume " in next(line for line in tried.output.splitlines() if line.startswith("export COMMAND="))
    mounts = next(line for line in tried.output.splitlines() if line.startswith("export MOUNTS="))
    assert all(mounted(mounts, place) for place in (root, desk.machine.bench.bridge, tmp_path / "run", tmp_path / "hf"))
    done = desk.run("sub", nemo_rl=root)
    level = done.level(0)
    assert (done.code, level.verdict, level.boundary) == (ExitCode.BLOCKED, Verdict.BLOCKED, Boundary.CLUSTER), done.output
    assert "0 of 1 expected nodes are in the Ray cluster" in level.reason, "the stand-in starts no Ray, and the trial ran inside the job"
