"""Servers as components: the words that are run, the shapes that are refused, and values that would be ignored."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from seatrial.core.errors import UserError
from seatrial.core.jobs import Component, Job, fill
from seatrial.runtime.servers import Server, components, prehosted, url
from seatrial.runtime.staged import stage

VARIABLES = {
    "SEATRIAL_BIND": "0.0.0.0",
    "SEATRIAL_PORT": "8000",
    "SEATRIAL_HEAD": "n1",
    "SEATRIAL_HEAD_PORT": "9000",
    "SEATRIAL_JOB": "/job",
}


def vllm(**values: Any) -> Server:
    return Server.model_validate({"kind": "vllm", "model": "m/x", **values})


def words(server: Server, gpus_per_node: int = 8, rank: int = 0) -> list[str]:
    """What a node of the first copy really runs: through the shell, where there is one, with `vllm` replaced by an echo."""
    command = [fill(word, {**VARIABLES, "SEATRIAL_RANK": str(rank)}) for word in components(server, gpus_per_node)[0].command]
    if command[0] != "sh":
        return command
    echo = [sys.executable, "-c", "import json, sys; print(json.dumps(sys.argv[1:]))"]
    done = subprocess.run([*command[:6], *echo, *command[6:]], capture_output=True, text=True, check=True, timeout=30)
    found: list[str] = json.loads(done.stdout)
    return found


def refusal(**values: Any) -> str:
    with pytest.raises(ValidationError) as caught:
        Server.model_validate(values)
    return caught.value.errors()[0]["msg"]


def test_vllm_gets_only_what_was_asked_for() -> None:
    assert words(vllm()) == ["vllm", "serve", "m/x", "--host", "0.0.0.0", "--port", "8000"]
    [copy] = components(vllm(), 8)
    assert (copy.gpus, copy.nodes, copy.tasks, copy.port) == (1, 1, 1, True)
    assert copy.ready is not None
    assert copy.ready.path == "/health"


def test_vllm_parallel_sizes_make_the_gpus_of_one_copy() -> None:
    server = vllm(tensor_parallel=2, data_parallel=4, trust_remote_code=True, served_name="mine", arguments=("--max-model-len", "512"))
    sizes = ["--tensor-parallel-size", "2", "--data-parallel-size", "4"]
    assert words(server)[7:] == [*sizes, "--served-model-name", "mine", "--trust-remote-code", "--max-model-len", "512"]
    assert components(server, 8)[0].gpus == 8


def test_vllm_over_nodes_only_the_first_one_answers() -> None:
    server = vllm(tensor_parallel=8, pipeline_parallel=2)
    [copy] = components(server, 8)
    assert (copy.nodes, copy.tasks, copy.gpus) == (2, 2, 8)
    place = ["--master-addr", "n1", "--master-port", "9000"]
    assert words(server, rank=0)[-8:] == ["--nnodes", "2", "--node-rank", "0", *place]
    assert words(server, rank=1)[-9:] == ["--nnodes", "2", "--node-rank", "1", *place, "--headless"]


def test_vllm_data_parallel_over_nodes_counts_ranks_from_the_node() -> None:
    server = vllm(tensor_parallel=2, data_parallel=16)
    [copy] = components(server, 8)
    assert (copy.nodes, copy.gpus) == (4, 8)
    local = ["--data-parallel-size-local", "4", "--data-parallel-address", "n1", "--data-parallel-rpc-port", "9000"]
    assert words(server, rank=0)[-6:] == local
    assert words(server, rank=3)[-9:] == [*local, "--headless", "--data-parallel-start-rank", "12"]


def test_a_word_with_shell_in_it_stays_a_word() -> None:
    server = vllm(tensor_parallel=8, pipeline_parallel=2, served_name="$(touch /tmp/x); 'a b' \"c\"")
    assert "$(touch /tmp/x); 'a b' \"c\"" in words(server, rank=1)


@pytest.mark.parametrize(
    ("values", "gpus_per_node", "why"),
    [
        ({"tensor_parallel": 9}, 8, "cannot be spread evenly over 2 nodes"),
        ({"tensor_parallel": 8, "pipeline_parallel": 2, "data_parallel": 2}, 8, "would not lie on one node"),
        ({"tensor_parallel": 2, "data_parallel": 5}, 8, "would not lie on one node"),
        ({"kind": "sglang", "tensor_parallel": 4, "data_parallel": 4}, 8, "no data parallel over nodes"),
        ({}, 0, "needs GPUs"),
    ],
)
def test_shapes_without_an_honest_form_are_refused(values: dict[str, Any], gpus_per_node: int, why: str) -> None:
    with pytest.raises(UserError, match=why) as caught:
        components(vllm(**values), gpus_per_node)
    assert caught.value.fix


def test_sglang() -> None:
    server = Server(kind="sglang", model="m", tensor_parallel=8, pipeline_parallel=2)
    head = [
        "python3",
        "-m",
        "sglang.launch_server",
        "--model-path",
        "m",
        "--host",
        "0.0.0.0",
        "--port",
        "8000",
        "--tp-size",
        "8",
        "--pp-size",
        "2",
    ]
    assert words(server, rank=1) == [*head, "--nnodes", "2", "--node-rank", "1", "--dist-init-addr", "n1:9000"]


def test_sglang_ranks_that_share_gpus_are_not_counted_twice() -> None:
    server = Server(kind="sglang", model="m", tensor_parallel=8, data_parallel=8, arguments=("--enable-dp-attention",))
    [copy] = components(server, 8)
    assert (copy.nodes, copy.gpus) == (1, 8)


def test_any_command() -> None:
    server = Server(kind="command", command=("serve", "--at", "{bind}:{port}"), gpus=2, ready_path="/v1/models", deadline_s=60)
    [copy] = components(server, 8)
    assert (copy.command, copy.gpus) == (server.command, 2)
    assert copy.ready is not None
    assert (copy.ready.path, copy.ready.deadline_s) == ("/v1/models", 60)


def test_a_server_elsewhere_is_a_url_and_nothing_else() -> None:
    server = Server(name="judge", kind="url", url="http://10.0.0.1:8000/v1")
    assert components(server, 8) == ()
    assert prehosted([server, vllm()]) == {"judge": "http://10.0.0.1:8000/v1"}
    assert url(server) == "{url:judge}"


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"kind": "url", "url": "http://x", "model": "m"}, "no use for model"),
        ({"kind": "vllm", "model": "m", "url": "http://x"}, "no use for url"),
        ({"kind": "url", "url": "http://x", "container": "vllm"}, "no use for container"),
        ({"kind": "command", "command": ("a", "{port}"), "tensor_parallel": 2}, "no use for tensor_parallel"),
        ({"kind": "command", "command": ("a", "--port", "8000")}, "must take its port from {port}"),
        ({"kind": "vllm", "model": "m", "gpus": 4}, "no use for gpus"),
        ({"kind": "vllm"}, "needs model"),
        ({"kind": "url"}, "needs url"),
        ({"kind": "vllm", "model": "m", "route": True}, "there is one"),
        ({"kind": "tgi", "model": "m"}, "Input should be"),
        ({"kind": "vllm", "model": "m", "tensor_paralel": 2}, "Extra inputs"),
        ({"kind": "vllm", "model": "m", "environment": {"HF_TOKEN": "x"}}, "looks like a secret"),
    ],
)
def test_what_would_be_ignored_is_an_error(values: dict[str, Any], why: str) -> None:
    assert why in refusal(**values)


@pytest.mark.parametrize(
    "word",
    [
        *("--port", "--port=1", "--host", "-tp", "--tensor-parallel-size=4", "--tensor_parallel_size", "--tensor-par", "--tp", "--dp-size"),
        *("--trust-remote-code", "--headless", "--nnodes", "--served-model-name", "--model", "--data-parallel-rank", "-dpe"),
    ],
)
def test_an_argument_that_contradicts_is_an_error(word: str) -> None:
    assert "contradicts" in refusal(kind="vllm", model="m", arguments=(word, "1"))


def test_other_arguments_pass() -> None:
    kept = (
        "--max-model-len",
        "-1",
        "--model-impl",
        "auto",
        "--portable",
        "--data-parallel-backend",
        "mp",
        "--enable-expert-parallel",
        "--dtype=auto",
    )
    assert vllm(arguments=kept).arguments == kept


def test_a_secret_does_not_belong_into_a_script() -> None:
    assert "read by everybody" in refusal(kind="vllm", model="m", arguments=("--api-key", "abc"))


def test_replicas_without_a_router_have_no_single_address() -> None:
    with pytest.raises(UserError, match="no single address"):
        url(vllm(replicas=4))


def test_a_router_gives_replicas_one_address(tmp_path: Path) -> None:
    server = vllm(name="policy", replicas=4, route=True, container="vllm", mounts=("/models:/models",), deadline_s=77)
    copies, router = components(server, 8)
    assert (copies.replicas, router.replicas, router.gpus) == (4, 1, 0)
    assert (router.container, router.mounts) == ("vllm", ("/models:/models",))
    assert router.ready is not None
    assert router.ready.deadline_s == 77
    assert url(server) == "{url:policy}"
    job = Job(name="rollouts", components=(copies, router, Component(name="client", role="client", command=("ask", url(server)))))
    [written] = stage(job, tmp_path)
    assert written == tmp_path / "router.py"
    done = subprocess.run([sys.executable, "-I", str(written), "--help"], capture_output=True, text=True, check=True, timeout=30)
    assert "--backends" in done.stdout


def test_nothing_is_staged_for_a_job_that_needs_nothing(tmp_path: Path) -> None:
    job = Job(name="plain", components=(Component(name="client", role="client", command=("true",)),))
    assert stage(job, tmp_path) == ()
    assert list(tmp_path.iterdir()) == []
