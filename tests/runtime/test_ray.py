"""Ray around a client: the words, the exact exit code, what must never look like success, and what every node imports."""

from __future__ import annotations

import ast
import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from seatrial.core.errors import UserError
from seatrial.core.files import read_model
from seatrial.core.jobs import Component, Ending, Job, Profile, Result
from seatrial.runtime.ray import STEP, check_nodes, launcher_call, ray_job, ray_sub, with_ray
from seatrial.runtime.servers import free_port
from seatrial.runtime.staged import PROGRAMS, ray_step, stage
from tests.runtime.children import wait_until
from tests.runtime.rays import NEW_PIDS, environment, instruments, leftovers, need_namespaces

pytestmark = pytest.mark.slow

PROGRAM = Path(ray_step.__file__)
CLIENT = Component(name="client", role="client", command=("train", "--steps", "{index}"), gpus=4)

FAKE = """#!{python}
import os, subprocess, sys
words = sys.argv[1:]
if words[0] != "symmetric-run":
    sys.exit(0)
open("asked", "w").write(" ".join(words))
{body}
"""
RUNS = "sys.exit(subprocess.run(words[words.index('--') + 1 :]).returncode)"


def fake_ray(tmp_path: Path, body: str = RUNS) -> Path:
    """Something that behaves as `ray` does, in one respect."""
    path = tmp_path / "bin" / "ray"
    path.parent.mkdir(exist_ok=True)
    path.write_text(FAKE.format(python=sys.executable, body=body))
    path.chmod(0o755)
    return path


def argv(ray: Path, *client: str, rank: int = 0, nodes: int = 1, address: str = "127.0.0.1:6379") -> list[str]:
    place = ["--rank", str(rank), "--nodes", str(nodes), "--address", address, "--state", "state", "--ray", str(ray)]
    return [sys.executable, "-I", str(PROGRAM), "nodes", *place, "--", *client]


def run(tmp_path: Path, command: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("SLURM")}
    return subprocess.run(command, cwd=tmp_path, env={**inherited, **variables}, capture_output=True, text=True, check=False, timeout=60)


def python(code: str) -> tuple[str, ...]:
    return sys.executable, "-c", code


def test_the_client_inside_ray_spans_the_nodes() -> None:
    wrapped = with_ray(CLIENT, 3, ray="/env/bin/ray", options=("--num-cpus=8",))
    assert (wrapped.nodes, wrapped.tasks, wrapped.port, wrapped.gpus) == (3, 3, True, 4)
    cut = wrapped.command.index("--")
    assert wrapped.command[cut + 1 :] == CLIENT.command
    before = wrapped.command[:cut]
    assert before[:3] == ("python3", "{job}/ray_step.py", "nodes")
    assert "{head}:{head_port}" in before
    assert {"--option=--num-cpus=8", "--option=--num-gpus=4"} <= set(before)


def test_a_ray_job_is_exclusive_and_stages_its_program(tmp_path: Path) -> None:
    service = Component(name="sandbox", command=("serve",), port=True)
    job = ray_job(Job(name="train", components=(service, CLIENT)), 2)
    assert job.exclusive
    assert job.components[0] == service
    assert job.client.nodes == 2
    assert stage(job, tmp_path) == (tmp_path / STEP,)


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_run_on_an_old_python(name: str) -> None:
    ast.parse((PROGRAM.parent / name).read_text(encoding="utf-8"), feature_version=(3, 8))


@pytest.mark.parametrize(("code", "seen"), [("import sys; sys.exit(5)", 5), ("pass", 0), ("import os; os.kill(os.getpid(), 9)", 137)])
def test_the_exit_code_is_the_clients(tmp_path: Path, code: str, seen: int) -> None:
    assert run(tmp_path, argv(fake_ray(tmp_path), *python(code))).returncode == seen
    asked = (tmp_path / "asked").read_text()
    assert asked.startswith("symmetric-run --address 127.0.0.1:6379 --min-nodes 1 -- ")


def test_the_client_knows_the_cluster(tmp_path: Path) -> None:
    done = run(tmp_path, argv(fake_ray(tmp_path), *python("import os; print(os.environ['RAY_ADDRESS'])")))
    assert "127.0.0.1:6379" in done.stdout


@pytest.mark.parametrize("code", [0, 1, 7])
def test_a_ray_that_never_ran_the_client_is_no_success(tmp_path: Path, code: int) -> None:
    done = run(tmp_path, argv(fake_ray(tmp_path, f"sys.exit({code})"), *python("pass")))
    assert done.returncode == 99
    assert "the client never started" in done.stderr


def test_a_ray_that_lost_the_client_is_no_success(tmp_path: Path) -> None:
    until = "import time\nwhile not os.path.exists('up'): time.sleep(0.02)\n"
    body = f"child = subprocess.Popen(words[words.index('--') + 1 :])\n{until}child.kill()\nsys.exit(0)"
    done = run(tmp_path, argv(fake_ray(tmp_path, body), *python("import time; open('up', 'w'); time.sleep(1)")))
    assert done.returncode == 99
    assert "did not end by itself" in done.stderr


def test_what_an_earlier_attempt_left_does_not_count(tmp_path: Path) -> None:
    command = argv(fake_ray(tmp_path), *python("pass"))
    assert run(tmp_path, command, SLURM_JOB_ID="7").returncode == 0
    fake_ray(tmp_path, "sys.exit(0)")
    assert run(tmp_path, command, SLURM_JOB_ID="7", SLURM_RESTART_COUNT="1").returncode == 99
    assert run(tmp_path, command, SLURM_JOB_ID="7").returncode == 99, "ids come again when a controller lost its state"


def test_no_ray_at_all(tmp_path: Path) -> None:
    done = run(tmp_path, argv(tmp_path / "no-ray", *python("pass")), SLURM_JOB_ID=f"no{os.getpid()}")
    assert done.returncode == 99
    assert not Path(f"/tmp/ray-no{os.getpid()}-0").exists()
    assert "Ray cannot be started" in done.stderr


@pytest.mark.parametrize(
    ("address", "why"), [("127.0.0.1:1", "which other nodes cannot reach"), ("no.such.host.invalid:1", "cannot be resolved")]
)
def test_a_head_that_others_cannot_reach_is_refused(tmp_path: Path, address: str, why: str) -> None:
    done = run(tmp_path, argv(fake_ray(tmp_path), *python("pass"), nodes=2, address=address))
    assert done.returncode == 99
    assert why in done.stderr


def test_another_node_ends_well_when_the_client_has_ended(tmp_path: Path) -> None:
    (tmp_path / "state" / "7-0").mkdir(parents=True)
    (tmp_path / "state" / "7-0" / "code").write_text("5")
    done = run(tmp_path, argv(fake_ray(tmp_path, "sys.exit(0)"), "x", rank=1), SLURM_JOB_ID="7")
    assert (done.returncode, done.stderr) == (0, "")


def test_another_node_that_loses_ray_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quick = tmp_path / "quick.py"
    quick.write_text(PROGRAM.read_text().replace("_GRACE_S = 30.0", "_GRACE_S = 0.5"))
    command = argv(fake_ray(tmp_path, "sys.exit(0)"), "x", rank=1)
    command[2] = str(quick)
    done = run(tmp_path, command, SLURM_JOB_ID="7")
    assert done.returncode == 99
    assert "the cluster is not whole any more" in done.stderr


def test_a_signal_reaches_the_client_and_not_ray(tmp_path: Path) -> None:
    code = "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(43)); open('ready', 'w'); time.sleep(60)"
    process = subprocess.Popen(argv(fake_ray(tmp_path), *python(code)), cwd=tmp_path)
    try:
        wait_until((tmp_path / "ready").exists, "the client is up")
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 43
    finally:
        process.kill()
        process.wait()


# ---- the loop's own launcher ---------------------------------------------------------------------------------------------


PROFILE = Profile(account="acc", partition="batch", time="2:00:00", sbatch=("--reservation=x",))


@pytest.fixture
def launcher(tmp_path: Path) -> str:
    script = tmp_path / "RL" / "ray.sub"
    script.parent.mkdir()
    script.write_text("#!/bin/bash\n")
    return str(script)


def launched(*command: str, **values: Any) -> Job:
    return Job(name="grpo", components=(Component(name="client", role="client", command=command, **values),), launcher="ray.sub")


def test_a_launcher_script_is_submitted_unchanged(tmp_path: Path, launcher: str) -> None:
    job = launched("uv", "run", "it's.py", "--out", "{job}/x", image="/c.sqsh", mounts=("/a:/b",), nodes=2, tasks=2, environment={"A": "1"})
    sub = ray_sub(job.model_copy(update={"launcher": launcher}), PROFILE, tmp_path / "job", "grpo-1a2b")
    assert (sub.script, sub.cwd) == (launcher, str(tmp_path / "RL"))
    assert {"--exclusive", "--dependency=singleton", "--nodes=2", "--account=acc", "--partition=batch", "--time=2:00:00"} <= set(
        sub.options
    )
    assert {"--job-name=grpo-1a2b", "--gres=gpu:8", "--reservation=x"} <= set(sub.options)
    environment = sub.environment
    assert environment["CONTAINER"] == "/c.sqsh"
    assert environment["MOUNTS"] == f"/a:/b,{tmp_path}/job:{tmp_path}/job,{tmp_path}/RL:{tmp_path}/RL"
    assert (environment["GPUS_PER_NODE"], environment["A"], environment["BASE_LOG_DIR"]) == ("8", "1", f"{tmp_path}/job/logs")
    words = shlex.split(environment["COMMAND"])
    assert words[words.index("--") + 1 :] == ["uv", "run", "it's.py", "--out", f"{tmp_path}/job/x"]
    call = launcher_call(sub)
    assert subprocess.run(["bash", "-n"], input=call, text=True, check=False).returncode == 0
    assert call.endswith(f"{launcher}\n")


@pytest.mark.parametrize(
    ("job", "changes", "why"),
    [
        (launched("x"), {}, "needs an image"),
        (launched("x", image="a b"), {}, "needs an image without spaces"),
        (launched("x", "{port}", image="/i", port=True), {}, "gives its client no port"),
        (launched("x", image="/i"), {"account": None}, "needs account in the profile"),
        (launched("x", image="/i"), {"gpus_per_node": 0}, "counts GPUs"),
        (launched("x", image="/i", workdir="/no/such"), {}, "/no/such is not there"),
        (launched("x", image="/i", workdir="/a b"), {}, "/a b: the launcher script cannot cope"),
        (launched("x", image="/i").model_copy(update={"array": 2}), {}, "no array"),
    ],
)
def test_what_a_launcher_script_cannot_do_is_refused(tmp_path: Path, launcher: str, job: Job, changes: dict[str, Any], why: str) -> None:
    with pytest.raises(UserError, match=why):
        ray_sub(job.model_copy(update={"launcher": launcher}), PROFILE.model_copy(update=changes), tmp_path, "n")


def test_a_directory_that_a_launcher_would_tear_apart_is_refused(tmp_path: Path, launcher: str) -> None:
    job = launched("x", image="/i").model_copy(update={"launcher": launcher})
    with pytest.raises(UserError, match="a b: the launcher script cannot cope"):
        ray_sub(job, PROFILE, tmp_path / "a b", "n")


def test_the_directory_of_the_submission_is_in_the_container_once(tmp_path: Path, launcher: str) -> None:
    job = launched("x", image="/i", mounts=(f"{tmp_path}:{tmp_path}:ro",), memory_mb=64)
    sub = ray_sub(job.model_copy(update={"launcher": launcher}), PROFILE, tmp_path / "job", "n")
    assert sub.environment["MOUNTS"] == f"{tmp_path}:{tmp_path}:ro,{tmp_path}/job:{tmp_path}/job"
    assert "--mem=64M" in sub.options


def test_a_launcher_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"/no/ray.sub is not there"):
        ray_sub(launched("x", image="/i").model_copy(update={"launcher": "/no/ray.sub"}), PROFILE, tmp_path, "n")


def drive(tmp_path: Path, launcher: str, code: str, logs: str = "123-logs", **image: str) -> tuple[int, Path]:
    """Run COMMAND as ray.sub does: from a file in its log directory, without Slurm's variables; those of the image win."""
    directory = tmp_path / "job"
    (directory / "results").mkdir(parents=True, exist_ok=True)
    (directory / STEP).write_bytes(PROGRAM.read_bytes())
    job = launched(*python(code), image="/i", environment={"WORD": "it's {index}"})
    sub = ray_sub(job.model_copy(update={"launcher": launcher}), PROFILE, directory, "n")
    script = directory / "logs" / logs / "driver_command.sh"
    script.parent.mkdir(parents=True, exist_ok=True)
    script.write_text(sub.environment["COMMAND"])
    argv = ["sh", "-c", 'exec bash "$0/driver_command.sh" >"$0/ray-driver.log" 2>&1', str(script.parent)]
    done = run(tmp_path, argv, **{**sub.environment, **image})
    return done.returncode, directory / "results" / "0.json"


@pytest.mark.parametrize(("code", "seen", "ending"), [("pass", 0, Ending.DONE), ("raise SystemExit(5)", 5, Ending.CLIENT_FAILED)])
def test_the_client_of_a_launcher_leaves_the_same_result(tmp_path: Path, launcher: str, code: str, seen: int, ending: Ending) -> None:
    returned, path = drive(tmp_path, launcher, code, "123-2-logs")
    assert returned == seen
    result = read_model(path, Result)
    assert (result.job, result.index, result.slurm, result.restart) == ("grpo", 0, "123", 2)
    assert (result.ending, result.exit_code, result.component) == (ending, seen, "client.0")


def test_the_client_of_a_launcher_has_its_own_variables_and_a_log_where_others_have_it(tmp_path: Path, launcher: str) -> None:
    drive(tmp_path, launcher, "print('one')", "9-logs")
    (tmp_path / "job" / "results" / "0.json").unlink()
    drive(tmp_path, launcher, "import os; print(os.environ['WORD'])", "9-1-logs", WORD="of the image")
    assert (tmp_path / "job" / "logs" / "client.0.log").read_text() == "it's 0\n"


@pytest.mark.parametrize(("other", "kept"), [("0,1", None), ("2", "2")])
def test_gpus_that_are_named_for_two_vendors_are_named_once(tmp_path: Path, launcher: str, other: str, kept: str | None) -> None:
    code = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'], os.environ.get('ROCR_VISIBLE_DEVICES'))"
    drive(tmp_path, launcher, code, CUDA_VISIBLE_DEVICES="0,1", ROCR_VISIBLE_DEVICES=other)
    assert (tmp_path / "job" / "logs" / "client.0.log").read_text() == f"0,1 {kept}\n", "what somebody chose is left to be judged"


def test_only_the_directory_of_the_driver_says_which_job_it_is(tmp_path: Path, launcher: str) -> None:
    returned, path = drive(tmp_path, launcher, "pass", "7-logs/8-1-logs")
    assert returned == 0
    assert (read_model(path, Result).slurm, read_model(path, Result).restart) == ("8", 1)


def test_a_unit_that_is_done_is_not_run_again(tmp_path: Path, launcher: str) -> None:
    assert drive(tmp_path, launcher, "pass")[0] == 0
    returned, path = drive(tmp_path, launcher, "raise SystemExit(5)")
    assert returned == 0
    assert read_model(path, Result).ending is Ending.DONE


def test_a_launcher_that_keeps_its_logs_elsewhere_is_no_success(tmp_path: Path, launcher: str) -> None:
    returned, path = drive(tmp_path, launcher, "pass", "elsewhere")
    assert returned == 99
    assert not path.exists()


# ---- what every node imports -----------------------------------------------------------------------------------------------


def node(number: int, file: str | None = "/co/pkg/__init__.py", ok: bool = True, **changes: Any) -> dict[str, Any]:
    row = {"package": "pkg", "file": file, "expected": "/co", "ok": ok}
    return {"node_id": f"{number:056x}", "host": f"n{number}", "error": "", "python_version": "3.12.1", "imports": [row], **changes}


def problems(*nodes: dict[str, Any], expected: int = 2) -> str:
    return "\n".join(finding.message for finding in check_nodes({"nodes": list(nodes)}, expected, {"pkg": "/co"}) if not finding.ok)


def test_nodes_that_agree_are_well() -> None:
    assert problems(node(1), node(2)) == ""
    assert len(check_nodes({"nodes": [node(1), node(2)]}, 2, {"pkg": "/co"})) == 3


@pytest.mark.parametrize(
    ("nodes", "why"),
    [
        ([node(1)], "1 of 2 expected nodes"),
        ([node(1), node(2), node(3)], "3 of 2 expected nodes"),
        ([], "0 of 2 expected nodes"),
        ([node(1), node(2, error="no answer before the deadline", imports=[])], "n2 (00000000): no answer"),
        ([node(1), node(2, file="/site/pkg/__init__.py", ok=False)], "pkg from /site/pkg/__init__.py, expected from /co"),
        ([node(1), node(2, file=None, ok=False)], "cannot be imported"),
        ([node(1), node(2, imports=[])], "was not looked up"),
        ([node(1), node(2, python_version="3.11.7")], "Python differs"),
        ([node(1), node(2, imports=[{"package": "pkg", "file": "/x", "expected": None, "ok": True}])], "expected from /co"),
    ],
)
def test_a_node_that_differs_is_seen(nodes: list[dict[str, Any]], why: str) -> None:
    assert why in problems(*nodes)


def test_no_facts_are_no_success() -> None:
    assert not all(finding.ok for finding in check_nodes({}, 1, {}))


# ---- real Ray ----------------------------------------------------------------------------------------------------------------


CLUSTER = """
import json, os, subprocess, sys
from ray.cluster_utils import Cluster
paths, probe = json.loads(sys.argv[1]), sys.argv[2:]
cluster = None
for path in paths:
    os.environ["PYTHONPATH"] = path
    if cluster is None:
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    else:
        cluster.add_node(num_cpus=1)
cluster.wait_for_nodes()
os.environ["PYTHONPATH"] = os.environ["INSTRUMENTS"]
code = subprocess.run(probe, env={**os.environ, "RAY_ADDRESS": cluster.address}).returncode
cluster.shutdown()
sys.exit(code)
"""


def probe(tmp_path: Path, paths: list[Path], *options: str) -> tuple[int, dict[str, Any]]:
    """A real cluster with one node per path, and what the probe saw there."""
    need_namespaces()
    interpreter = environment().python
    out = tmp_path / "facts.json"
    for path in paths:
        (path / "fakepkg").mkdir(parents=True, exist_ok=True)
        (path / "fakepkg" / "__init__.py").write_text("")
    command = [str(interpreter), "-m", "seatrial.instruments.ray_nodes", "--out", str(out), "--nodes", "2", "--root", f"fakepkg={paths[0]}"]
    argv = [*NEW_PIDS, str(interpreter), "-c", CLUSTER, json.dumps([str(path) for path in paths]), *command, *options]
    variables = {"INSTRUMENTS": str(instruments(tmp_path / "instruments")), "RAY_TMPDIR": f"/tmp/ray-test-{os.getpid()}"}
    done = subprocess.run(argv, cwd=tmp_path, env={**os.environ, **variables}, capture_output=True, text=True, check=False, timeout=150)
    subprocess.run(["rm", "-rf", variables["RAY_TMPDIR"]], check=True)
    assert out.exists(), done.stdout + done.stderr
    return done.returncode, json.loads(out.read_text())


@pytest.mark.real
def test_a_real_node_with_another_path_is_found(tmp_path: Path) -> None:
    code, facts = probe(tmp_path, [tmp_path / "checkout", tmp_path / "stale"])
    assert code == 0
    wrong = [finding for finding in check_nodes(facts, 2, {"fakepkg": str(tmp_path / "checkout")}) if not finding.ok]
    assert len(wrong) == 1
    assert f"fakepkg from {tmp_path}/stale/fakepkg/__init__.py, expected from {tmp_path}/checkout" in wrong[0].message


@pytest.mark.real
def test_real_nodes_with_the_variables_of_training_agree(tmp_path: Path) -> None:
    paths = [tmp_path / "checkout", tmp_path / "stale"]
    code, facts = probe(tmp_path, paths, "--env", f"PYTHONPATH={paths[0]}")
    assert code == 0
    assert all(finding.ok for finding in check_nodes(facts, 2, {"fakepkg": str(paths[0])}))
    assert leftovers(f"ray-test-{os.getpid()}") == []


@pytest.mark.real
def test_a_real_node_that_is_missing_is_seen(tmp_path: Path) -> None:
    code, facts = probe(tmp_path, [tmp_path / "checkout"], "--deadline", "3")
    assert code == 1
    assert not check_nodes(facts, 2, {})[0].ok


@pytest.mark.real
@pytest.mark.parametrize(("client", "seen"), [("import ray; ray.init(); raise SystemExit(5)", 5), ("import ray; ray.init()", 0)])
def test_real_symmetric_run_keeps_the_exit_code_and_leaves_nothing(tmp_path: Path, client: str, seen: int) -> None:
    need_namespaces()
    interpreter = environment().python
    words = argv(interpreter.with_name("ray"), str(interpreter), "-c", client, address=f"127.0.0.1:{free_port()}")
    words[words.index("--") : words.index("--")] = ["--option=--num-cpus=1", "--option=--include-dashboard=false"]
    mark = f"ray-{os.getpid()}-0"
    done = run(tmp_path, [*NEW_PIDS, *words], SLURM_JOB_ID=str(os.getpid()))
    assert done.returncode == seen, done.stdout + done.stderr
    assert leftovers(mark) == []
    assert not Path("/tmp", mark).exists()
    assert (tmp_path / "state" / f"{os.getpid()}-0" / "logs-0").is_dir() == bool(seen)


@pytest.mark.real
def test_real_symmetric_run_calls_a_ray_that_cannot_start_a_success(tmp_path: Path) -> None:
    """And the step does not: the reason for the file with the client's exit code."""
    need_namespaces()
    interpreter = environment().python
    ray = str(interpreter.with_name("ray"))
    bad = ["symmetric-run", "--address", f"127.0.0.1:{free_port()}", "--no-such-option", "--"]
    path = {"PATH": f"{interpreter.parent}:{os.environ['PATH']}"}
    assert run(tmp_path, [*NEW_PIDS, ray, *bad, "false"], **path).returncode == 0
    words = argv(Path(ray), "false", address=f"127.0.0.1:{free_port()}")
    words.insert(words.index("--"), "--option=--no-such-option")
    done = run(tmp_path, [*NEW_PIDS, *words])
    assert done.returncode == 99
    assert "the client never started" in done.stderr


@pytest.mark.parametrize(
    ("variables", "file", "expected"),
    [({}, False, False), ({}, True, True), ({"RAY_AUTH_TOKEN": "t"}, False, True), ({"RAY_AUTH_TOKEN_PATH": "/t"}, False, True)],
)
def test_a_token_that_ray_start_would_take_is_seen(variables: dict[str, str], file: bool, expected: bool, tmp_path: Path) -> None:
    if file:
        (tmp_path / ".ray").mkdir()
        (tmp_path / ".ray" / "auth_token").write_text("t")
    assert ray_step.has_token({"HOME": str(tmp_path), **variables}) is expected
