"""The script that sbatch is given: valid bash, readable, and with every option where it belongs."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from seatrial.core.errors import UserError
from seatrial.core.jobs import After, Component, Job, Profile, Ready
from seatrial.runtime.slurm import comment, render, resolve, time_minutes

HERE = Path("/shared/jobs/b-1")
CLIENT = Component(name="client", role="client", command=("ask", "{urls:server}"))
SERVER = Component(
    name="server",
    command=("vllm", "serve", "model", "--port", "{port}"),
    replicas=2,
    gpus=4,
    cpus=8,
    port=True,
    ready=Ready(deadline_s=900),
)


def text(*parts: Component, profile: Profile | None = None, batch: Path = HERE, units: dict[str, int] | None = None, **more: Any) -> str:
    return render(Job(name="job", components=parts or (SERVER, CLIENT), **more), profile or Profile(), batch, "seatrial-job-0", units)


def directives(script: str) -> list[str]:
    return re.findall(r"^#SBATCH (.*)$", script, re.MULTILINE)


def steps(script: str) -> dict[str, str]:
    return dict(re.findall(r"^start (\S+) (.*)$", script, re.MULTILINE))


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"array": 300, "parallel": 20},
        {"servers": {"judge": "https://example.org/v1"}},
        {"after": (After(job="first"),)},
        {"warn_s": 0, "requeue": False, "exclusive": True},
    ],
)
def test_every_form_is_valid_bash(more: dict[str, Any]) -> None:
    profile = Profile(
        account="a", partition="p", prolog=("module load x",), setup=("true # it's", "cd /"), containers={"v": "img"}, srun=("--mpi=pmix",)
    )
    script = text(profile=profile, units={"first": 3}, **more)
    checked = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr
    assert "{{" not in script
    assert "{%" not in script
    assert not re.search(r"[ \t]$", script, re.MULTILINE)


def test_the_allocation_and_the_steps() -> None:
    script = text()
    assert directives(script)[:7] == [
        "--job-name=seatrial-job-0",
        "--comment=seatrial:b-1",
        "--output=/shared/jobs/b-1/job/logs/slurm.log",
        "--open-mode=append",
        "--time=60",
        "--signal=B:USR1@120",
        "--requeue",
    ]
    assert directives(script)[7:] == ["--nodes=1", "--ntasks-per-node=1", "--cpus-per-task=17", "--gres=gpu:8"]
    found = steps(script)
    assert set(found) == {"server.0", "server.1", "client.0"}
    assert "--exact --gres=gpu:4" in found["server.1"]
    assert "--overlap" not in found["server.1"]
    assert "--overlap --gres=none" in found["client.0"]
    assert "--kill-on-bad-exit=1" in script


def test_the_profile_is_in_the_script() -> None:
    profile = Profile(
        account="acct",
        partition="batch",
        qos="high",
        time="1-02:30:10",
        gres="gpu:h100",
        memory_mb=1000,
        sbatch=("--reservation=r",),
        srun=("--mpi=pmix",),
        containers={"vllm": "img:1"},
        mounts=("/data:/data",),
    )
    server = SERVER.model_copy(update={"container": "vllm", "mounts": ("/m:/m:ro",)})
    script = text(server, CLIENT, profile=profile)
    lines = directives(script)
    assert {"--account=acct", "--partition=batch", "--qos=high", "--time=1591", "--reservation=r", "--mem=1000M", "--gres=gpu:h100:8"} < {
        *lines
    }
    found = steps(script)
    assert (
        "--container-image=img:1 --container-mounts=/data:/data,/m:/m:ro,/shared/jobs/b-1:/shared/jobs/b-1 --mpi=pmix" in found["server.0"]
    )
    assert "--container" not in found["client.0"]


def test_groups_become_a_heterogeneous_job() -> None:
    script = text(SERVER.model_copy(update={"group": "gpu"}), CLIENT.model_copy(update={"group": "cpu"}))
    assert "hetjob" in directives(script)
    found = steps(script)
    assert found["server.0"].startswith("--het-group=0 ")
    assert found["client.0"].startswith("--het-group=1 ")
    assert "SEATRIAL_BIND=0.0.0.0" in script


def test_a_job_on_one_node_listens_on_loopback() -> None:
    assert "SEATRIAL_BIND=127.0.0.1" in text()


def test_an_array_has_one_log_per_unit() -> None:
    script = text(array=300, parallel=20)
    assert "--array=0-299%20" in directives(script)
    assert "--output=/shared/jobs/b-1/job/logs/slurm-%a.log" in directives(script)


def test_a_path_with_spaces_is_quoted_and_a_percent_refused() -> None:
    assert '--output="/a b/job/logs/slurm.log"' in directives(text(batch=Path("/a b")))
    for bad in ("/a%j", '/a"b'):
        with pytest.raises(UserError, match="batch directory"):
            text(batch=Path(bad))


def test_the_comment_is_one_word_whatever_the_directory_is_called() -> None:
    assert comment(Path("/x/a b$c")) == "seatrial:a_b_c"


def test_an_unknown_container_lists_the_known_ones() -> None:
    job = Job(name="job", components=(CLIENT.model_copy(update={"command": ("true",), "container": "vlm"}),))
    with pytest.raises(UserError, match=r"component client: the profile knows no container 'vlm'; known: sglang, vllm"):
        resolve(job, Profile(containers={"vllm": "a", "sglang": "b"}))


def test_a_literal_image_needs_its_own_key() -> None:
    job = Job(name="job", components=(CLIENT.model_copy(update={"command": ("true",), "image": "docker://x"}),))
    assert resolve(job, Profile(mounts=("/a:/a",))).client.image == "docker://x"


def test_mounts_without_a_container_are_refused() -> None:
    job = Job(name="job", components=(CLIENT.model_copy(update={"command": ("true",), "mounts": ("/a:/a",)}),))
    with pytest.raises(UserError, match="mounts without a container"):
        resolve(job, Profile())


def test_a_components_own_values_win() -> None:
    part = Component(name="client", role="client", command=("x",), environment={"A": "own"})
    found = resolve(Job(name="job", components=(part,), minutes=5), Profile(environment={"A": "profile", "B": "profile"}, time="2:00:00"))
    assert found.client.environment == {"A": "own", "B": "profile"}
    assert found.minutes == 5


@pytest.mark.parametrize(("clock", "minutes"), [("0:00:30", 1), ("1:00:00", 60), ("2-03:04:05", 3065), ("00:10:00", 10)])
def test_time_limits_are_rounded_up_to_minutes(clock: str, minutes: int) -> None:
    assert time_minutes(clock) == minutes
