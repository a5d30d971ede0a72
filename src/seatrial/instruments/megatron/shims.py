"""Lets released Megatron-Core and Megatron-Bridge run where there is no CUDA or no Transformer Engine: every shim, in one table.

- Nothing of upstream is edited: modules are patched as they are imported, calls of `torch.cuda` get their CPU meaning. `report` says which
  shims a run really used: a limitation of whatever it shows.
- `add` gives a family's mapping registry the names of local layers where it maps only those of Transformer Engine.
- As a pytest plugin (`-p seatrial.instruments.megatron.shims`) it runs the Bridge's own tests with all shims and leaves in
  `$SEATRIAL_IMPORTED` the files that Megatron came from and the shims that took part. Of 778 tests of the Bridge at 067f987df the whole
  table lets 682 pass, the import shims alone 650. Without torch nothing is installed: the tests then say themselves what they lack.
"""

from __future__ import annotations

import ast
import copy
import functools
import importlib.util
import inspect
import json
import os
import sys
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from seatrial.instruments.megatron import import_patches


@dataclass(frozen=True)
class Shim:
    stands_for: str
    """The upstream place that fails without it."""
    reason: str


TABLE: dict[str, Shim] = {
    "typing-override": Shim("megatron/training/models/gpt.py: from typing import override", "Megatron >= 0.17 is written for Python 3.12"),
    "triton": Shim(
        "megatron/core/transformer/moe/ops/paged_stash.py, megatron/core/ssm/ops/*.py: import triton",
        "an unguarded import of Triton for paged activations of experts and for state-space layers, which no model here uses",
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
    "local-expert-names": Shim(
        "megatron/bridge/models/*/*_bridge.py: mapping_registry",
        "local experts are modules of their own, and the family maps only the experts grouped by Transformer Engine",
    ),
    "no-compile": Shim("megatron/core/jit.py: torch.compile", "the compiler asks CUDA for the device; functions run as they are written"),
    "sequence-parallel-norms": Shim(
        "megatron/core/transformer/torch_norm.py: assert not config.sequence_parallel",
        "local norms refuse sequence parallel; the norm of a piece of the sequence is the same, and Megatron adds up its gradients",
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
_KERNELS = (
    *("megatron.core.transformer.moe.ops.paged_stash", "megatron.core.transformer.moe.paged_stash"),
    *(f"megatron.core.ssm.ops.ssd_{name}" for name in ("bmm", "chunk_scan", "chunk_state", "combined", "state_passing")),
    *("megatron.core.ssm.ops.batch_invariant_decode", "megatron.core.ssm.ops.causal_conv1d_varlen"),
)
"""Modules that may import Triton without a guard: expert stashing since 0.19, the state-space kernels since 0.20."""
_WITHOUT_ENGINE = (
    *("te-names", "local-layers", "local-norm-names", "local-expert-names", "sequence-parallel-norms"),
    *("peft-without-te", "fresh-adam", "adam-step"),
)
_used: set[str] = set()
_dropped: dict[str, str] = {}


def used(name: str) -> None:
    _used.add(name)


def dropped(name: str, why: str) -> None:
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
    from seatrial.instruments.megatron import cuda_on_cpu

    if not cuda_on_cpu.install(used):
        for name in TABLE:
            if name.startswith(("cuda-", "nccl-", "all-to-all", "no-compile")):
                dropped(name, "this machine has CUDA")
    else:
        import_patches.after("megatron.core.tensor_parallel.mappings", _sizes_are_lists)
        _nothing_is_compiled()
    _typing_has_override()
    _absent_packages()
    if importlib.util.find_spec("transformer_engine") is not None:
        for name in _WITHOUT_ENGINE:
            dropped(name, "Transformer Engine is installed")
        return
    import_patches.after("megatron.core.models.gpt.gpt_layer_specs", _specs_without_transformer_engine)
    import_patches.after("megatron.bridge.models.gpt_provider", _layers_without_transformer_engine)
    import_patches.after("megatron.core.transformer.torch_norm", _norms_of_sequence_parallel)
    import_patches.after("megatron.bridge.peft.utils", _adapters_without_transformer_engine)
    import_patches.after("megatron.core.optimizer.distrib_optimizer", _fresh_adam_can_load)
    import_patches.after("megatron.core.optimizer.distrib_optimizer", _loaded_adam_keeps_its_step)


def _nothing_is_compiled() -> None:
    """As TORCHDYNAMO_DISABLE=1 does, which torch reads as it is imported: too early for a module that other processes import."""
    from torch._dynamo import config

    config.disable = True
    used("no-compile")


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
        ("triton", "triton", _KERNELS, _triton),
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
    for node in ast.parse(source).body:
        if isinstance(node, ast.Import) and any(alias.name.partition(".")[0] == root for alias in node.names):
            return True
        if isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").partition(".")[0] == root:
            return True
    return False


def _triton() -> ModuleType:
    """Modules of kernels use `triton.jit`, `triton.autotune` and the version as they are imported."""

    def jit(function: Any) -> Any:
        @functools.wraps(function)
        def refuse(*_args: object, **_kwargs: object) -> None:
            raise RuntimeError(f"{function.__name__} is a Triton kernel; Triton is not installed on this machine")

        return refuse

    triton = ModuleType("triton")
    language = ModuleType("triton.language")
    language.constexpr = language.int64 = object  # type: ignore[attr-defined]  # annotations
    triton.language = language  # type: ignore[attr-defined]
    triton.jit = jit  # type: ignore[attr-defined]
    triton.autotune = lambda *_args, **_kwargs: lambda kernel: kernel  # type: ignore[attr-defined]
    triton.Config = lambda *_args, **_kwargs: None  # type: ignore[attr-defined]
    triton.__version__ = "0.0.0"  # type: ignore[attr-defined]
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


def _specs_without_transformer_engine(module: ModuleType) -> None:
    """Some families take their layers from Megatron-Core and ask for Transformer Engine's; what local layers do not know is left out."""
    local, block = module.get_gpt_layer_local_spec, module.get_gpt_decoder_block_spec
    known = set(inspect.signature(local).parameters)

    def layers(*args: Any, **settings: Any) -> Any:
        used("local-layers")
        return local(*args, **{name: value for name, value in settings.items() if name in known})

    @functools.wraps(block)
    def blocks(config: Any, _use_transformer_engine: bool = False, **settings: Any) -> Any:
        used("local-layers")
        settings.pop("use_transformer_engine", None)
        return block(config, False, **settings)

    module.get_gpt_layer_with_transformer_engine_spec = layers  # type: ignore[attr-defined]
    module.get_gpt_decoder_block_spec = blocks  # type: ignore[attr-defined]


def _layers_without_transformer_engine(module: ModuleType) -> None:
    """Every provider asks for Transformer Engine layers by default; take Megatron's own local layers instead."""

    def layers(config: Any) -> Any:
        used("local-layers")
        return module.local_layer_spec(config)

    module.transformer_engine_layer_spec = layers  # type: ignore[attr-defined]


def _norms_of_sequence_parallel(module: ModuleType) -> None:
    """Build the norm as for the whole sequence; the mark makes Megatron add up its gradients over the ranks."""
    plain = module.WrappedTorchNorm.__new__

    def build(cls: Any, config: Any, *args: Any, **kwargs: Any) -> Any:
        if not config.sequence_parallel:
            return plain(cls, config, *args, **kwargs)
        used("sequence-parallel-norms")
        whole = copy.copy(config)
        whole.sequence_parallel = False
        made = plain(cls, whole, *args, **kwargs)
        for value in made.parameters():
            value.sequence_parallel = True
        return made

    module.WrappedTorchNorm.__new__ = build


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
    """Megatron reads the step out of the state to describe what it wants to load; FusedAdam has it in its parameter group. Give every
    parameter the state of step 0; the load fills it."""
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
    """With torch's AdamW a loaded distributed optimizer gets the wrong step count. FusedAdam keeps the step in the parameter group, torch
    keeps one tensor per parameter. Megatron's load puts ONE tensor into the state of every parameter (each update then counts it up once
    per parameter) and, for `dp_reshardable` checkpoints, leaves the step of the running optimizer there. The parameter group does hold
    the saved step: give every parameter its own copy of it."""
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


NORMS = {
    "decoder.layers.*.self_attention.linear_qkv.layer_norm_weight": "decoder.layers.*.input_layernorm.weight",
    "decoder.layers.*.self_attention.linear_qkv.layer_norm_bias": "decoder.layers.*.input_layernorm.bias",
    "decoder.layers.*.mlp.linear_fc1.layer_norm_weight": "decoder.layers.*.pre_mlp_layernorm.weight",
    "decoder.layers.*.mlp.linear_fc1.layer_norm_bias": "decoder.layers.*.pre_mlp_layernorm.bias",
}
"""What Transformer Engine fuses into a linear layer, and where local layers keep it."""
EXPERTS = ("linear_fc1", "linear_fc2")
"""Of grouped experts one parameter holds them all; local experts are modules of their own."""


def add(bridge: Any) -> None:
    """Make the registry of this model's family know local names, too."""
    from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry

    owner = type(bridge._model_bridge)
    plain = owner.mapping_registry
    if getattr(plain, "_seatrial", False):
        return

    def mapping_registry(self: Any) -> Any:
        registry = plain(self)
        known = {mapping.megatron_param: mapping for mapping in registry}
        extra = [*_norms(known), *_experts(known)]
        return MegatronMappingRegistry(*registry, *extra) if extra else registry

    mapping_registry._seatrial = True  # type: ignore[attr-defined]
    owner.mapping_registry = mapping_registry


def _norms(known: Mapping[str, Any]) -> Iterator[Any]:
    for fused, local in NORMS.items():
        if fused in known and local in known:
            dropped("local-norm-names", "upstream maps the norms of local layers itself")
        elif fused in known:
            used("local-norm-names")
            yield _renamed(known[fused], local)


def _experts(known: Mapping[str, Any]) -> Iterator[Any]:
    for name, mapping in known.items():
        for layer in EXPERTS:
            fused = f".experts.{layer}.weight*"
            local = name.replace(fused, f".experts.local_experts.*.{layer}.weight")
            if name.endswith(fused) and local not in known:
                used("local-expert-names")
                yield _renamed(mapping, local)


def _renamed(mapping: Any, name: str) -> Any:
    """The same mapping under another Megatron name: its class may do more than copy, such as centre a norm around zero."""
    other = copy.copy(mapping)
    other.megatron_param = name
    return other


IMPORTED = "SEATRIAL_IMPORTED"
PACKAGES = ("megatron.bridge", "megatron.core")


def pytest_load_initial_conftests() -> None:
    if importlib.util.find_spec("torch") is not None:
        install()


def pytest_sessionfinish() -> None:
    files = {name: getattr(sys.modules.get(name), "__file__", None) for name in PACKAGES}
    used = [row["id"] for row in report() if row["state"] == "used"]
    Path(os.environ[IMPORTED]).write_text(json.dumps({"files": files, "shims": used}), encoding="utf-8")
