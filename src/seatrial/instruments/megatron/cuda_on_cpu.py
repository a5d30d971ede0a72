"""Let code that says `torch.cuda` run on the CPU of a machine without a GPU.

Every function here gives a call of Megatron its CPU meaning: the device is the CPU, a stream does nothing because CPU operators finish
before they return, the generator is the CPU generator. `torch.cuda.is_available()` keeps saying False. Without any one of these patches
Megatron ends with an exception. `install` gets a function that is called with the name of a shim whenever one takes part.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

_FACTORIES = ("tensor", "as_tensor", "zeros", "ones", "empty", "full", "arange", "rand", "randn", "randint", "eye", "linspace")
_LIKE_FACTORIES = ("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like")


Tell = Callable[[str], None]


def install(tell: Tell) -> bool:
    """Apply every patch once, and say whether they are needed: they are not where CUDA is really there."""
    import torch

    if torch.cuda.is_available():
        return False
    if not getattr(torch.cuda, "_seatrial_cpu", False):
        torch.cuda._seatrial_cpu = True
        _device_is_cpu(tell)
        _generators_are_cpu(tell)
        _streams_do_nothing(tell)
        _factories_build_on_cpu(tell)
        _moves_stay_on_cpu(tell)
        _type_names_say_cuda(tell)
        _memory_is_zero(tell)
        _groups_are_gloo(tell)
    return True


def to_cpu(device: Any) -> Any:
    """The CPU for anything that means a CUDA device, else the argument itself."""
    import torch

    if isinstance(device, torch.device) and device.type == "cuda":
        return torch.device("cpu")
    if isinstance(device, str) and device.split(":")[0] == "cuda":
        return torch.device("cpu")
    if isinstance(device, int) and not isinstance(device, bool):  # a bare index always means the accelerator
        return torch.device("cpu")
    return device


def _set(holder: Any, **members: Any) -> None:
    for name, value in members.items():
        setattr(holder, name, value)


def _calls(tell: Tell, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A NEW function each time: torch._dynamo files every torch function by identity and refuses one that it meets under two names."""

    def call(*args: Any, **kwargs: Any) -> Any:
        tell(name)
        return function(*args, **kwargs)

    return call


def _answers(tell: Tell, name: str, value: Any = None) -> Callable[..., Any]:
    return _calls(tell, name, lambda *_args, **_kwargs: value)


def _device_is_cpu(tell: Tell) -> None:
    """Rotary embeddings, DDP buffers and the Bridge's parameter mappings allocate on `torch.cuda.current_device()`. It stays a number,
    since some write `torch.device("cuda", torch.cuda.current_device())`; what allocates or moves takes it for the CPU."""
    import torch

    answers = {"current_device": 0, "device_count": 1, "get_device_name": "cpu", "get_device_capability": (8, 0)}
    answers |= {"set_device": None, "_lazy_init": None, "is_initialized": True, "init": None}
    _set(torch.cuda, **{name: _answers(tell, "cuda-device", value) for name, value in answers.items()})


def _generators_are_cpu(tell: Tell) -> None:
    """`tensor_parallel/random.py` keeps one CUDA generator state per region; the CPU generator plays that part."""
    import torch

    class EveryIndex:
        def __getitem__(self, _index: object) -> torch.Generator:
            tell("cuda-generators")
            return torch.default_generator

        def __len__(self) -> int:
            return 1

    def seed(value: int) -> None:
        torch.default_generator.manual_seed(int(value))

    def calls(function: Callable[..., Any]) -> Callable[..., Any]:
        return _calls(tell, "cuda-generators", function)

    for holder in (torch.cuda, torch.cuda.random):
        _set(
            holder,
            get_rng_state=calls(lambda *_args, **_kwargs: torch.get_rng_state()),
            set_rng_state=calls(lambda state, *_args, **_kwargs: torch.set_rng_state(state)),
            manual_seed=calls(seed),
            manual_seed_all=calls(seed),
        )
    _set(torch.cuda, default_generators=EveryIndex(), _lazy_call=lambda function, **_: function())


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

    def nothing(self, *_args: Any, **_kwargs: Any) -> None:
        """Waits for nothing, records nothing."""

    wait_stream = wait_event = synchronize = record = wait = nothing

    def record_event(self, *_args: Any) -> NullStream:
        return self


def _streams_do_nothing(tell: Tell) -> None:
    """Gradient buffers and checkpoint writers order themselves with streams and events."""
    import torch

    name, null = "cuda-streams", NullStream()

    @contextlib.contextmanager
    def stream(_stream: object = None) -> Iterator[None]:
        tell(name)
        yield

    _set(torch.cuda, Stream=NullStream, Event=NullStream, stream=stream)
    _set(torch.cuda, current_stream=_answers(tell, name, null), default_stream=_answers(tell, name, null))
    _set(torch.cuda, set_stream=_answers(tell, name), synchronize=_answers(tell, name))
    _set(torch.cuda, device=_answers(tell, name, contextlib.nullcontext()))
    _set(torch.Tensor, record_stream=_answers(tell, name))


def _factories_build_on_cpu(tell: Tell) -> None:
    """Optimizer and schedules create scalars with `device="cuda"`."""
    import torch
    from torch.utils import _device

    # `with torch.device("meta")` knows the factories by identity and looks them up once: it must find torch's own, or transformers
    # takes buffers that were never filled for loaded ones.
    _device._device_constructors()

    def redirected(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def build(*args: Any, **kwargs: Any) -> Any:
            if kwargs.get("device") is not None:
                given, kwargs["device"] = kwargs["device"], to_cpu(kwargs["device"])
                if kwargs["device"] is not given:
                    tell("cuda-factories")
            if kwargs.get("pin_memory"):  # pinning needs an accelerator to pin for
                kwargs["pin_memory"] = False
            return function(*args, **kwargs)

        return build

    for name in (*_FACTORIES, *_LIKE_FACTORIES):
        setattr(torch, name, redirected(getattr(torch, name)))
    for name in ("new_zeros", "new_ones", "new_empty", "new_full", "new_tensor"):
        setattr(torch.Tensor, name, redirected(getattr(torch.Tensor, name)))


def _moves_stay_on_cpu(tell: Tell) -> None:
    """`.cuda()`, `.to("cuda")` and `.pin_memory()` return what they were given."""
    import torch

    def staying() -> Callable[..., Any]:
        def itself(self: Any, *_args: Any, **_kwargs: Any) -> Any:
            tell("cuda-moves")
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


def _type_names_say_cuda(tell: Tell) -> None:
    """`distrib_optimizer.py` and `clip_grads.py` sort parameters by `Tensor.type()` and accept only the CUDA names."""
    import torch

    plain = torch.Tensor.type

    @functools.wraps(plain)
    def type_(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is not None:
            return plain(self, dtype, *args, **kwargs)
        tell("cuda-type-names")
        name = str(plain(self))
        return name.replace("torch.", "torch.cuda.", 1) if name.startswith("torch.") and "cuda" not in name else name

    torch.Tensor.type = type_


def _memory_is_zero(tell: Tell) -> None:
    """Cache emptying and memory counters, called around checkpoints and by timers."""
    import torch

    name = "cuda-memory"
    for call in ("empty_cache", "ipc_collect", "reset_peak_memory_stats", "reset_max_memory_allocated", "set_per_process_memory_fraction"):
        setattr(torch.cuda, call, _answers(tell, name))
    for call in ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"):
        setattr(torch.cuda, call, _answers(tell, name, 0))
    _set(torch.cuda, memory_stats=_answers(tell, name, {}), mem_get_info=_answers(tell, name, (1 << 33, 1 << 34)))


def _groups_are_gloo(tell: Tell) -> None:
    """Megatron-Bridge and its tests ask for nccl by name when they make process groups."""
    import torch

    plain, plain_init = torch.distributed.new_group, torch.distributed.init_process_group

    @functools.wraps(plain)
    def new_group(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("backend") is not None:
            kwargs["backend"] = "gloo"
            tell("nccl-groups")
        return plain(*args, **kwargs)

    @functools.wraps(plain_init)
    def init_process_group(backend: Any = None, *args: Any, **kwargs: Any) -> Any:
        if isinstance(backend, str) and "nccl" in backend:
            backend = "gloo"
            tell("nccl-groups")
        return plain_init(backend, *args, **kwargs)

    _set(torch.distributed, new_group=new_group, init_process_group=init_process_group)
