"""Batches on this machine: order, arrays, what each component is given, GPUs, and what is refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from seatrial.core.errors import BlockedError, UserError
from seatrial.core.files import write_json
from seatrial.core.jobs import PLACEHOLDERS, After, Batch, Component, Ending, Job
from seatrial.core.verdict import Boundary
from seatrial.runtime.jobdir import job_dir, load
from seatrial.runtime.local_jobs import gpus_here, run_batch
from tests.runtime.small_jobs import ALMOST_A_MINUTE, FETCH, Clock, client, left_behind, log, python, run_jobs, run_one, server, shell

pytestmark = pytest.mark.slow  # processes that are waited for; `make check` has two minutes

SHOW = """
import json, os, sys
print(json.dumps([sys.argv[1:], {k: v for k, v in os.environ.items() if k.startswith(('SEATRIAL_', 'CUDA', 'MY'))}]), flush=True)
"""
STAY = SHOW + "import time; time.sleep(60)"
WAIT = (
    SHOW
    + """
import time
for name in sys.argv[1:]:
    path = os.environ['SEATRIAL_JOB'] + '/logs/' + name + '.log'
    while not os.path.exists(path) or not os.path.getsize(path):
        time.sleep(0.05)
"""
)


def shown(tmp_path: Path, name: str, job: str = "job") -> tuple[list[str], dict[str, str]]:
    """Arguments and variables that a component printed."""
    words, variables = json.loads(log(tmp_path, name, job)[0])
    return words, variables


def test_results_without_a_batch_never_count(tmp_path: Path) -> None:
    run_one(tmp_path, client("exit 0"))
    (tmp_path / "batch.json").unlink()
    with pytest.raises(UserError, match="job: holds results, and no batch"):
        run_one(tmp_path, client("exit 1"))


def test_jobs_in_order_and_inputs_checked(tmp_path: Path) -> None:
    first = Job(name="first", components=(client('[ "$SEATRIAL_INDEX" != 1 ]'),), array=3)
    jobs = (
        first,
        Job(name="merge", components=(client("exit 0"),), after=(After(job="first"),), array=2),
        Job(name="clean", components=(client("exit 0"),), after=(After(job="first", when="any"),)),
        Job(name="last", components=(client("exit 0"),), after=(After(job="merge"), After(job="clean"))),
    )
    results = run_jobs(tmp_path, *jobs)
    assert [(result.job, result.index, result.ending) for result in results] == [
        ("first", 0, Ending.DONE),
        ("first", 1, Ending.CLIENT_FAILED),
        ("first", 2, Ending.DONE),
        ("merge", 0, Ending.INPUTS_MISSING),
        ("merge", 1, Ending.INPUTS_MISSING),
        ("clean", 0, Ending.DONE),
        ("last", 0, Ending.INPUTS_MISSING),
    ]
    assert (results[3].component, results[3].message) == ("first", "1 of 3 units of job first are not done: 1")
    assert not list((tmp_path / "merge").glob("logs/*"))


def test_what_is_done_is_not_run_again_and_the_rest_is(tmp_path: Path) -> None:
    work = Job(name="job", components=(client('echo ran; [ "$SEATRIAL_INDEX" = 0 ] || [ -e "$SEATRIAL_JOB/fixed" ]'),), array=2)
    after = Job(name="merge", components=(client("exit 0"),), after=(After(job="job"),))
    before = run_jobs(tmp_path, work, after)
    assert [result.ending for result in before] == [Ending.DONE, Ending.CLIENT_FAILED, Ending.INPUTS_MISSING]
    (tmp_path / "job/fixed").touch()
    results = run_jobs(tmp_path, work, after)
    assert [result.ending for result in results] == [Ending.DONE] * 3
    assert results[0] == before[0]
    assert log(tmp_path, "client.0-0") == ["ran"]
    assert log(tmp_path, "client.0-1") == ["ran", "ran"]
    assert len(list((tmp_path / "job/results").glob("1.before-local-*.json"))) == 1


def test_results_of_another_batch_do_not_count(tmp_path: Path) -> None:
    run_one(tmp_path, client("exit 0"))
    assert load(tmp_path).jobs[0].name == "job"
    with pytest.raises(UserError, match=r"batch\.json: another batch was run here"):
        run_one(tmp_path, client("exit 1"))


def test_a_torn_result_never_counts(tmp_path: Path) -> None:
    file = job_dir(tmp_path, "job").result_file(0)
    file.parent.mkdir(parents=True)
    file.write_text('{"ending": "done"')
    with pytest.raises(UserError, match=r"0\.json"):
        run_one(tmp_path, client("exit 0"))


def test_units_at_a_time(tmp_path: Path) -> None:
    meet = 'touch "$SEATRIAL_JOB/here-$SEATRIAL_INDEX"; until [ $(ls "$SEATRIAL_JOB" | grep -c here-) -ge 3 ]; do sleep 0.05; done'
    results = run_jobs(tmp_path, Job(name="job", components=(server(), client(meet)), array=3, parallel=3))
    assert [(result.index, result.ending) for result in results] == [(index, Ending.DONE) for index in range(3)]
    ports = {(tmp_path / f"job/endpoints/{index}/server.0").read_text() for index in range(3)}
    assert len(ports) == 3


def test_units_one_after_another(tmp_path: Path) -> None:
    alone = 'mkdir "$SEATRIAL_JOB/busy" && sleep 0.2 && rmdir "$SEATRIAL_JOB/busy"'
    results = run_jobs(tmp_path, Job(name="job", components=(client(alone),), array=3))
    assert [result.ending for result in results] == [Ending.DONE] * 3


@pytest.mark.slow
def test_many_small_units_at_a_time(tmp_path: Path) -> None:
    results = run_jobs(tmp_path, Job(name="job", components=(shell("s", "sleep 600"), client("exit 0")), array=24, parallel=6))
    assert {result.ending for result in results} == {Ending.DONE}


def test_an_error_in_one_unit_ends_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, value: object) -> None:
        if path.name == "1.json":
            raise BlockedError(boundary=Boundary.ENVIRONMENT, message=f"{path}: cannot write: No space left on device")
        write_json(path, value)

    monkeypatch.setattr("seatrial.runtime.local_jobs.write_json", full)
    command = ("bash", "-c", "exec sleep $((60 * (1 - {index})))")
    job = Job(name="job", components=(Component(name="client", command=command, role="client"),), array=3, parallel=2)
    with Clock() as clock, pytest.raises(BlockedError, match="No space left"):
        run_batch(Batch(jobs=(job,)), tmp_path / "batch", lambda _: None)
    assert clock.seconds < ALMOST_A_MINUTE
    assert left_behind(tmp_path) == []
    stored = job_dir(tmp_path / "batch", "job").result(0)
    assert stored is not None
    assert (stored.ending, stored.message) == (Ending.STOPPED, "another unit could not be run")
    assert job_dir(tmp_path / "batch", "job").result(2) is None


def test_what_every_component_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEATRIAL_URL_OUTER", "http://outer")
    monkeypatch.setenv("SEATRIAL_PORT", "1")
    monkeypatch.setenv("MY_OWN", "kept")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "left alone")
    portless = [name for name in PLACEHOLDERS if name not in ("port", "head", "head_port")]
    words = ["{" + name + "}" for name in portless] + ["{url:my-server}", "{urls:my-server}", "x{copy}y", "$HOME;{other}", ""]
    show = python("client", SHOW, *words, role="client", environment={"MY_URL": "{url:my-server}/v1", "MY_INDEX": "{index}"})
    job = Job(name="job", components=(server("my-server", replicas=2), show), array=2)
    run_jobs(tmp_path, job)
    for index in (0, 1):
        argv, variables = shown(tmp_path, f"client.0-{index}")
        published = [(tmp_path / f"job/endpoints/{index}/my-server.{copy}").read_text().split() for copy in (0, 1)]
        assert len({port for _, *ports in published for port in ports}) == 4
        urls = [f"http://{host}:{port}" for host, port, _ in published]
        assert urls[0].startswith("http://127.0.0.1:")
        values = ["127.0.0.1", "0", "0", str(index), str(tmp_path / "job")]
        assert argv == [*values, urls[0], ",".join(urls), "x0y", "$HOME;{other}", ""]
        assert {PLACEHOLDERS[name]: value for name, value in zip(portless, values, strict=True)}.items() <= variables.items()
        assert variables["SEATRIAL_PORT"] == variables["SEATRIAL_HEAD"] == ""
        assert (variables["SEATRIAL_URL_MY_SERVER"], variables["SEATRIAL_URLS_MY_SERVER"]) == (urls[0], ",".join(urls))
        assert (variables["MY_URL"], variables["MY_INDEX"], variables["MY_OWN"]) == (f"{urls[0]}/v1", str(index), "kept")
        assert "SEATRIAL_URL_OUTER" not in variables
        assert variables["CUDA_VISIBLE_DEVICES"] == "left alone"


def test_services_know_each_other_and_their_own_ports(tmp_path: Path) -> None:
    router = python("router", STAY, "{port}", "{head}", "{head_port}", "{urls:server}", port=True)
    run_one(tmp_path, router, server(replicas=2), python("client", WAIT, "router.0", role="client"))
    argv, variables = shown(tmp_path, "router.0")
    host, port, head_port = (tmp_path / "job/endpoints/0/router.0").read_text().split()
    assert argv == [port, host, head_port, variables["SEATRIAL_URLS_SERVER"]]
    assert variables["SEATRIAL_URL_ROUTER"] == f"http://{host}:{port}"


def test_old_endpoints_are_gone(tmp_path: Path) -> None:
    old = tmp_path / "job/endpoints/0/server.7"
    old.parent.mkdir(parents=True)
    old.write_text("127.0.0.1 1 2")
    run_one(tmp_path, server(), client("exit 0"))
    assert [path.name for path in old.parent.iterdir()] == ["server.0"]


def test_a_server_that_runs_elsewhere(tmp_path: Path) -> None:
    use = python("client", FETCH, "{url:elsewhere}", role="client")
    inner = Job(name="inner", components=(use,), servers={"elsewhere": "http://127.0.0.1:9/v1"})
    outer = tmp_path / "outer"
    (tmp_path / "batch.json").write_text(json.dumps({"jobs": [inner.model_dump(mode="json")]}))
    start = python(
        "client",
        "import sys; sys.path[:0] = sys.argv[4:]\nfrom pathlib import Path\nfrom seatrial.core.jobs import Batch\n"
        "from seatrial.runtime.local_jobs import run_batch\n"
        "text = Path(sys.argv[1]).read_text().replace('http://127.0.0.1:9/v1', sys.argv[2])\n"
        "sys.exit(run_batch(Batch.model_validate_json(text), Path(sys.argv[3]), print)[0].ending != 'done')",
        *(str(tmp_path / "batch.json"), "{url:server}", str(tmp_path / "within"), *filter(None, sys.path)),
        role="client",
    )
    result = run_one(outer, server(), start)
    assert result.ending is Ending.DONE, log(outer, "client.0")
    assert log(tmp_path / "within", "client.0", "inner") == ["0"]


def test_a_server_elsewhere_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("seatrial.runtime.local_jobs._FOREIGN_S", 0.5)
    result = run_one(tmp_path, client("exit 0"), servers={"judge": "http://127.0.0.1:9/v1"})
    assert (result.ending, result.component) == (Ending.NOT_READY, "judge")
    assert result.message == "not ready within 0.5 s: judge: http://127.0.0.1:9/v1/models refused the connection"


@pytest.mark.parametrize(
    ("value", "expected"),
    [("0,1", ("0", "1")), ("GPU-a, GPU-b", ("GPU-a", "GPU-b")), ("", ()), ("-1", ()), ("2,-1,3", ("2",)), ("3", ("3",))],
)
def test_gpus_that_the_environment_names(tmp_path: Path, value: str, expected: tuple[str, ...]) -> None:
    (tmp_path / "nvidia0").touch()
    assert gpus_here({"CUDA_VISIBLE_DEVICES": value}, tmp_path) == expected


def test_gpus_that_the_machine_has(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia10", "nvidia2", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert gpus_here({}, tmp_path) == ("0", "2", "10")


def test_every_copy_has_its_own_gpus_and_the_others_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,5,4,2,1,0")
    service = python("server", STAY, replicas=2, gpus=2, group="a", per_node=1)
    waits = python("client", WAIT, "server.0", "server.1", "plain.0", role="client", gpus=1, group="b")
    run_one(tmp_path, service, python("plain", STAY), waits)
    names = ("server.0", "server.1", "plain.0", "client.0")
    assert [shown(tmp_path, name)[1]["CUDA_VISIBLE_DEVICES"] for name in names] == ["7,5", "4,2", "", "1"]


def test_simultaneous_units_have_their_own_gpus_and_wait_for_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4")
    alone = 'mkdir "$SEATRIAL_JOB/gpus-$CUDA_VISIBLE_DEVICES" && sleep 0.3 && rmdir "$SEATRIAL_JOB/gpus-$CUDA_VISIBLE_DEVICES"'
    results = run_jobs(tmp_path, Job(name="job", components=(client(alone, gpus=2),), array=5, parallel=5))
    assert {result.ending for result in results} == {Ending.DONE}


def test_too_few_gpus_block_before_anything_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    fine = Job(name="fine", components=(client("exit 0"),))
    greedy = Job(name="greedy", components=(shell("s", "sleep 9", gpus=1, replicas=2), client("exit 0")))
    with pytest.raises(BlockedError, match=r"job greedy needs 2 GPUs, and there are 1 on this machine \(CUDA_VISIBLE_DEVICES=0\)"):
        run_jobs(tmp_path, fine, greedy)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("component", "job", "message"),
    [
        ({"container": "vllm"}, {}, "job work, component client: container = vllm: containers are not run on this machine"),
        ({"image": "a/b:1"}, {}, "component client: image = a/b:1"),
        ({"nodes": 2, "tasks": 2}, {}, "component client: nodes = 2: this is one machine"),
        ({}, {"after_ids": ("12",)}, "job work: after_ids = 12"),
    ],
)
def test_what_only_a_cluster_can_do_is_refused(tmp_path: Path, component: dict[str, Any], job: dict[str, Any], message: str) -> None:
    fine = Job(name="fine", components=(client("exit 0"),))
    with pytest.raises(UserError, match=message) as raised:
        run_jobs(tmp_path, fine, Job(name="work", components=(client("exit 0", **component),), **job))
    assert raised.value.fix
    assert list(tmp_path.iterdir()) == []
