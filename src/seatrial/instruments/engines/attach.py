"""The refit probe inside the workers of another framework, without an edit there: wraps its entry points as they are imported.

The start-up path is that of the import witness: `VERL_USE_EXTERNAL_MODULES` in verl, `sitecustomize` in NeMo-RL.
- SEATRIAL_REFIT_FACTS=/path/facts.jsonl turns it on. A process writes {"fact": "waiting"} as it starts, and {"fact": "attached"} for each
  module of upstream that it found, with what was missing. A run in which no generator attached has proven nothing.
- A wrapped function keeps its arguments, results and exceptions, and leaves a fact for each call.
- `graft` adds our methods to the worker of a running engine, and `via_rpc(engine, method, …)` calls them: of a vLLM LLM object, the handle
  of a Ray actor that holds an engine, or the URL of a vLLM server in development mode. It returns one answer per worker. verl's own
  `collective_rpc` drops the answers and NeMo-RL's actors have none, so the engine inside the actor is asked.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import importlib
import inspect
import sys
import time
import urllib.error
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from seatrial.instruments.engines.recorder import RefitCall, RefitRecorder
from seatrial.instruments.engines.vllm_server import ServerError, VllmClient

GENERATOR, POLICY = "generator", "policy"
EXPORT, TRANSFER = "export", "transfer"


def _always(_: Mapping[str, Any]) -> bool:
    return True


def _nothing(_: str, __: Mapping[str, Any]) -> str:
    return ""


@dataclass(frozen=True)
class Target:
    """One class of upstream, or the functions of one module (no owner), and its entry points."""

    module: str
    side: str
    owner: str
    calls: tuple[str, ...]  # entry points, of whatever version: those that exist are wrapped, the others are named as missing
    stream: str = ""  # generator: the method that is given each list of (name, tensor). Policy: the parameter with the stream.
    extends: bool = False  # whether it is the worker extension, which gets our `seatrial_` methods
    aside: Callable[[str, Mapping[str, Any]], str] = _nothing
    """Generator: why a call of this entry point with these arguments cannot be proven; "" if it can."""
    mapped: str = ""  # policy: the parameter with a function of (name, tensor) that returns what is really sent
    stage: str = TRANSFER
    sends: Callable[[Mapping[str, Any]], bool] = _always
    """Policy: whether a call with these arguments sends at all; every rank of a job may run the export."""
    optional: bool = False  # whether a version of upstream may lack the owner without a proof being lost


def attach_target(target: Target, module: ModuleType, recorder: RefitRecorder, extension: Callable[[type], list[str]]) -> None:
    """Wrap what the target names in the module, and write down what was found."""
    owner: Any = getattr(module, target.owner, None) if target.owner else module
    found: list[str] = []
    methods: list[str] = []
    stream = ""
    if owner is not None:
        found = [name for name in target.calls if inspect.isroutine(getattr(owner, name, None))]
        for name in found:
            original = getattr(owner, name)
            wrapped = receiving(original, recorder, target) if target.side == GENERATOR else sending(original, recorder, target)
            setattr(owner, name, wrapped)
        if target.side == GENERATOR and target.stream and target.stream in vars(owner):
            setattr(owner, target.stream, streaming(vars(owner)[target.stream], recorder))
            stream = target.stream
        if target.extends:
            with recorder.guard(f"{target.module}.{target.owner}: adding our methods"):
                methods = extension(owner)
    missing = [name for name in target.calls if name not in found]
    state = {"owner_found": owner is not None, "found": found, "missing": missing, "stream": stream, "optional": target.optional}
    recorder.attached(module, target, **state, methods=methods)


def arguments(original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> inspect.BoundArguments:
    """What each parameter gets; raises TypeError as the call itself would."""
    bound = inspect.signature(original).bind(*args, **kwargs)
    bound.apply_defaults()
    return bound


def receiving(original: Callable[..., Any], recorder: RefitRecorder, target: Target) -> Callable[..., Any]:
    name = original.__name__

    @functools.wraps(original)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        if "received" in recorder.active:  # one entry point calls another: it is one refit
            return original(self, *args, **kwargs)
        call: RefitCall | None = None
        with recorder.guard(f"{name}: beginning"):
            given = arguments(original, (self, *args), kwargs).arguments
            call = RefitCall(recorder, name, given, self)
            if reason := target.aside(name, given):
                call.problems.append(reason)
        if call is None:
            return original(self, *args, **kwargs)
        with _watching(self, call, target):
            try:
                returned = original(self, *args, **kwargs)
            except BaseException as error:
                call.received(raised=error)
                raise
        call.received(returned=returned)
        return returned

    return wrapper


@contextlib.contextmanager
def _watching(worker: Any, call: RefitCall, target: Target) -> Iterator[None]:
    """While the entry point runs: the class's own stream tells the call; without one, the model's load_weights does."""
    recorder = call.recorder
    restore: Callable[[], None] | None = None
    recorder.active["received"] = call
    call.tee = target.stream
    if not getattr(getattr(type(worker), target.stream, None), "seatrial", False):
        with recorder.guard(f"{call.entry}: watching load_weights"):
            restore = _watch_load(worker.model_runner.model, call)
            call.tee = "model.load_weights"
        if restore is None:
            call.problems.append(f"neither {target.stream} nor the model's load_weights can be watched")
    try:
        yield
    finally:
        del recorder.active["received"]
        if restore is not None:
            with recorder.guard(f"{call.entry}: no longer watching load_weights"):
                restore()


def _watch_load(model: Any, call: RefitCall) -> Callable[[], None]:
    """Watch what this model loads; returns what ends it, and puts back what the model itself had under that name before."""
    original, before = model.load_weights, vars(model).get("load_weights")

    @functools.wraps(original)
    def load_weights(weights: Any, *args: Any, **kwargs: Any) -> Any:
        return original(call.watch(weights), *args, **kwargs)

    def restore() -> None:
        if vars(model).get("load_weights") is load_weights:  # else somebody has put his own there since
            del model.load_weights
            if before is not None:
                model.load_weights = before

    model.load_weights = load_weights
    return restore


def streaming(original: Callable[..., Any], recorder: RefitRecorder) -> Callable[..., Any]:
    """The method of a generation worker that gets each list of (name, tensor)."""

    @functools.wraps(original)
    def wrapper(self: Any, weights: Any, *args: Any, **kwargs: Any) -> Any:
        call = recorder.active.get("received")
        if call is not None and call.inside:  # a subclass has handed it on to its parent: seen already
            return original(self, weights, *args, **kwargs)
        alone = call is None
        if call is None:
            with recorder.guard(f"{original.__name__}: beginning"):
                call = RefitCall(recorder, original.__name__, {}, self)
                call.problems.append("weights were loaded outside of every entry point that is known here")
        if call is None:
            return original(self, weights, *args, **kwargs)
        call.inside = True
        try:
            returned = original(self, call.watch(weights), *args, **kwargs)
        except BaseException as error:
            if alone:
                call.received(raised=error)
            raise
        finally:
            call.inside = False
        if alone:
            call.received(returned=returned)
        return returned

    wrapper.seatrial = True  # type: ignore[attr-defined]
    return wrapper


def sending(original: Callable[..., Any], recorder: RefitRecorder, target: Target) -> Callable[..., Any]:
    """An entry point of the policy: a function or method, synchronous or not, with a stream among its parameters."""
    key = f"sent{target.stage}"

    def begin(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[RefitCall | None, tuple[Any, ...], dict[str, Any]]:
        """The call to record, None if there is nothing to; and the arguments, with the stream watched."""
        call: RefitCall | None = None
        with recorder.guard(f"{original.__name__}: beginning"):
            bound = arguments(original, args, kwargs)
            if key in recorder.active or not target.sends(bound.arguments):
                return None, args, kwargs
            call = recorder.active[key] = RefitCall(recorder, original.__name__, bound.arguments)
            _replace(bound.arguments, call, target)
            return call, bound.args, bound.kwargs
        if call is not None:
            call.problems.append("the stream could not be watched")
        return call, args, kwargs

    @contextlib.contextmanager
    def recorded(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
        call, args, kwargs = begin(args, kwargs)
        raised: BaseException | None = None
        try:
            yield args, kwargs
        except BaseException as error:
            raised = error
            raise
        finally:
            if call is not None:
                recorder.active.pop(key, None)
                call.sent(target.stage, raised)

    @functools.wraps(original)
    async def later(*args: Any, **kwargs: Any) -> Any:
        with recorded(args, kwargs) as (given, named):
            return await original(*given, **named)

    @functools.wraps(original)
    def now(*args: Any, **kwargs: Any) -> Any:
        with recorded(args, kwargs) as (given, named):
            return original(*given, **named)

    return later if inspect.iscoroutinefunction(original) else now


def _replace(given: dict[str, Any], call: RefitCall, target: Target) -> None:
    if target.mapped and callable(given.get(target.mapped)):
        given[target.mapped] = _mapped(given[target.mapped], call)
    elif target.stream in given:
        given[target.stream] = call.watch(given[target.stream])
    else:
        call.problems.append(f"{call.entry} has no parameter {target.stream}, but {', '.join(given)}: what it sends cannot be seen")


def _mapped(function: Callable[[Any], Any], call: RefitCall) -> Callable[[Any], Any]:
    def mapped(item: Any) -> Any:
        made = function(item)
        with call.recorder.guard(f"{call.entry}: hashing"):
            call.take([(item[0], made)])
        return made

    return mapped


ENGINES = ("engine", "llm")  # where verl's and NeMo-RL's actors keep their engine
ANSWERS = "_seatrial_answers"
POLL_S = 0.2
WAITING, DONE, RAISED = "waiting", "done", "raised"


class RpcFailed(RuntimeError):
    """The engine could not be asked, or did not answer."""


def via_rpc(
    engine: Any, method: str | Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, seconds: float = 600.0
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
    route, body = "/collective_rpc", {"method": method, "args": list(args), "kwargs": kwargs, "timeout": seconds}
    try:
        answer = VllmClient(url, timeout_s=seconds).call(route, body)
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
    future = vars(actor)[ANSWERS][ticket]
    if not future.done():
        return WAITING, None
    del vars(actor)[ANSWERS][ticket]
    error = future.exception()
    return (RAISED, f"{type(error).__name__}: {error}") if error else (DONE, future.result())


__all__ = ["VARIABLE", "Hook", "graft", "start", "via_rpc"]

VARIABLE = "SEATRIAL_REFIT_FACTS"
EXTENSION = "seatrial.instruments.engines.vllm_extension"
METHODS = tuple(f"seatrial_{name}" for name in ("state", "map", "read", "verify", "coverage", "version"))
"""What a worker of somebody's real run gets; our extension has more for its own tests."""


class Hook:
    """A finder of imports that finds nothing itself: it wraps what the finders behind it find."""

    def __init__(self, adapter: ModuleType, recorder: RefitRecorder) -> None:
        self.adapter, self.recorder = adapter, recorder
        self.modules = {target.module for target in adapter.TARGETS} | set(adapter.SPECIAL)

    def start(self) -> None:
        """Wrap what is imported already, and wait for the rest right in front of what searches directories.

        There the import witness, which comes first, still sees these modules.
        """
        late = sorted(name for name in self.modules if name in sys.modules)
        self.recorder.write("waiting", modules=sorted(self.modules), late=late)
        for name in late:
            self.apply(sys.modules[name])
        place = next((place for place, finder in enumerate(sys.meta_path) if finder is PathFinder), 0)
        sys.meta_path.insert(place, self)

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """The spec that the finders behind this one give, with a loader that wraps the module when it has run."""
        if name not in self.modules:
            return None
        # Only those behind: the witness in front asks us, and would be asked again.
        for finder in sys.meta_path[sys.meta_path.index(self) + 1 :]:
            find = getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = find(name, path, target) if find else None
            if spec is not None:
                with self.recorder.guard(f"{name}: waiting for it"):
                    self._wait(spec)
                return spec
        return None

    def _wait(self, spec: ModuleSpec) -> None:
        loader: Any = spec.loader
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            self.apply(module)

        loader.exec_module = exec_module

    def apply(self, module: ModuleType) -> None:
        """Wrap what the adapter names in this module."""
        name = module.__name__
        for target in (target for target in self.adapter.TARGETS if target.module == name):
            with self.recorder.guard(f"{name}: attaching"):
                attach_target(target, module, self.recorder, extend)
        if name in self.adapter.SPECIAL:
            with self.recorder.guard(f"{name}: attaching"):
                self.adapter.SPECIAL[name](module, self.recorder)


def start(environment: Mapping[str, str], framework: str) -> Hook | None:
    """Turn the probe on in this process, if it is asked for. `framework` names the adapter: verl or nemo_rl."""
    path = environment.get(VARIABLE)
    if not path:
        return None
    hooked = next((finder for finder in sys.meta_path if isinstance(finder, Hook)), None)
    if hooked is not None:
        return hooked
    hook = Hook(importlib.import_module(f"seatrial.instruments.engines.{framework}_hooks"), RefitRecorder(path, framework))
    hook.start()
    return hook


def extend(owner: type) -> list[str]:
    """Add the methods of our worker extension, and their helpers, to a class; returns which of METHODS were added."""
    mixin: Any = importlib.import_module(EXTENSION).Extension
    added = []
    for base in reversed(mixin.__mro__[:-1]):
        for name, value in vars(base).items():
            helper = name.startswith("_") and not name.startswith("__")
            if (helper or name in METHODS) and not hasattr(owner, name):
                setattr(owner, name, value)
                added.append(name)
    return sorted(name for name in added if name in METHODS)


def graft(worker: Any) -> list[str]:
    """Give the worker of a running engine our methods: `engine.collective_rpc(graft)`, where the engine takes callables."""
    return extend(type(worker))
