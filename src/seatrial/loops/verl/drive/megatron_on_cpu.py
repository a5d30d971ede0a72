"""Let released Megatron-Core and Megatron-Bridge build, train, export and save a dense model on a CPU: importing this installs it.

It stands in VERL_USE_EXTERNAL_MODULES before everything that imports Megatron. Nothing of Megatron's is edited: modules are patched
as they are imported, and what each patch stands for is written at its function. What runs is Megatron-Core's own local layers in
place of Transformer Engine's, and torch's AdamW in place of FusedAdam.
"""

from __future__ import annotations

import functools
import typing
from types import ModuleType
from typing import Any

import torch

from seatrial.loops.verl.drive import cuda_on_cpu, import_patches


def install() -> None:
    """Register every patch."""
    cuda_on_cpu.install()
    _typing_has_override()
    import_patches.supply("megatron.core.transformer.moe.paged_stash", "triton", _triton_stand_in())
    for module in ("megatron.bridge.peft.lora_layers", "megatron.bridge.peft.lora"):
        import_patches.supply(module, "transformer_engine", _transformer_engine_stand_in())
    import_patches.after("megatron.bridge.models.gpt_provider", _layers_without_transformer_engine)
    import_patches.after("megatron.bridge.peft.utils", _adapters_without_transformer_engine)
    import_patches.after("megatron.core.optimizer.distrib_optimizer", _fresh_adam_can_load)
    import_patches.after("megatron.core.optimizer.distrib_optimizer", _loaded_adam_keeps_its_step)
    import_patches.after("megatron.core.transformer.dot_product_attention", _causal_attention_ignores_padding_mask)


def _typing_has_override() -> None:
    """Megatron >= 0.17 is written for Python 3.12 and takes `override`, a mark for type checkers, from typing."""
    if not hasattr(typing, "override"):
        typing.override = lambda method: method  # type: ignore[attr-defined]


def _triton_stand_in() -> ModuleType:
    """`moe/paged_stash.py` (paged activations of MoE, never reached by a dense model) uses `triton.jit` as it is imported."""

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


class _Absent(torch.nn.Module):  # type: ignore[misc]
    """A Transformer Engine layer that no model here is made of: it only has to be a class that nothing is an instance of."""

    def __init__(self, *_args: object, **_kwargs: object) -> None:
        raise RuntimeError("Transformer Engine is not installed on this machine")


def _transformer_engine_stand_in() -> ModuleType:
    """`peft/lora.py` and `peft/lora_layers.py` import Transformer Engine without a guard and subclass or compare its classes."""
    name = "transformer_engine"
    root, pytorch, ops = ModuleType(name), ModuleType(f"{name}.pytorch"), ModuleType(f"{name}.pytorch.ops")
    for layer in ("Linear", "LayerNormLinear", "GroupedLinear"):
        setattr(pytorch, layer, type(layer, (_Absent,), {}))
    ops.Sequential = type("Sequential", (_Absent,), {})  # type: ignore[attr-defined]
    pytorch.ops = ops  # type: ignore[attr-defined]
    root.pytorch = pytorch  # type: ignore[attr-defined]
    return root


def _layers_without_transformer_engine(module: ModuleType) -> None:
    """Every provider asks for Transformer Engine layers by default; take Megatron's own local layers instead."""
    module.transformer_engine_layer_spec = module.local_layer_spec  # type: ignore[attr-defined]


def _adapters_without_transformer_engine(module: ModuleType) -> None:
    """Without Transformer Engine its layer names import as placeholders that are not classes, and `isinstance` refuses them."""
    module.HAVE_TE = False  # type: ignore[attr-defined]


def _causal_attention_ignores_padding_mask(module: ModuleType) -> None:
    """The engine of verl hands over a (batch, sequence) mask with True = real token, which Transformer Engine ignores for causal attention.

    Megatron's local attention would read it as "True = masked out" and drop the causal mask. Rows are padded on the right, so the causal
    mask alone keeps padding away from every real token.
    """
    plain = module.DotProductAttention.forward

    @functools.wraps(plain)
    def forward(self: Any, query: Any, key: Any, value: Any, attention_mask: Any, *args: Any, **kwargs: Any) -> Any:
        if attention_mask is not None and attention_mask.dim() == 2:
            attention_mask = None
        return plain(self, query, key, value, attention_mask, *args, **kwargs)

    module.DotProductAttention.forward = forward


def _fresh_adam_can_load(module: ModuleType) -> None:
    """A fresh torch AdamW has no state, and Megatron reads the step out of that state to describe what it wants to load.

    FusedAdam has the step in its parameter group and does not come here. Give every parameter the state of step 0; the load fills it.
    """
    plain = module.DistributedOptimizer.sharded_state_dict

    @functools.wraps(plain)
    def sharded_state_dict(self: Any, model_sharded_state_dict: Any, is_loading: bool = False, *args: Any, **kwargs: Any) -> Any:
        if is_loading and not self.optimizer.state:
            for group in self.optimizer.param_groups:
                for parameter in group["params"]:
                    moments = {name: torch.zeros_like(parameter.data) for name in ("exp_avg", "exp_avg_sq")}
                    self.optimizer.state[parameter] = {"step": torch.tensor(0.0), **moments}
        return plain(self, model_sharded_state_dict, is_loading, *args, **kwargs)

    module.DistributedOptimizer.sharded_state_dict = sharded_state_dict


def _loaded_adam_keeps_its_step(module: ModuleType) -> None:
    """With torch's AdamW (no Transformer Engine, no Apex) a loaded distributed optimizer gets the wrong step count.

    FusedAdam keeps the step in the parameter group, torch keeps one tensor per parameter. Megatron's load puts ONE tensor into the state
    of every parameter (each update then counts it up once per parameter) and, for `dp_reshardable` checkpoints, leaves the step of the
    running optimizer there. The parameter group does hold the saved step: give every parameter its own copy of it.
    """
    plain = module.DistributedOptimizer.load_state_dict

    @functools.wraps(plain)
    def load_state_dict(self: Any, state_dict: Any) -> None:
        plain(self, state_dict)
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                if "step" in group and "step" in self.optimizer.state.get(parameter, {}):
                    self.optimizer.state[parameter]["step"] = torch.tensor(float(group["step"]))

    module.DistributedOptimizer.load_state_dict = load_state_dict


install()
