"""A method of the workers of an engine that runs already, called from outside. Standard library; Ray where a handle is given.

`via_rpc(engine, method, …)` takes a vLLM LLM object, the handle of a Ray actor that holds an engine (verl's server, NeMo-RL's
generation worker) or the URL of a vLLM server in development mode, and returns one answer per worker.

- verl's own `collective_rpc` drops the answers, and NeMo-RL's actors have none: the engine inside the actor is asked instead.
- An asynchronous engine answers on its own event loop. The question is left there, and the answer fetched, until the deadline.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import inspect
import sys
import time
import urllib.error
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from seatrial.probes.engines.vllm_client import Client, ServerError

ENGINES = ("engine", "llm")
"""Where verl's and NeMo-RL's actors keep their engine."""
ANSWERS = "_seatrial_answers"
POLL_S = 0.2
WAITING, DONE, RAISED = "waiting", "done", "raised"


class RpcFailed(RuntimeError):
    """The engine could not be asked, or did not answer."""


def via_rpc(
    engine: Any,
    method: str | Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    seconds: float = 600.0,
) -> list[Any]:
    """Call a method by its name, or a function with the worker as its first argument, in every worker of the engine."""
    given = dict(kwargs or {})
    if isinstance(engine, str):
        return _over_http(engine, method, args, given, seconds)
    if hasattr(engine, "__ray_call__"):
        return _in_actor(engine, method, tuple(args), given, seconds)
    if not hasattr(engine, "collective_rpc"):
        raise RpcFailed(f"{type(engine).__name__} has no collective_rpc: give a vLLM LLM, a Ray actor with an engine, or a URL")
    answer = engine.collective_rpc(method, timeout=seconds, args=tuple(args), kwargs=given)
    if inspect.isawaitable(answer):
        if inspect.iscoroutine(answer):
            answer.close()
        raise RpcFailed(f"{type(engine).__name__} is asynchronous: await its collective_rpc on its own event loop")
    return list(answer)


def _over_http(url: str, method: str | Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], seconds: float) -> list[Any]:
    if not isinstance(method, str):
        raise RpcFailed("a server takes the name of a method, not a function")
    route = "/collective_rpc"
    try:
        answer = Client(url, timeout_s=seconds).call(route, {"method": method, "args": list(args), "kwargs": kwargs, "timeout": seconds})
    except ServerError as error:
        lacking = isinstance(error.__cause__, urllib.error.HTTPError) and error.__cause__.code == 404
        raise RpcFailed(f"{error}{'; the server must be started with VLLM_SERVER_DEV_MODE=1' if lacking else ''}") from error
    if not isinstance(answer, dict) or not isinstance(answer.get("results"), list):
        raise RpcFailed(f"{url}{route}: not an answer of vLLM: {str(answer)[:200]!r}")
    return list(answer["results"])


def _in_actor(handle: Any, method: str | Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], seconds: float) -> list[Any]:
    ray = importlib.import_module("ray")
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the actor need not see our instruments
    ends, ticket = time.monotonic() + seconds, uuid.uuid4().hex
    try:
        state, value = ray.get(handle.__ray_call__.remote(_ask, ticket, method, args, kwargs, seconds), timeout=seconds)
        while state == WAITING:
            if time.monotonic() > ends:
                raise RpcFailed(f"{method}: the engine in the actor gave no answer within {seconds:.0f} s")
            time.sleep(POLL_S)
            state, value = ray.get(handle.__ray_call__.remote(_fetch, ticket), timeout=max(1.0, ends - time.monotonic()))
    except ray.exceptions.RayError as error:
        raise RpcFailed(f"{method}: the actor did not answer: {error}") from error
    if state == RAISED:
        raise RpcFailed(f"{method}: {value}")
    return list(value)


def _ask(
    actor: Any, ticket: str, method: str | Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], seconds: float
) -> tuple[str, Any]:
    """Inside the actor: ask its engine; an asynchronous one answers later."""
    held: list[Any] = [getattr(actor, name) for name in ENGINES if hasattr(getattr(actor, name, None), "collective_rpc")]
    if not held:
        return RAISED, f"the actor {type(actor).__name__} has no engine in {' or '.join(ENGINES)}"
    answer = held[0].collective_rpc(method, timeout=seconds, args=args, kwargs=kwargs)
    if not inspect.isawaitable(answer):
        return DONE, answer
    loop = _loop_of(held[0])
    if loop is None:
        if inspect.iscoroutine(answer):
            answer.close()
        return RAISED, f"the event loop of {type(held[0]).__name__} cannot be told: none is running in the actor, or several are"

    async def wait() -> Any:
        return await answer

    vars(actor).setdefault(ANSWERS, {})[ticket] = asyncio.run_coroutine_threadsafe(wait(), loop)
    return WAITING, None


def _loop_of(engine: Any) -> asyncio.AbstractEventLoop | None:
    """Where an asynchronous engine lives: vLLM's keeps a task there. Else the one loop that is running in this process.

    Ray runs what we send in another thread than the loop of an asynchronous actor, and has no public way to that loop.
    """
    handler = getattr(engine, "output_handler", None)
    if isinstance(handler, asyncio.Task) and handler.get_loop().is_running():
        return handler.get_loop()
    running = [found for found in gc.get_objects() if isinstance(found, asyncio.AbstractEventLoop) and found.is_running()]
    return running[0] if len(running) == 1 else None


def _fetch(actor: Any, ticket: str) -> tuple[str, Any]:
    """Inside the actor: the answer, when it is there."""
    future = vars(actor)[ANSWERS][ticket]
    if not future.done():
        return WAITING, None
    del vars(actor)[ANSWERS][ticket]
    error = future.exception()
    return (RAISED, f"{type(error).__name__}: {error}") if error else (DONE, future.result())
