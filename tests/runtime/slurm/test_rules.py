"""Every rule of the job script, on a real Slurm."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from seatrial.core.jobs import After, Component, Ending, Job, Profile, Ready
from seatrial.runtime.slurm import render
from tests.runtime.slurm.conftest import MakeCluster
from tests.runtime.slurm.harness import Slurm, client, processes_with, script, server, submit, until

pytestmark = pytest.mark.real

ENV = "import json, os; print(json.dumps(dict(os.environ)))"
"""A client that prints its environment."""


def variables(text: str) -> dict[str, str]:
    """What a program with `ENV` printed."""
    found: dict[str, str] = json.loads(next(line for line in text.splitlines() if line.startswith("{")))
    return found


@pytest.mark.parametrize("code", [0, 1, 3, 77, 128, 137, 255])
def test_the_client_decides_and_its_exit_code_is_exact(cluster: Slurm, tmp_path: Path, code: int) -> None:
    job = submit(cluster, Job(name="job", components=(client(*script(f"import os; os._exit({code})")),)), tmp_path)
    result = job.result()
    assert (result.ending, result.exit_code) == (Ending.CLIENT_FAILED if code else Ending.DONE, code)
    assert job.ended() == ("FAILED" if code else "COMPLETED")
    assert f"ExitCode={code}:0" in job.show()


def test_a_client_that_a_signal_killed_failed(cluster: Slurm, tmp_path: Path) -> None:
    job = submit(cluster, Job(name="job", components=(client(*script("import os; os.kill(os.getpid(), 9)")),)), tmp_path)
    assert (job.result().ending, job.result().exit_code) == (Ending.CLIENT_FAILED, 137)


@pytest.mark.parametrize("code", [0, 9])
def test_a_service_that_ends_first_fails_the_job_even_with_0(cluster: Slurm, tmp_path: Path, code: int) -> None:
    sandbox = Component(name="sandbox", command=script(f"import sys, time; time.sleep(1); sys.exit({code})"))
    job = submit(cluster, Job(name="job", components=(sandbox, client("sleep", "100"))), tmp_path)
    result = job.result()
    assert (result.ending, result.component, result.exit_code) == (Ending.SERVICE_ENDED, "sandbox.0", code)
    assert job.ended() == "FAILED"


def test_the_result_is_written_before_the_services_are_stopped(cluster: Slurm, tmp_path: Path) -> None:
    look = (
        "import os, signal, sys, time\n"
        "def stop(*_):\n"
        "    print('result seen:', os.path.exists(os.environ['SEATRIAL_JOB'] + '/results/0.json'), flush=True)\n"
        "    sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, stop)\n"
        "print('up', flush=True)\n"
        "time.sleep(100)\n"
    )
    service = Component(name="service", command=script(look))
    job = submit(cluster, Job(name="job", components=(service, client("sleep", "2"))), tmp_path)
    assert job.result().ending is Ending.DONE
    assert job.ended() == "COMPLETED"
    assert "result seen: True" in job.log("service")


def test_gpu_copies_own_their_gpus_and_the_rest_see_none(cluster: Slurm, tmp_path: Path) -> None:
    see = (
        "import os, time\n"
        "assert 'ROCR_VISIBLE_DEVICES' not in os.environ\n"
        "print('GPUs', os.environ.get('CUDA_VISIBLE_DEVICES'), flush=True)\n"
        "time.sleep(100)\n"
    )
    gpu = Component(name="gpu", command=script(see), replicas=2, gpus=4, cpus=2)
    plain = Component(name="plain", command=script(see))
    done = client(*script("import os, time; time.sleep(2); print('GPUs', os.environ.get('CUDA_VISIBLE_DEVICES'))"))
    job = submit(cluster, Job(name="job", components=(gpu, plain, done)), tmp_path)
    assert job.result().ending is Ending.DONE
    seen = {name: re.findall(r"GPUs (.*)", job.log(name)) for name in ("gpu.0", "gpu.1", "plain", "client")}
    assert sorted([*seen["gpu.0"], *seen["gpu.1"]]) == ["0,1,2,3", "4,5,6,7"]
    assert seen["plain"] == seen["client"] == ["None"]


def test_one_failed_task_ends_the_others_and_its_code_is_the_result(cluster: Slurm, tmp_path: Path) -> None:
    one_fails = "import os, sys, time; time.sleep(1 if os.environ['SEATRIAL_RANK'] == '1' else 60); sys.exit(7)"
    job = submit(cluster, Job(name="job", components=(client(*script(one_fails), tasks=3),)), tmp_path)
    assert (job.result(deadline_s=30).ending, job.result().exit_code) == (Ending.CLIENT_FAILED, 7)


def test_components_have_their_own_task_counts(cluster: Slurm, tmp_path: Path) -> None:
    service = Component(name="service", command=script("import time; print('task', flush=True); time.sleep(100)"), tasks=3)
    job = submit(cluster, Job(name="job", components=(service, client("sleep", "3"))), tmp_path)
    assert job.result().ending is Ending.DONE
    assert job.log("service").count("task\n") == 3


def test_ports_are_chosen_on_the_node_and_reach_the_client(cluster: Slurm, tmp_path: Path) -> None:
    ask = (
        "import os, urllib.request as r\n"
        "urls = os.environ['SEATRIAL_URLS_SERVER'].split(',')\n"
        "print(len(set(urls)), [r.urlopen(url, timeout=60).status for url in urls], flush=True)\n"
    )
    job = submit(cluster, Job(name="job", components=(server(replicas=4), client(*script(ask)))), tmp_path)
    assert job.result().ending is Ending.DONE, job.log()
    assert "4 [200, 200, 200, 200]" in job.log("client")
    assert all("127.0.0.1 " in (job.dir.endpoints(0) / f"server.{copy}").read_text() for copy in range(4))


def test_a_server_that_dies_while_it_is_awaited_is_noticed_at_once(cluster: Slurm, tmp_path: Path) -> None:
    dies = server(command=script("import sys, time; time.sleep(2); sys.exit(4)", "{port}"))
    job = submit(cluster, Job(name="job", components=(dies, client("true"))), tmp_path)
    result = job.result()
    assert (result.ending, result.component, result.exit_code) == (Ending.SERVICE_ENDED, "server.0", 4)
    assert result.ended - result.started <= 10
    assert "client.0 started" not in job.log()


def test_a_server_that_never_answers_ends_at_its_deadline_and_says_what_was_awaited(cluster: Slurm, tmp_path: Path) -> None:
    deaf = Component(name="server", command=("sleep", "100"), port=True, ready=Ready(path="/health", deadline_s=3))
    job = submit(cluster, Job(name="job", components=(deaf, client("true"))), tmp_path)
    result = job.result()
    assert (result.ending, result.component, result.exit_code) == (Ending.NOT_READY, "server.0", None)
    assert "not ready within 3 s: http://127.0.0.1:" in result.message
    assert "/health answered nothing" in result.message


def test_a_server_that_answers_500_is_not_ready(cluster: Slurm, tmp_path: Path) -> None:
    serve = (
        "import sys; from http.server import BaseHTTPRequestHandler as B, HTTPServer\n"
        "B.do_GET = lambda self: self.send_error(503)\n"
        "HTTPServer(('127.0.0.1', int(sys.argv[1])), B).serve_forever()\n"
    )
    broken = Component(name="server", command=script(serve, "{port}"), port=True, ready=Ready(path="/health", deadline_s=4))
    job = submit(cluster, Job(name="job", components=(broken, client("true"))), tmp_path)
    assert job.result().ending is Ending.NOT_READY
    assert "answered 503" in job.result().message


def test_a_heterogeneous_job_finds_its_servers_by_what_they_published(cluster: Slurm, tmp_path: Path) -> None:
    ask = (
        "import os, urllib.request as r\n"
        "print(r.urlopen(os.environ['SEATRIAL_URL_SERVER'], timeout=60).status, os.environ['SLURMD_NODENAME'])\n"
    )
    parts = (server(group="gpu", gpus=2), client(*script(ask), group="cpu"))
    job = submit(cluster, Job(name="job", components=parts), tmp_path)
    assert job.result().ending is Ending.DONE, job.log() + job.log("client") + job.log("server")
    assert re.search(r"200 n\d", job.log("client"))
    assert len(set(re.findall(r"BatchHost=(\w+)", job.show()))) == 2


def test_on_real_addresses_the_client_of_another_node_reaches_the_server_by_its_published_name(
    make_cluster: MakeCluster, tmp_path: Path
) -> None:
    cluster = make_cluster(nodes=2, gpus=0, pyxis=False, network="namespaces")
    ask = "import os, urllib.request as r; u = os.environ['SEATRIAL_URL_SERVER']; print(r.urlopen(u, timeout=60).status, u)"
    job = submit(cluster, Job(name="job", components=(server(group="a"), client(*script(ask), group="b"))), tmp_path)
    assert job.result().ending is Ending.DONE, job.log() + job.log("client")
    (host,) = re.findall(r"200 http://(n\d):", job.log("client"))
    assert set(re.findall(r"BatchHost=(\w+)", job.show())) == {"n1", "n2"}
    assert host in ("n1", "n2")


def test_a_component_that_spans_nodes_gets_the_allocation_and_the_dependency(cluster: Slurm, tmp_path: Path) -> None:
    first = submit(cluster, Job(name="first", components=(client("sleep", "2"),)), tmp_path)
    wide = Component(
        name="wide",
        command=script("import os, time; print('on', os.environ['SLURMD_NODENAME'], flush=True); time.sleep(100)"),
        nodes=2,
        tasks=2,
    )
    job = submit(cluster, Job(name="job", components=(wide, client("sleep", "3"))), tmp_path, options=(f"--dependency=afterok:{first.id}",))
    assert f"Dependency=afterok:{first.id}" in job.show()
    assert job.result().ending is Ending.DONE
    assert len(set(re.findall(r"on (n\d)", job.log("wide")))) == 2
    assert "NumNodes=2" in job.show()


def test_every_task_of_a_copy_knows_the_head_and_its_ports(cluster: Slurm, tmp_path: Path) -> None:
    tell = (
        "import os, time\n"
        "print('at', *(os.environ['SEATRIAL_' + name] for name in ('HEAD', 'PORT', 'HEAD_PORT')), flush=True)\n"
        "time.sleep(60)\n"
    )
    wide = Component(name="wide", command=script(tell), nodes=2, tasks=2, port=True)
    job = submit(cluster, Job(name="job", components=(wide, client("sleep", "3"))), tmp_path)
    assert job.result().ending is Ending.DONE
    told = re.findall(r"at (\S+ \d+ \d+)", job.log("wide"))
    assert len(told) == 2
    assert len(set(told)) == 1


def test_values_never_become_shell_text(cluster: Slurm, tmp_path: Path) -> None:
    nasty = """a'b"c $(touch /tmp/never) `id` \\ ;& é {port} {nothing}"""
    place = tmp_path / "a dir's"
    place.mkdir()
    echo = "import json, os, sys; print(json.dumps([os.environ['NASTY'], sys.argv[1], os.getcwd()]))"
    part = client(*script(echo, nasty), environment={"NASTY": nasty}, workdir=str(place), port=True)
    job = submit(cluster, Job(name="job", components=(part,)), tmp_path / "batch dir")
    assert job.result().ending is Ending.DONE, job.log()
    value, word, cwd = json.loads(next(line for line in job.log("client").splitlines() if line.startswith("[")))
    port = (job.dir.endpoints(0) / "client.0").read_text().split()[1]
    assert value == word == nasty.replace("{port}", port)
    assert cwd == str(place)


def test_containers_stand_on_the_steps_and_the_batch_is_mounted(cluster: Slurm, tmp_path: Path) -> None:
    profile = Profile(time="0:10:00", containers={"vllm": "nvcr.io#some/vllm:1"}, mounts=("/data:/data:ro",))
    part = client(*script(ENV), container="vllm", mounts=("/a:/b",))
    job = submit(cluster, Job(name="job", components=(part,)), tmp_path, profile)
    assert job.result().ending is Ending.DONE, job.log("client")
    found = variables(job.log("client"))
    assert found["FAKE_PYXIS_IMAGE"] == "nvcr.io#some/vllm:1"
    assert found["FAKE_PYXIS_MOUNTS"] == f"/data:/data:ro,/a:/b,{tmp_path}:{tmp_path}"
    assert not any(line.startswith("#SBATCH") and "--container" in line for line in job.dir.script.read_text().splitlines())


def test_a_done_unit_is_not_run_again(cluster: Slurm, tmp_path: Path) -> None:
    mark = tmp_path / "runs"
    job = Job(name="job", components=(client("bash", "-c", f"echo once >> {mark}"),))
    submit(cluster, job, tmp_path).ended()
    again = submit(cluster, job, tmp_path)
    assert again.ended() == "COMPLETED"
    assert mark.read_text() == "once\n"
    assert "done already" in again.log()


def test_a_failed_unit_is_run_again_and_the_old_result_is_kept(cluster: Slurm, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    job = Job(name="job", components=(client("test", "-e", str(gate)),))
    first = submit(cluster, job, tmp_path)
    assert first.ended() == "FAILED"
    gate.touch()
    second = submit(cluster, job, tmp_path)
    assert second.ended() == "COMPLETED"
    assert second.result().ending is Ending.DONE
    kept = list((second.dir.path / "results").glob("0.before-*.json"))
    assert len(kept) == 1
    assert json.loads(kept[0].read_text())["ending"] == "client-failed"


def test_units_of_an_array_have_their_own_index_log_and_result(cluster: Slurm, tmp_path: Path) -> None:
    part = client(*script("import sys; print('unit', sys.argv[1]); sys.exit(sys.argv[1] == '2')", "{index}"))
    job = submit(cluster, Job(name="job", components=(part,), array=4, parallel=2), tmp_path)
    results = [job.result(index) for index in range(4)]
    assert [result.exit_code for result in results] == [0, 0, 1, 0]
    assert [result.slurm for result in results] == [f"{job.id}_{index}" for index in range(4)]
    assert all(f"unit {index}" in (job.dir.path / f"logs/client.0-{index}.log").read_text() for index in range(4))


def test_a_merge_checks_its_inputs_itself(cluster: Slurm, tmp_path: Path) -> None:
    part = client(*script("import sys; sys.exit(sys.argv[1] == '1')", "{index}"))
    array = submit(cluster, Job(name="array", components=(part,), array=3), tmp_path)
    for index in range(3):
        array.result(index)
    merge = Job(name="merge", components=(client("touch", str(tmp_path / "merged")),), after=(After(job="array"),), settle_s=0)
    # Slurm takes a dependency on an id that it does not know for satisfied.
    job = submit(cluster, merge, tmp_path, options=("--dependency=afterok:999999",), units={"array": 3})
    result = job.result()
    assert (result.ending, result.component) == (Ending.INPUTS_MISSING, "array")
    assert result.message == "not done: 1"
    assert job.ended() == "FAILED"
    assert not (tmp_path / "merged").exists()


def test_a_merge_that_can_never_run_is_cancelled_not_left_pending(cluster: Slurm, tmp_path: Path) -> None:
    failed = submit(cluster, Job(name="array", components=(client("false"),)), tmp_path)
    merge = Job(name="merge", components=(client("true"),), after=(After(job="array"),))
    options = (f"--dependency=afterok:{failed.id}", "--kill-on-invalid-dep=yes")
    assert submit(cluster, merge, tmp_path, options=options, units={"array": 1}).ended() == "CANCELLED"


def test_cancelled_is_stopped_and_leaves_no_process(cluster: Slurm, tmp_path: Path) -> None:
    service = Component(name="service", command=("sleep", "31415926"))
    job = submit(cluster, Job(name="job", components=(service, client("sleep", "31415927"))), tmp_path)
    job.running()
    cluster.run("scancel", job.id)
    assert job.result().ending is Ending.STOPPED
    assert job.ended() == "CANCELLED"
    until(lambda: None if list(processes_with("3141592")) else True, "end of every process of the job", 20)


def test_an_older_bash_which_does_not_say_who_ended_gives_the_same(cluster: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.runtime.slurm import harness

    monkeypatch.setattr(harness, "render", lambda *words: render(*words).replace(">= 501", ">= 9999"))
    dies = Component(name="sandbox", command=script("import sys, time; time.sleep(1); sys.exit(0)"))
    failed = submit(cluster, Job(name="one", components=(dies, client("sleep", "60"))), tmp_path)
    done = submit(cluster, Job(name="two", components=(server(), client("sleep", "1"))), tmp_path)
    assert (failed.result().ending, failed.result().component) == (Ending.SERVICE_ENDED, "sandbox.0")
    assert done.result().ending is Ending.DONE, done.log()


def test_the_prolog_of_the_profile_runs_first(cluster: Slurm, tmp_path: Path) -> None:
    profile = Profile(time="0:10:00", prolog=("export FROM_PROLOG='a b'",), environment={"FROM_PROFILE": "c"}, srun=("--quiet",))
    job = submit(cluster, Job(name="job", components=(client(*script(ENV)),)), tmp_path, profile)
    assert job.result().ending is Ending.DONE
    found = variables(job.log("client"))
    assert (found["FROM_PROLOG"], found["FROM_PROFILE"]) == ("a b", "c")


def test_setup_lines_run_in_the_step_of_the_client_and_must_succeed(cluster: Slurm, tmp_path: Path) -> None:
    profile = Profile(time="0:10:00", setup=("export FROM_SETUP='a b' # it's", "echo $SLURM_STEP_ID > step"))
    job = submit(cluster, Job(name="job", components=(client(*script(ENV), workdir=str(tmp_path)),)), tmp_path, profile)
    assert job.result().ending is Ending.DONE, job.log()
    found = variables(job.log("client"))
    assert (found["FROM_SETUP"], found["SLURM_STEP_ID"]) == ("a b", (tmp_path / "step").read_text().strip())
    broken = profile.model_copy(update={"setup": ("false # no", "touch never")})
    job = submit(cluster, Job(name="two", components=(client("touch", "never", workdir=str(tmp_path)),)), tmp_path, broken)
    assert (job.result().ending, job.result().exit_code) == (Ending.CLIENT_FAILED, None), job.log()
    assert "setup of the profile failed with 1: false # no" in job.log("client")
    assert not (tmp_path / "never").exists()


def test_a_server_that_runs_elsewhere_is_awaited(cluster: Slurm, tmp_path: Path) -> None:
    parts = (server(), client("sleep", "20"))
    host = submit(cluster, Job(name="host", components=parts), tmp_path)
    host.running()
    address, port, _ = (host.dir.endpoints(0) / "server.0").read_text().split()
    url = f"http://{address}:{port}/"
    job = submit(cluster, Job(name="job", components=(client(*script(ENV)),), servers={"judge": url}), tmp_path)
    assert job.result().ending is Ending.DONE, job.log()
    assert "judge answers" in job.log() or "no curl here" in job.log()
    assert variables(job.log("client"))["SEATRIAL_URL_JUDGE"] == url
    cluster.run("scancel", host.id)
