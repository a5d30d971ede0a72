"""How the entry points of upstream are wrapped: same arguments, same results, same exceptions; and a fact for each call.

Runs inside a worker of the loop: standard library only. `Target` says what an adapter expects of upstream and what is done
with it; `attach` applies it to a module and returns what was found. Everything found is said in a fact, and so is what is missing.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from seatrial.probes.engines.recorder import Call, Recorder

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
    calls: tuple[str, ...]
    """Entry points, of whatever version: those that exist are wrapped, the others are named as missing."""
    stream: str = ""
    """Generator: the method that is given each list of (name, tensor). Policy: the parameter with the stream."""
    extends: bool = False
    """Whether it is the worker extension, which gets our `seatrial_` methods."""
    aside: Callable[[str, Mapping[str, Any]], str] = _nothing
    """Generator: why a call of this entry point with these arguments cannot be proven; "" if it can."""
    mapped: str = ""
    """Policy: the parameter with a function of (name, tensor) that returns what is really sent."""
    stage: str = TRANSFER
    sends: Callable[[Mapping[str, Any]], bool] = _always
    """Policy: whether a call with these arguments sends at all; every rank of a job may run the export."""
    optional: bool = False
    """Whether a version of upstream may lack the owner without a proof being lost."""


def attach(target: Target, module: ModuleType, recorder: Recorder, extension: Callable[[type], list[str]]) -> None:
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
    place = {"module": target.module, "owner": target.owner, "side": target.side, "file": getattr(module, "__file__", None)}
    state = {"owner_found": owner is not None, "found": found, "missing": missing, "stream": stream, "optional": target.optional}
    recorder.write("attached", **place, **state, methods=methods)


def arguments(original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> inspect.BoundArguments:
    """What each parameter gets; raises TypeError as the call itself would."""
    bound = inspect.signature(original).bind(*args, **kwargs)
    bound.apply_defaults()
    return bound


def receiving(original: Callable[..., Any], recorder: Recorder, target: Target) -> Callable[..., Any]:
    """An entry point of a generation worker."""
    name = original.__name__

    @functools.wraps(original)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        if "received" in recorder.active:  # one entry point calls another: it is one refit
            return original(self, *args, **kwargs)
        call: Call | None = None
        with recorder.guard(f"{name}: beginning"):
            given = arguments(original, (self, *args), kwargs).arguments
            call = Call(recorder, name, given, self)
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
def _watching(worker: Any, call: Call, target: Target) -> Iterator[None]:
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


def _watch_load(model: Any, call: Call) -> Callable[[], None]:
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


def streaming(original: Callable[..., Any], recorder: Recorder) -> Callable[..., Any]:
    """The method of a generation worker that gets each list of (name, tensor)."""

    @functools.wraps(original)
    def wrapper(self: Any, weights: Any, *args: Any, **kwargs: Any) -> Any:
        call = recorder.active.get("received")
        if call is not None and call.inside:  # a subclass has handed it on to its parent: seen already
            return original(self, weights, *args, **kwargs)
        alone = call is None
        if call is None:
            with recorder.guard(f"{original.__name__}: beginning"):
                call = Call(recorder, original.__name__, {}, self)
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


def sending(original: Callable[..., Any], recorder: Recorder, target: Target) -> Callable[..., Any]:
    """An entry point of the policy: a function or method, synchronous or not, with a stream among its parameters."""
    key = f"sent{target.stage}"

    def begin(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Call | None, tuple[Any, ...], dict[str, Any]]:
        """The call to record, None if there is nothing to; and the arguments, with the stream watched."""
        call: Call | None = None
        with recorder.guard(f"{original.__name__}: beginning"):
            bound = arguments(original, args, kwargs)
            if key in recorder.active or not target.sends(bound.arguments):
                return None, args, kwargs
            call = recorder.active[key] = Call(recorder, original.__name__, bound.arguments)
            _replace(bound.arguments, call, target)
            return call, bound.args, bound.kwargs
        if call is not None:
            call.problems.append("the stream could not be watched")
        return call, args, kwargs

    def end(call: Call | None, raised: BaseException | None = None) -> None:
        if call is not None:
            recorder.active.pop(key, None)
            call.sent(target.stage, raised)

    if inspect.iscoroutinefunction(original):

        @functools.wraps(original)
        async def later(*args: Any, **kwargs: Any) -> Any:
            call, args, kwargs = begin(args, kwargs)
            try:
                returned = await original(*args, **kwargs)
            except BaseException as error:
                end(call, raised=error)
                raise
            end(call)
            return returned

        return later

    @functools.wraps(original)
    def now(*args: Any, **kwargs: Any) -> Any:
        call, args, kwargs = begin(args, kwargs)
        try:
            returned = original(*args, **kwargs)
        except BaseException as error:
            end(call, raised=error)
            raise
        end(call)
        return returned

    return now


def _replace(given: dict[str, Any], call: Call, target: Target) -> None:
    """Put the watched stream in the place of the stream."""
    if target.mapped and callable(given.get(target.mapped)):
        given[target.mapped] = _mapped(given[target.mapped], call)
    elif target.stream in given:
        given[target.stream] = call.watch(given[target.stream])
    else:
        call.problems.append(f"{call.entry} has no parameter {target.stream}, but {', '.join(given)}: what it sends cannot be seen")


def _mapped(function: Callable[[Any], Any], call: Call) -> Callable[[Any], Any]:
    def mapped(item: Any) -> Any:
        made = function(item)
        with call.recorder.guard(f"{call.entry}: hashing"):
            call.take([(item[0], made)])
        return made

    return mapped
