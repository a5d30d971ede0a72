"""What Seatrial adds to verl, through verl's own registries: loaded into each of its processes by VERL_USE_EXTERNAL_MODULES.

- The platform is registered through verl's own registry (`PlatformRegistry`), so the rest of verl asks it and not CUDA.
- The trainer finds the generation server here, the worker the other end of the weight sync, and its engines: those of the module
  in this folder that SEATRIAL_ENGINE names.
- Ray is asked for one logical GPU, since verl places its workers by that resource.
- Two functions of torch and one of verl are replaced, each for a reason stated where it happens; no file of verl is touched.
"""

from __future__ import annotations

import importlib
import os
import random
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry, set_platform
from verl.workers.rollout.base import _ROLLOUT_REGISTRY
from verl.workers.rollout.replica import RolloutReplicaRegistry

from seatrial.instruments.megatron import import_patches

NAME = "seatrial"
"""The rollout's name in verl's configuration."""
_PORTS = range(20000, 30000)
"""Below what Linux gives to connections (32768 and up)."""


def _nothing(*_: Any, **__: Any) -> None:
    """For what a CPU has no need of."""


def _module() -> types.ModuleType:
    """`torch.cpu` with the functions that verl calls on `torch.cuda`."""
    made = types.ModuleType("seatrial_cpu_device")
    vars(made).update({name: value for name, value in vars(torch.cpu).items() if not name.startswith("__")})
    for name in ("empty_cache", "ipc_collect", "set_device", "set_per_process_memory_fraction"):
        setattr(made, name, _nothing)
    for name in ("max_memory_allocated", "max_memory_reserved", "memory_allocated", "memory_reserved"):
        setattr(made, name, lambda *_, **__: 0)
    made.mem_get_info = lambda *_: (0, 0)  # type: ignore[attr-defined]
    made.get_device_name = lambda *_: "cpu"  # type: ignore[attr-defined]
    made.get_rng_state, made.set_rng_state = torch.get_rng_state, torch.set_rng_state  # type: ignore[attr-defined]
    return made


DEVICE = _module()


@PlatformRegistry.register(platform="cpu")
class CpuPlatform(PlatformBase):  # type: ignore[misc]
    """See verl's PlatformBase for the contract."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = DEVICE

    def is_available(self) -> bool:
        return True

    def current_device(self) -> Any:
        """A device, not an index: `tensor.to(0)` would mean the first accelerator."""
        return torch.device("cpu")

    def device_count(self) -> int:
        return 1

    set_device = synchronize = empty_cache = set_allocator_settings = profiler_start = profiler_stop = staticmethod(_nothing)
    cudart = staticmethod(_nothing)
    manual_seed = manual_seed_all = staticmethod(torch.manual_seed)

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False


def _patch_torch() -> None:
    start = torch.distributed.init_process_group

    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        # verl asks for "cpu:gloo,<device>:<backend>", which names the CPU twice here: ValueError in torch.
        if kwargs.get("backend") == "cpu:gloo,cpu:gloo":
            kwargs["backend"] = "gloo"
        return start(*args, **kwargs)

    torch.distributed.init_process_group = init_process_group
    # FSDP2 pins what its reference model offloads, and pinning needs an accelerator.
    torch.Tensor.pin_memory = lambda self, *_, **__: self


def _patch_ports(module: types.ModuleType) -> None:
    """verl asks the kernel for a free port, closes it, and listens there seconds later, when the worker has imported torch. On a busy
    machine another process was given it meanwhile: EADDRINUSE. A range is verl's own option; it starts anywhere in ours, so that two
    trainings do not ask for the same port either."""
    group = module.RayWorkerGroup
    ask = group._get_master_addr_port

    def get(self: Any, pg: Any, bundle_index: int = 0, master_port_range: Any = None) -> Any:
        start = random.SystemRandom().choice(_PORTS)
        return ask(self, pg, bundle_index, master_port_range or [start, start + 100])

    group._get_master_addr_port = get


def _replica() -> type:
    from seatrial.instruments.verl.generation_server import Replica

    return Replica


def _engines(_: types.ModuleType) -> None:
    if engine := os.environ.get("SEATRIAL_ENGINE"):
        importlib.import_module(f"seatrial.instruments.verl.{engine}")


set_platform(CpuPlatform())
_patch_torch()
import_patches.after("verl.single_controller.ray.base", _patch_ports)
# verl has no function to add to this table.
_ROLLOUT_REGISTRY[(NAME, "async")] = "seatrial.instruments.verl.generation_server.Adapter"
RolloutReplicaRegistry.register(NAME, _replica)
# Seconds for each process: only where verl itself imports its engines.
import_patches.after("verl.workers.engine", _engines)
