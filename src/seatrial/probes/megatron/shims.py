"""What lets released Megatron-Core and Megatron-Bridge run where there is no CUDA or no Transformer Engine: every shim, in one table.

- Nothing of upstream is edited: modules are patched as they are imported, calls of `torch.cuda` get their CPU meaning.
- Each shim names the upstream place that it stands in for and why. `report` says which of them this run really used: that is a
  limitation of whatever the run shows.
- A shim that this machine or this upstream does not need is not applied, and the report says why it was dropped.

What then runs is Megatron-Core's own local layers in place of Transformer Engine's, and torch's AdamW in place of FusedAdam.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import typing
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from seatrial.probes.megatron import import_patches


@dataclass(frozen=True)
class Shim:
    """One stand-in."""

    stands_for: str
    """The upstream place that fails without it."""
    reason: str


TABLE: dict[str, Shim] = {
    "typing-override": Shim("megatron/training/models/gpt.py: from typing import override", "Megatron >= 0.17 is written for Python 3.12"),
    "triton": Shim(
        "megatron/core/transformer/moe/ops/paged_stash.py: import triton",
        "an unguarded import of Triton for paged activations of experts, which no model here uses",
    ),
    "te-names": Shim(
        "megatron/bridge/peft/lora_layers.py: import transformer_engine.pytorch",
        "LoRA compares with classes of Transformer Engine, which it imports without a guard",
    ),
    "local-layers": Shim(
        "megatron/bridge/models/gpt_provider.py: transformer_engine_layer_spec",
        "providers ask for layers of Transformer Engine; Megatron's own local layers take their place",
    ),
    "local-norm-names": Shim(
        "megatron/bridge/models/*/*_bridge.py: mapping_registry",
        "local layers keep their norms in modules of their own, and the family maps only the names fused by Transformer Engine",
    ),
    "peft-without-te": Shim(
        "megatron/bridge/peft/utils.py: HAVE_TE", "the flag is True without Transformer Engine, whose names are then no classes"
    ),
    "fresh-adam": Shim(
        "megatron/core/optimizer/distrib_optimizer.py: sharded_state_dict", "a torch AdamW that never stepped has no state to load into"
    ),
    "adam-step": Shim(
        "megatron/core/optimizer/distrib_optimizer.py: load_state_dict", "a loaded torch AdamW shares one step count, or keeps a wrong one"
    ),
    "all-to-all-sizes": Shim(
        "megatron/core/tensor_parallel/mappings.py: all_to_all_single", "gloo wants the sizes of a split as a list, not as a tensor"
    ),
    "cuda-device": Shim("torch.cuda.current_device in rotary embeddings, gradient buffers, mappings", "the device is the CPU"),
    "cuda-generators": Shim("megatron/core/tensor_parallel/random.py", "the CPU generator plays the part of the CUDA generators"),
    "cuda-streams": Shim("megatron/core/distributed/param_and_grad_buffer.py", "work on a CPU is done when the call returns"),
    "cuda-factories": Shim("megatron/core/optimizer/optimizer.py: device='cuda'", "tensors are made on the CPU"),
    "cuda-moves": Shim("Tensor.cuda, Module.cuda, pin_memory", "nothing moves"),
    "cuda-type-names": Shim("megatron/core/optimizer/distrib_optimizer.py: Tensor.type()", "parameters are sorted by CUDA's type names"),
    "cuda-memory": Shim("megatron/core/dist_checkpointing/strategies: empty_cache", "there is no device memory to count or to free"),
    "nccl-groups": Shim("megatron/bridge/models/model_provider.py: backend='nccl'", "groups are made with gloo"),
}
_used: set[str] = set()
_dropped: dict[str, str] = {}


def used(name: str) -> None:
    """A shim took part in what ran."""
    _used.add(name)


def dropped(name: str, why: str) -> None:
    """A shim is not needed, and not applied."""
    _dropped[name] = why


def report() -> list[dict[str, str]]:
    """One row per shim: used, not reached by what ran, or dropped with the reason."""
    states = {name: "dropped" if name in _dropped else "used" if name in _used else "not reached" for name in TABLE}
    return [
        {"id": name, "stands_for": shim.stands_for, "reason": shim.reason, "state": states[name], "note": _dropped.get(name, "")}
        for name, shim in TABLE.items()
    ]


def install() -> None:
    """Apply every shim that is needed here. Megatron must not have been imported before."""
    from seatrial.probes.megatron import cuda_on_cpu

    if not cuda_on_cpu.install(used):
        for name in TABLE:
            if name.startswith(("cuda-", "nccl-", "all-to-all")):
                dropped(name, "this machine has CUDA")
    else:
        import_patches.after("megatron.core.tensor_parallel.mappings", _sizes_are_lists)
    _typing_has_override()
    _absent_packages()
    if importlib.util.find_spec("transformer_engine") is not None:
        for name in ("te-names", "local-layers", "local-norm-names", "peft-without-te", "fresh-adam", "adam-step"):
            dropped(name, "Transformer Engine is installed")
        return
    import_patches.after("megatron.bridge.models.gpt_provider", _layers_without_transformer_engine)
    import_patches.after("megatron.bridge.peft.utils", _adapters_without_transformer_engine)
    import_patches.after("megatron.core.optimizer.distrib_optimizer", _fresh_adam_can_load)
    import_patches.after("megatron.core.optimizer.distrib_optimizer", _loaded_adam_keeps_its_step)


def _typing_has_override() -> None:
    if hasattr(typing, "override"):
        dropped("typing-override", "this Python has it")
        return

    def override(method: Any) -> Any:
        used("typing-override")
        return method

    typing.override = override  # type: ignore[attr-defined]


def _absent_packages() -> None:
    """Packages that one module imports without a guard: a stand-in inside that module alone."""
    for name, root, modules, make in (
        ("triton", "triton", ("megatron.core.transformer.moe.ops.paged_stash", "megatron.core.transformer.moe.paged_stash"), _triton),
        ("te-names", "transformer_engine", ("megatron.bridge.peft.lora_layers", "megatron.bridge.peft.lora"), _transformer_engine),
    ):
        if importlib.util.find_spec(root) is not None:
            dropped(name, f"{root} is installed")
            continue
        stand_in = make()
        for module in modules:
            import_patches.supply(module, root, stand_in, functools.partial(_needed, name, root))


def _needed(name: str, root: str, source: str) -> bool:
    """Whether a module of this source needs the stand-in; upstream may have put a guard around its import."""
    if _unguarded(source, root):
        used(name)
        _dropped.pop(name, None)
        return True
    if name not in _used:
        dropped(name, f"upstream imports {root} behind a guard now")
    return False


def _unguarded(source: str, root: str) -> bool:
    """Whether a module imports a package at its top level outside of any `try`."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.Import) and any(alias.name.partition(".")[0] == root for alias in node.names):
            return True
        if isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").partition(".")[0] == root:
            return True
    return False


def _triton() -> ModuleType:
    """`moe/ops/paged_stash.py` uses `triton.jit` as it is imported."""

    def jit(function: Any) -> Any:
        @functools.wraps(function)
        def refuse(*_args: object, **_kwargs: object) -> None:
            raise RuntimeError(f"{function.__name__} is a Triton kernel; Triton is not installed on this machine")

        return refuse

    triton = ModuleType("triton")
    language = ModuleType("triton.language")
    language.constexpr = object  # type: ignore[attr-defined]
    triton.language = language  # type: ignore[attr-defined]
    triton.jit = jit  # type: ignore[attr-defined]
    return triton


def _transformer_engine() -> ModuleType:
    """Classes that nothing is an instance of: no model here is made of Transformer Engine's layers."""
    import torch

    def refuse(*_args: object, **_kwargs: object) -> None:
        raise RuntimeError("Transformer Engine is not installed on this machine")

    name = "transformer_engine"
    root, pytorch, ops = ModuleType(name), ModuleType(f"{name}.pytorch"), ModuleType(f"{name}.pytorch.ops")
    for layer in ("Linear", "LayerNormLinear", "GroupedLinear"):
        setattr(pytorch, layer, type(layer, (torch.nn.Module,), {"__init__": refuse}))
    ops.Sequential = type("Sequential", (torch.nn.Module,), {"__init__": refuse})  # type: ignore[attr-defined]
    pytorch.ops = ops  # type: ignore[attr-defined]
    root.pytorch = pytorch  # type: ignore[attr-defined]
    return root


def _layers_without_transformer_engine(module: ModuleType) -> None:
    """Every provider asks for Transformer Engine layers by default; take Megatron's own local layers instead."""

    def layers(config: Any) -> Any:
        used("local-layers")
        return module.local_layer_spec(config)

    module.transformer_engine_layer_spec = layers  # type: ignore[attr-defined]


def _adapters_without_transformer_engine(module: ModuleType) -> None:
    if module.HAVE_TE:
        module.HAVE_TE = False  # type: ignore[attr-defined]
        used("peft-without-te")
    else:
        dropped("peft-without-te", "upstream says itself that Transformer Engine is absent")


def _sizes_are_lists(module: ModuleType) -> None:
    """`_AllToAll` hands its split sizes to torch as it was given them, and the dispatcher keeps them as tensors."""
    plain = module.all_to_all

    @functools.wraps(plain)
    def all_to_all(group: Any, input_: Any, output_split_sizes: Any = None, input_split_sizes: Any = None, **rest: Any) -> Any:
        sizes = [output_split_sizes, input_split_sizes]
        for place, value in enumerate(sizes):
            if hasattr(value, "tolist"):
                used("all-to-all-sizes")
                sizes[place] = value.tolist()
        return plain(group, input_, *sizes, **rest)

    module.all_to_all = all_to_all  # type: ignore[attr-defined]


def _fresh_adam_can_load(module: ModuleType) -> None:
    """Megatron reads the step out of the state to describe what it wants to load; FusedAdam has it in its parameter group.

    Give every parameter the state of step 0; the load fills it.
    """
    import torch

    plain = module.DistributedOptimizer.sharded_state_dict

    @functools.wraps(plain)
    def sharded_state_dict(self: Any, model_sharded_state_dict: Any, is_loading: bool = False, *args: Any, **kwargs: Any) -> Any:
        if is_loading and not self.optimizer.state:
            used("fresh-adam")
            for group in self.optimizer.param_groups:
                for parameter in group["params"]:
                    moments = {name: torch.zeros_like(parameter.data) for name in ("exp_avg", "exp_avg_sq")}
                    self.optimizer.state[parameter] = {"step": torch.tensor(0.0), **moments}
        return plain(self, model_sharded_state_dict, is_loading, *args, **kwargs)

    module.DistributedOptimizer.sharded_state_dict = sharded_state_dict


def _loaded_adam_keeps_its_step(module: ModuleType) -> None:
    """With torch's AdamW a loaded distributed optimizer gets the wrong step count.

    FusedAdam keeps the step in the parameter group, torch keeps one tensor per parameter. Megatron's load puts ONE tensor into the state
    of every parameter (each update then counts it up once per parameter) and, for `dp_reshardable` checkpoints, leaves the step of the
    running optimizer there. The parameter group does hold the saved step: give every parameter its own copy of it.
    """
    import torch

    plain = module.DistributedOptimizer.load_state_dict

    @functools.wraps(plain)
    def load_state_dict(self: Any, state_dict: Any) -> None:
        plain(self, state_dict)
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                if "step" in group and "step" in self.optimizer.state.get(parameter, {}):
                    used("adam-step")
                    self.optimizer.state[parameter]["step"] = torch.tensor(float(group["step"]))

    module.DistributedOptimizer.load_state_dict = load_state_dict
