"""Model servers as components of a job: their command, their ports, and waiting until they can be used.

- `Server` says what is served and how wide; `components` makes the services of it, `url` what a client calls it by.
- A service is ready when its path answers 200, or, without a path, when its port accepts a connection. Waiting has a deadline.
- A free port is free at the moment of the call: bind it soon and cope with losing the race. This process hands out no port twice in a
  row.
"""

from __future__ import annotations

import errno
import http.client
import ipaddress
import socket
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, Self, TypeVar
from urllib.parse import urljoin, urlsplit

from pydantic import Field, StringConstraints, model_validator

from seatrial.core.errors import UserError
from seatrial.core.jobs import Component, Count, Name, Placed, Ready
from seatrial.core.secret_names import Says, says_secret

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


T = TypeVar("T")

_ASK_EVERY_S = 0.5
_REQUEST_S = 10.0
_LOOK_S = 0.1
_SAY_EVERY_S = 15.0


@dataclass(frozen=True, slots=True)
class Target:
    """A server to wait for."""

    name: str
    """As logs and results call it."""
    url: str
    """`http://`, `https://`, or `tcp://host:port` for a mere connection."""
    deadline_s: float
    foreign: bool = False
    """Not ours: any answer below 500 will do."""


@dataclass(frozen=True, slots=True)
class Missed:
    """A target that was not ready in time."""

    name: str
    message: str


def foreign_target(name: str, url: str, deadline_s: float) -> Target:
    """A server that runs elsewhere; an OpenAI-compatible base URL (.../v1) is asked for its models."""
    bare = url.rstrip("/")
    return Target(name, f"{bare}/models" if bare.endswith("/v1") else url, deadline_s, foreign=True)


def wait_ready(targets: Sequence[Target], halt: Callable[[], T | None], progress: Callable[[str], None]) -> T | Missed | None:
    """Wait until every target is ready (None), one missed its deadline, or `halt()`, asked ten times a second, gave a reason."""
    stop = threading.Event()
    waits = [_Wait(target, stop) for target in targets]
    began = said = time.monotonic()
    try:
        for wait in waits:
            threading.Thread(target=wait.run, name=f"ready-{wait.target.name}", daemon=True).start()
        while True:
            if (reason := halt()) is not None:
                return reason
            waits = [wait for wait in waits if not wait.ready.is_set()]
            if not waits:
                return None
            passed = time.monotonic() - began
            for wait in waits:
                if passed >= wait.target.deadline_s:
                    return Missed(wait.target.name, f"not ready within {wait.target.deadline_s:g} s: {wait.says()}")
            if time.monotonic() - said >= _SAY_EVERY_S:
                said = time.monotonic()
                progress("waiting for " + "; ".join(f"{wait.says()} ({wait.target.deadline_s - passed:.0f} s left)" for wait in waits))
            waits[0].ready.wait(_LOOK_S)
    finally:
        stop.set()


class _Wait:
    """Asks one target until it is ready or `stop` is set."""

    def __init__(self, target: Target, stop: threading.Event) -> None:
        self.target = target
        self.ready = threading.Event()
        self._stop = stop
        self._answer = "did not answer yet"

    def says(self) -> str:
        """Who, and the last answer; without what a URL may hold of secrets."""
        return f"{self.target.name}: {_shown(self.target.url)} {self._answer}"

    def run(self) -> None:
        while not self._stop.is_set():
            ok, self._answer = ask(self.target)
            if ok:
                self.ready.set()
                return
            self._stop.wait(_ASK_EVERY_S)


def ask(target: Target, timeout_s: float = _REQUEST_S) -> tuple[bool, str]:
    """Ask once: whether it is ready, and its answer in words."""
    try:
        parts = urlsplit(target.url)
        if parts.scheme == "tcp":
            socket.create_connection((parts.hostname or "", parts.port or 0), timeout_s).close()
            return True, "took the connection"
        status, leads_to = _get(target.url, timeout_s)
    except (OSError, http.client.HTTPException, ValueError) as error:
        cause = error.reason if isinstance(error, urllib.error.URLError) else error
        if isinstance(cause, ConnectionRefusedError):
            return False, "refused the connection"
        if isinstance(cause, TimeoutError):
            return False, f"did not answer within {timeout_s:g} s"
        return False, f"gave no answer: {cause or type(error).__name__}"
    answer = f"answered {status}"
    if leads_to and (_origin(leads_to) != _origin(target.url) or not target.foreign):
        return False, f"{answer}, a redirect to {_shown(leads_to)}"
    return (status < 500 if target.foreign else status == 200), answer


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: object) -> None:
        """A redirect is an answer, not followed."""


def _get(url: str, timeout_s: float) -> tuple[int, str | None]:
    """The status of a GET, and where it leads to if it is a redirect."""
    handlers: list[urllib.request.BaseHandler] = [_NoRedirect()]
    host = urlsplit(url).hostname or ""
    try:
        loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = host == "localhost"
    if loopback:
        handlers.append(urllib.request.ProxyHandler({}))
    try:
        with urllib.request.build_opener(*handlers).open(_bare(url), timeout=timeout_s) as answer:
            return answer.status, None
    except urllib.error.HTTPError as error:
        with error:
            where = error.headers.get("Location") if 300 <= error.code < 400 else None
            return error.code, urljoin(url, where) if where else None


def _bare(url: str) -> str:
    """Without user and password, which urllib takes for a part of the host."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def _shown(url: str) -> str:
    parts = urlsplit(_bare(url))
    return parts._replace(query="", fragment="").geturl()


def _origin(url: str) -> tuple[str, str | None, int | None]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port


_HOST = "127.0.0.1"

_given: deque[int] = deque(maxlen=1000)
"""Ports handed out lately, whose servers may not have bound them yet."""
_lock = threading.Lock()


def free_port() -> int:
    """A port on 127.0.0.1 that nobody uses now."""
    with _lock:
        while True:
            with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
                probe.bind((_HOST, 0))
                port = int(probe.getsockname()[1])
            if port not in _given:
                _given.append(port)
                return port


def port_in_use(port: int) -> bool:
    """Whether a server could not bind `port` on 127.0.0.1 because somebody has it."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As servers do: connections that linger after their server ended do not occupy the port.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((_HOST, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return True
            raise
    return False
