"""Model servers as components of a job.

- `Server` says what is served and how wide; `components` makes the services of it, `url` what a client calls it by.
- One copy uses tensor x pipeline x data parallel GPUs. A copy that does not fit on one node spans as many as it needs, by
  the server's own options; a shape that has no honest form there is refused with the reason.
- A value that a kind of server does not use is an error, never ignored; so is an argument that contradicts a value.
- Several copies without `route` have several addresses; with it, a router (staged/router.py) has the name of the server, and
  the copies are called NAME-copy.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal, Self

from pydantic import Field, StringConstraints, model_validator

from seatrial.model.errors import UserError
from seatrial.model.job import Component, Count, Name, Placed, Ready
from seatrial.model.secret_names import Says, says_secret

Kind = Literal["vllm", "sglang", "command", "url"]

_PROCESS = {*Placed.model_fields, "deadline_s", "route"}
_ENGINE = {"model", "tensor_parallel", "pipeline_parallel", "data_parallel", "trust_remote_code", "arguments"}
_USES: dict[Kind, set[str]] = {
    "vllm": {"name", "kind", "served_name"} | _PROCESS | _ENGINE,
    "sglang": {"name", "kind", "served_name"} | _PROCESS | _ENGINE,
    "command": {"name", "kind", "served_name", "command", "gpus", "ready_path"} | _PROCESS,
    "url": {"name", "kind", "served_name", "url"},
}
"""What each kind of server takes."""
_NEEDS = {"vllm": "model", "sglang": "model", "command": "command", "url": "url"}
_OWNED = {
    "model": ("--model", "--model-path", "--model-tag"),
    "served_name": ("--served-model-name",),
    "tensor_parallel": ("--tensor-parallel-size", "--tp-size", "-tp"),
    "pipeline_parallel": ("--pipeline-parallel-size", "--pp-size", "-pp"),
    "data_parallel": ("--data-parallel-size", "--dp-size", "-dp"),
    "trust_remote_code": ("--trust-remote-code",),
    "": (
        *("--host", "--port", "--headless", "--nnodes", "-n", "--node-rank", "-r", "--master-addr", "--master-port"),
        *("--dist-init-addr", "--nccl-init-addr", "--data-parallel-size-local", "-dpl", "--data-parallel-address", "-dpa"),
        *("--data-parallel-rpc-port", "-dpp", "--data-parallel-start-rank", "-dpr", "--data-parallel-rank", "-dpn"),
        *("--data-parallel-hybrid-lb", "-dph", "--data-parallel-external-lb", "-dpe", "--data-parallel-multi-port-external-lb", "-dpm"),
    ),
}
"""Options of the servers that Seatrial sets, by the value that says so; those below "" follow from the job."""
_OTHER_RANKS = 'rank=$1 each=$2; shift 2; if [ "$rank" -gt 0 ]; then set -- "$@" --headless; if [ "$each" -gt 0 ]; then '
_OTHER_RANKS += 'set -- "$@" --data-parallel-start-rank "$((rank * each))"; fi; fi; exec "$@"'
"""Only the first node of a vLLM server answers requests; the others get more options. A constant: words come as arguments."""


class Server(Placed):
    """One model server, started in the job or (kind `url`) running elsewhere already."""

    name: Name = "server"
    kind: Kind
    model: str | None = None
    served_name: str | None = None
    """The name that clients ask for; none is the model's."""
    tensor_parallel: Count = 1
    pipeline_parallel: Count = 1
    data_parallel: Count = 1
    trust_remote_code: bool = False
    arguments: tuple[str, ...] = ()
    """More options of the server, as words."""
    command: tuple[str, ...] = ()
    """Kind `command`: any OpenAI-compatible server, with placeholders such as {bind} and {port}."""
    gpus: Annotated[int, Field(ge=0)] = 0
    """Kind `command`: GPUs of one copy; the others follow from the parallel sizes."""
    ready_path: str | None = "/health"
    """Kind `command`: what answers 200 when it is ready; none when an open port is enough."""
    url: Annotated[str, StringConstraints(pattern=r"^https?://[!-~]+$")] | None = None
    route: bool = False
    """Whether a router spreads requests over the replicas."""
    deadline_s: Annotated[int, Field(gt=0)] = 1200
    """How long it may take until it is ready."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        unused = sorted(self.model_fields_set - _USES[self.kind])
        if unused:
            known = ", ".join(sorted(_USES[self.kind] - {"name", "kind"}))
            raise ValueError(f"server {self.name}: a server of kind {self.kind} has no use for {', '.join(unused)}; it takes: {known}")
        if not getattr(self, _NEEDS[self.kind]):
            raise ValueError(f"server {self.name}: kind {self.kind} needs {_NEEDS[self.kind]}")
        if self.route and self.replicas == 1:
            raise ValueError(f"server {self.name}: route spreads requests over replicas, and there is one")
        if self.kind == "command" and not any("{port}" in word for word in self.command):
            raise ValueError(f"server {self.name}: its command must take its port from {{port}}: it is chosen on the node")
        for word in self.arguments:
            _refuse(self.name, word)
        return self


def _refuse(server: str, word: str) -> None:
    """A ValueError when an argument sets what a value of ours sets, also abbreviated, or is a secret."""
    flag = word.partition("=")[0].replace("_", "-")
    if not flag.startswith("-") or flag.strip("-") == "":
        return
    if says_secret(flag) is Says.STRONG:
        raise ValueError(f"server {server}: {flag}: job scripts are read by everybody; export the secret where you submit: it is passed on")
    for value, owned in _OWNED.items():
        if any(flag == name or (len(flag) > 3 and name.startswith(flag)) for name in owned):
            whose = f"the value {value} of the server" if value else "Seatrial, from where the server runs"
            raise ValueError(f"server {server}: {word} in arguments contradicts: {flag} is set by {whose}")


def components(server: Server, gpus_per_node: int) -> tuple[Component, ...]:
    """The services of a job that this server is; none when it runs elsewhere (see `prehosted`).

    Raises a UserError for a shape that the server cannot run on such nodes.
    """
    if server.kind == "url":
        return ()
    nodes, gpus = _shape(server, gpus_per_node)
    ready = Ready(path=server.ready_path, deadline_s=server.deadline_s)
    copies = Component(
        name=_copies_name(server),
        command=_command(server, nodes),
        nodes=nodes,
        tasks=nodes,
        gpus=gpus,
        port=True,
        ready=ready,
        **{key: getattr(server, key) for key in Placed.model_fields},
    )
    return (copies, _router(server, ready)) if server.route else (copies,)


def prehosted(servers: Iterable[Server]) -> dict[str, str]:
    """`Job.servers`: those that run elsewhere, by name."""
    return {server.name: server.url for server in servers if server.url}


def url(server: Server) -> str:
    """What a client writes for the address of this server. Raises a UserError when one address would leave replicas idle."""
    if server.replicas > 1 and not server.route:
        fix = f"set route = true, or let the client take all of them: {{urls:{server.name}}}"
        raise UserError(f"server {server.name} has {server.replicas} replicas and no router, so no single address", fix)
    return f"{{url:{server.name}}}"


def _shape(server: Server, gpus_per_node: int) -> tuple[int, int]:
    """Nodes of one copy, and its GPUs on each."""
    if server.kind == "command":
        return 1, server.gpus
    if gpus_per_node == 0:
        fix = "correct gpus_per_node of the profile; a server without GPUs is one of kind command"
        raise UserError(f"server {server.name}: {server.kind} needs GPUs, and nodes have none (gpus_per_node = 0)", fix)
    inner = server.tensor_parallel * server.pipeline_parallel
    # With this option SGLang's data parallel ranks share the GPUs of its tensor parallel ones.
    shared = server.kind == "sglang" and "--enable-dp-attention" in server.arguments
    size = inner if shared else inner * server.data_parallel
    nodes = -(-size // gpus_per_node)
    what = f"server {server.name}: {size} GPUs (tensor {server.tensor_parallel} x pipeline {server.pipeline_parallel}"
    what += f" x data {server.data_parallel}) on nodes with {gpus_per_node}"
    if size % nodes:
        raise UserError(f"{what}: {size} cannot be spread evenly over {nodes} nodes", f"choose sizes whose product {nodes} divides")
    each = size // nodes
    if nodes > 1 and server.data_parallel > 1 and not shared:
        if server.kind == "sglang":
            raise UserError(
                f"{what}: SGLang has no data parallel over nodes without --enable-dp-attention", "use replicas and route instead"
            )
        if each % inner:
            why = f"one data parallel rank ({inner} GPUs) would not lie on one node"
            raise UserError(f"{what}: {why}", "use replicas and route instead of data_parallel")
    return nodes, each


def _command(server: Server, nodes: int) -> tuple[str, ...]:
    """Words of one copy; every node of it runs the same."""
    if server.kind == "command":
        return server.command
    assert server.model is not None
    vllm = server.kind == "vllm"
    words = ["vllm", "serve", server.model] if vllm else ["python3", "-m", "sglang.launch_server", "--model-path", server.model]
    words += ["--host", "{bind}", "--port", "{port}"]
    names = (
        ("--tensor-parallel-size", "--pipeline-parallel-size", "--data-parallel-size") if vllm else ("--tp-size", "--pp-size", "--dp-size")
    )
    sizes = (server.tensor_parallel, server.pipeline_parallel, server.data_parallel)
    for name, size in zip(names, sizes, strict=True):
        words += [name, str(size)] if size > 1 else []
    words += ["--served-model-name", server.served_name] if server.served_name else []
    words += ["--trust-remote-code"] if server.trust_remote_code else []
    words += server.arguments
    if nodes == 1:
        return tuple(words)
    if not vllm:
        return (*words, "--nnodes", str(nodes), "--node-rank", "{rank}", "--dist-init-addr", "{head}:{head_port}")
    local = 0
    if server.data_parallel > 1:
        local = server.data_parallel // nodes
        words += ["--data-parallel-size-local", str(local), "--data-parallel-address", "{head}", "--data-parallel-rpc-port", "{head_port}"]
    else:
        words += ["--nnodes", str(nodes), "--node-rank", "{rank}", "--master-addr", "{head}", "--master-port", "{head_port}"]
    return ("sh", "-c", _OTHER_RANKS, "sh", "{rank}", str(local), *words)


def _router(server: Server, ready: Ready) -> Component:
    """The router, in the container of the server: that one surely has a Python."""
    words = ("python3", "{job}/router.py", "--host", "{bind}", "--port", "{port}", "--backends", f"{{urls:{_copies_name(server)}}}")
    path = ("--health-path", ready.path or "")
    ready = Ready(path="/health", deadline_s=ready.deadline_s)
    place = {key: getattr(server, key) for key in ("group", "container", "image", "mounts")}
    return Component(name=server.name, command=(*words, *path), port=True, ready=ready, **place)


def _copies_name(server: Server) -> str:
    return f"{server.name}-copy" if server.route else server.name
