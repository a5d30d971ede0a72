"""Methods of the workers of an engine that runs already: over HTTP, in a Ray actor, and in this process."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest

from seatrial.instruments.engines.attach import RpcFailed, via_rpc


class Engine:
    """Two workers."""

    def collective_rpc(self, method: Any, timeout: float | None = None, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """What vLLM's engines have."""
        return [[method, *args, kwargs], "second"]


class Later(Engine):
    """An asynchronous engine; like vLLM's it keeps a task on its loop."""

    output_handler: Any = None

    async def collective_rpc(self, method: Any, timeout: float | None = None, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Answers on its loop."""
        await asyncio.sleep(0.01)
        if method == "fails":
            raise ValueError("no such method")
        return [method]


class Handle:
    """The handle of an actor with a running event loop. As in Ray, what is sent to it runs in another thread than the loop."""

    started: ClassVar[list[tuple[asyncio.AbstractEventLoop, threading.Thread]]] = []

    def __init__(self, actor: Any) -> None:
        self.actor, loop = actor, asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_forever, daemon=True)
        self.started.append((loop, thread))
        thread.start()
        if isinstance(engine := getattr(actor, "engine", None) or getattr(actor, "llm", None), Later):
            engine.output_handler = asyncio.run_coroutine_threadsafe(_task(), loop).result(5)

    @property
    def __ray_call__(self) -> Any:
        return SimpleNamespace(remote=lambda function, *args: function(self.actor, *args))


async def _task() -> Any:
    return asyncio.ensure_future(asyncio.sleep(60))


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    made: Any = ModuleType("ray")
    made.exceptions = SimpleNamespace(RayError=type("RayError", (Exception,), {}))
    made.cloudpickle = SimpleNamespace(register_pickle_by_value=lambda module: None)
    made.get = lambda value, timeout: value
    monkeypatch.setitem(sys.modules, "ray", made)
    monkeypatch.setattr("seatrial.instruments.engines.attach.POLL_S", 0.01)
    yield
    while Handle.started:
        loop, thread = Handle.started.pop()
        asyncio.run_coroutine_threadsafe(_cancel_others(), loop).result(5)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(5)
        loop.close()


def test_an_engine_in_this_process() -> None:
    assert via_rpc(Engine(), "seatrial_read", ["x"], {"a": 1}) == [["seatrial_read", "x", {"a": 1}], "second"]


def test_an_asynchronous_engine_here_is_refused() -> None:
    with pytest.raises(RpcFailed, match="Later is asynchronous"):
        via_rpc(Later(), "seatrial_read")


def test_something_else_is_refused() -> None:
    with pytest.raises(RpcFailed, match="object has no collective_rpc"):
        via_rpc(object(), "seatrial_read")


@pytest.mark.parametrize("name", ["engine", "llm"])
@pytest.mark.usefixtures("ray")
def test_the_engine_inside_an_actor(name: str) -> None:
    assert via_rpc(Handle(SimpleNamespace(**{name: Engine()})), "seatrial_state", ("x",))[1] == "second"
    actor = SimpleNamespace(**{name: Later()})
    assert via_rpc(Handle(actor), "seatrial_state") == ["seatrial_state"]
    assert actor._seatrial_answers == {}


@pytest.mark.usefixtures("ray")
def test_an_actor_that_fails_or_has_none() -> None:
    with pytest.raises(RpcFailed, match="fails: ValueError: no such method"):
        via_rpc(Handle(SimpleNamespace(llm=Later())), "fails")
    with pytest.raises(RpcFailed, match="has no engine in engine or llm"):
        via_rpc(Handle(SimpleNamespace(engine=None)), "seatrial_state")


@pytest.mark.usefixtures("ray")
def test_an_actor_that_never_answers() -> None:
    never = Later()
    never.collective_rpc = lambda *_, **__: asyncio.sleep(60)  # type: ignore[method-assign]
    with pytest.raises(RpcFailed, match="gave no answer within 0 s"):
        via_rpc(Handle(SimpleNamespace(llm=never)), "seatrial_state", seconds=0.1)


@pytest.mark.usefixtures("ray")
def test_an_actor_whose_loop_cannot_be_told() -> None:
    one, two = Handle(SimpleNamespace()), Handle(SimpleNamespace())
    one.actor.llm = Later()
    with pytest.raises(RpcFailed, match="the event loop of Later cannot be told"):
        via_rpc(one, "seatrial_state")
    assert two is not one


@pytest.fixture
def url() -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            text = {"seatrial_version": json.dumps({"results": [body["kwargs"]]}), "strange": "[1]"}.get(body["method"], "Not Found")
            self.send_response(404 if text == "Not Found" else 200)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: Any) -> None:
            return

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()


def test_a_server(url: str) -> None:
    assert via_rpc(url, "seatrial_version", kwargs={"a": "b"}) == [{"a": "b"}]
    with pytest.raises(RpcFailed, match=r"collective_rpc: status 404: .*the server must be started with VLLM_SERVER_DEV_MODE=1"):
        via_rpc(url, "other")
    with pytest.raises(RpcFailed, match="not an answer of vLLM"):
        via_rpc(url, "strange")
    with pytest.raises(RpcFailed, match="the name of a method"):
        via_rpc(url, print)


def test_a_server_that_is_not_there() -> None:
    with pytest.raises(RpcFailed, match=r"http://127\.0\.0\.1:9/collective_rpc"):
        via_rpc("http://127.0.0.1:9", "seatrial_version", seconds=5)
