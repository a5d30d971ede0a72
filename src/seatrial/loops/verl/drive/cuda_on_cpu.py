"""Let code that says `torch.cuda` run on the CPU of a machine without a GPU.

Megatron-Core and Megatron-Bridge name the device in many places: `torch.cuda.current_device()`, `device="cuda"`, `Tensor.cuda()`,
streams, the CUDA random generators. Every function here gives such a call its CPU meaning: the device is the CPU, a stream does
nothing because CPU operators finish before they return, the generator is the CPU generator. `torch.cuda.is_available()` keeps
saying False. Without any one of these patches Megatron ends with an exception (each was taken out and tried).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

CPU = torch.device("cpu")

_FACTORIES = ("tensor", "as_tensor", "zeros", "ones", "empty", "full", "arange", "rand", "randn", "randint", "eye", "linspace")
_LIKE_FACTORIES = ("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like")


def install() -> None:
    """Apply every patch once; does nothing where CUDA is really there."""
    if torch.cuda.is_available() or getattr(torch.cuda, "_seatrial_cpu", False):
        return
    torch.cuda._seatrial_cpu = True
    _device_is_cpu()
    _generators_are_cpu()
    _streams_do_nothing()
    _factories_build_on_cpu()
    _moves_stay_on_cpu()
    _type_names_say_cuda()
    _memory_is_zero()
    _groups_are_gloo()


def to_cpu(device: Any) -> Any:
    """The CPU for anything that means a CUDA device, else the argument itself."""
    if isinstance(device, torch.device) and device.type == "cuda":
        return CPU
    if isinstance(device, str) and device.split(":")[0] == "cuda":
        return CPU
    if isinstance(device, int) and not isinstance(device, bool):  # a bare index always means the accelerator
        return CPU
    return device


def _set(holder: Any, **members: Any) -> None:
    for name, value in members.items():
        setattr(holder, name, value)


def _answers(value: Any = None) -> Callable[..., Any]:
    """A NEW function each time: torch._dynamo files every torch function by identity and refuses one that it meets under two names."""

    def answer(*_args: Any, **_kwargs: Any) -> Any:
        return value

    return answer


def _device_is_cpu() -> None:
    """Rotary embeddings, DDP buffers and the Bridge's parameter mappings allocate on `torch.cuda.current_device()`."""
    _set(torch.cuda, current_device=_answers(CPU), set_device=_answers(), device_count=_answers(1), get_device_name=_answers("cpu"))
    _set(torch.cuda, get_device_capability=_answers((8, 0)), _lazy_init=_answers(), is_initialized=_answers(True), init=_answers())


class _EveryIndex:
    """The CPU generator under every device index: what `current_device` answers is no integer."""

    def __getitem__(self, _index: object) -> torch.Generator:
        return torch.default_generator

    def __len__(self) -> int:
        return 1


def _generators_are_cpu() -> None:
    """`tensor_parallel/random.py` keeps one CUDA generator state per region; the CPU generator plays that part."""

    def get_state(*_args: Any, **_kwargs: Any) -> torch.Tensor:
        return torch.get_rng_state()

    def set_state(state: torch.Tensor, *_args: Any, **_kwargs: Any) -> None:
        torch.set_rng_state(state)

    def seed(value: int) -> None:
        torch.default_generator.manual_seed(int(value))

    def seed_all(value: int) -> None:
        seed(value)

    for holder in (torch.cuda, torch.cuda.random):
        _set(holder, get_rng_state=get_state, set_rng_state=set_state, manual_seed=seed, manual_seed_all=seed_all)
    _set(torch.cuda, default_generators=_EveryIndex(), _lazy_call=lambda function, **_: function())


class NullStream:
    """Stands for a CUDA stream or event: work on the CPU is done when the call returns, so there is nothing to wait for."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None: ...

    def __enter__(self) -> NullStream:
        return self

    def __exit__(self, *_exc: object) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, _other: object) -> float:
        return 0.0

    wait_stream = wait_event = synchronize = record = wait = _answers()

    def record_event(self, *_args: Any) -> NullStream:
        return self


def _streams_do_nothing() -> None:
    """Gradient buffers and checkpoint writers order themselves with streams and events."""
    null = NullStream()

    @contextlib.contextmanager
    def stream(_stream: object = None) -> Iterator[None]:
        yield

    _set(torch.cuda, Stream=NullStream, Event=NullStream, stream=stream)
    _set(torch.cuda, current_stream=_answers(null), default_stream=_answers(null))
    _set(torch.cuda, set_stream=_answers(), synchronize=_answers(), device=_answers(contextlib.nullcontext()))
    _set(torch.Tensor, record_stream=_answers())


def _factories_build_on_cpu() -> None:
    """Optimizer and schedules create scalars with `device="cuda"`."""

    def redirected(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def build(*args: Any, **kwargs: Any) -> Any:
            if kwargs.get("device") is not None:
                kwargs["device"] = to_cpu(kwargs["device"])
            if kwargs.get("pin_memory"):  # pinning needs an accelerator to pin for
                kwargs["pin_memory"] = False
            return function(*args, **kwargs)

        return build

    for name in (*_FACTORIES, *_LIKE_FACTORIES):
        setattr(torch, name, redirected(getattr(torch, name)))
    for name in ("new_zeros", "new_ones", "new_empty", "new_full", "new_tensor"):
        setattr(torch.Tensor, name, redirected(getattr(torch.Tensor, name)))


def _moves_stay_on_cpu() -> None:
    """`.cuda()`, `.to("cuda")` and `.pin_memory()` return what they were given."""

    def staying() -> Callable[..., Any]:
        def itself(self: Any, *_args: Any, **_kwargs: Any) -> Any:
            return self

        return itself

    def redirected(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def move(self: Any, *args: Any, **kwargs: Any) -> Any:
            if args:
                args = (to_cpu(args[0]), *args[1:])
            if kwargs.get("device") is not None:
                kwargs["device"] = to_cpu(kwargs["device"])
            return function(self, *args, **kwargs)

        return move

    for holder in (torch.Tensor, torch.nn.Module):
        _set(holder, cuda=staying(), to=redirected(holder.to))
    _set(torch.Tensor, pin_memory=staying())


def _type_names_say_cuda() -> None:
    """`distrib_optimizer.py` and `clip_grads.py` sort parameters by `Tensor.type()` and accept only the CUDA names."""
    plain = torch.Tensor.type

    @functools.wraps(plain)
    def type_(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is not None:
            return plain(self, dtype, *args, **kwargs)
        name = str(plain(self))
        return name.replace("torch.", "torch.cuda.", 1) if name.startswith("torch.") and "cuda" not in name else name

    torch.Tensor.type = type_


def _memory_is_zero() -> None:
    """Cache emptying and memory counters, called around checkpoints and by verl's timers."""
    for name in ("empty_cache", "ipc_collect", "reset_peak_memory_stats", "reset_max_memory_allocated", "set_per_process_memory_fraction"):
        setattr(torch.cuda, name, _answers())
    for name in ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"):
        setattr(torch.cuda, name, _answers(0))
    _set(torch.cuda, memory_stats=_answers({}), mem_get_info=_answers((1 << 33, 1 << 34)))


def _groups_are_gloo() -> None:
    """Megatron-Bridge asks for nccl by name when it makes process groups."""
    plain = torch.distributed.new_group

    @functools.wraps(plain)
    def new_group(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("backend") is not None:
            kwargs["backend"] = "gloo"
        return plain(*args, **kwargs)

    torch.distributed.new_group = new_group
