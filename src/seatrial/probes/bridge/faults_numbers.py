"""Seeded bugs that change what the model computes: settings of the provider, and weights that land on the wrong rank.

Several of them leave the round trip bit-exact: only a forward pass sees them.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

from seatrial.probes.bridge.fault import Fault


def _provider_has(**settings: Any) -> None:
    """The Qwen2 bridge hands out a provider with these settings."""
    from megatron.bridge.models.qwen.qwen2_bridge import Qwen2Bridge

    plain = Qwen2Bridge.provider_bridge

    @functools.wraps(plain)
    def provider_bridge(self: Any, hf_pretrained: Any) -> Any:
        provider = plain(self, hf_pretrained)
        for name, value in settings.items():
            if not hasattr(provider, name):
                raise AttributeError(f"the provider has no {name}: this fault no longer fits the Bridge")
            setattr(provider, name, value)
        return provider

    Qwen2Bridge.provider_bridge = provider_bridge


def _wrong_activation() -> None:
    import torch

    _provider_has(activation_func=torch.nn.functional.gelu)


def _tie_broken() -> None:
    """The last stage keeps what its copy was initialised with."""
    from megatron.bridge.models.conversion.model_bridge import MegatronModelBridge
    from megatron.core.utils import unwrap_model

    def broadcast(_self: Any, model: Any) -> None:
        for chunk in unwrap_model(model):
            if chunk.post_process and not chunk.pre_process:
                chunk.output_layer.weight.data.normal_(0, 0.02)

    MegatronModelBridge._broadcast_shared_embeddings = broadcast


def _shards_swapped() -> None:
    """Both ways, so that the export undoes it."""
    from megatron.bridge.models.conversion.param_mapping import GatedMLPMapping

    scatter, gather = GatedMLPMapping.scatter_to_tp_ranks, GatedMLPMapping.gather_from_tp_ranks

    def scatter_to_tp_ranks(self: Any, splits: Any, *args: Any, **kwargs: Any) -> Any:
        return scatter(self, splits[::-1] if splits else splits, *args, **kwargs)

    def gather_from_tp_ranks(self: Any, tensor: Any) -> Any:
        return gather(self, tensor)[::-1]

    GatedMLPMapping.scatter_to_tp_ranks = scatter_to_tp_ranks
    GatedMLPMapping.gather_from_tp_ranks = gather_from_tp_ranks


def _same_shard() -> None:
    """Every rank takes the first piece, as if it were rank 0."""
    from megatron.bridge.models.conversion.param_mapping import RowParallelMapping

    plain = RowParallelMapping.scatter_to_tp_ranks

    def scatter_to_tp_ranks(self: Any, splits: Any, *args: Any, **kwargs: Any) -> Any:
        return plain(self, [splits[0]] * len(splits) if splits else splits, *args, **kwargs)

    RowParallelMapping.scatter_to_tp_ranks = scatter_to_tp_ranks


def _local_expert_numbers() -> None:
    """Experts keep the number that they have on their rank."""
    from megatron.bridge.models.conversion import model_bridge

    plain = model_bridge._megatron_local_name_to_global

    @functools.wraps(plain)
    def to_global(models: Any, config: Any, param_name: str, vp_stage: Any = None) -> str:
        found: str = plain(models, config, param_name, vp_stage)
        local = re.search(r"\.local_experts\.\d+\.", param_name)
        return re.sub(r"\.local_experts\.\d+\.", local.group(), found) if local else found

    model_bridge._megatron_local_name_to_global = to_global


def _not_finalized(part: str) -> Callable[[], None]:
    """A part of what ends a backward pass is left out."""

    def apply() -> None:
        import importlib

        # The package has a function of the same name as this module.
        setattr(importlib.import_module("megatron.core.distributed.finalize_model_grads"), part, lambda *_args, **_kwargs: None)

    return apply


FAULTS: dict[str, Fault] = {
    "rope-base-wrong": Fault(
        "the provider ignores rope_theta and keeps the default base",
        "qwen2",
        ("parity",),
        "rotary frequency",
        lambda: _provider_has(rotary_base=10000.0),
    ),
    "norm-epsilon-wrong": Fault(
        "the provider keeps Megatron's default epsilon of norms",
        "qwen2",
        ("parity",),
        "input_layernorm",
        lambda: _provider_has(layernorm_epsilon=1e-5),
    ),
    "activation-wrong": Fault("the provider asks for GELU where the model has SiLU", "qwen2", ("parity",), "activation", _wrong_activation),
    "softmax-scale-wrong": Fault(
        "attention is scaled by the size of a head and not by its root",
        "qwen2",
        ("parity",),
        "softmax scale",
        lambda: _provider_has(softmax_scale=1 / 32),
    ),
    "tied-embedding-broken": Fault(
        "the last pipeline stage's copy of the tied embedding is not set after the import", "qwen2", ("pp",), "output_layer", _tie_broken
    ),
    "tp-shard-swapped": Fault(
        "ranks get each other's piece of gate and up, and the export puts them back",
        "qwen2",
        ("tp", "sp"),
        "mlp.linear_fc1",
        _shards_swapped,
    ),
    "tp-shard-repeated": Fault(
        "every rank gets the first piece of row-parallel weights", "qwen2", ("tp", "sp"), "self_attn.o_proj.weight", _same_shard
    ),
    "expert-offset-wrong": Fault(
        "experts of the second rank take the numbers of the first rank's", "qwen3-moe", ("ep",), "experts.2", _local_expert_numbers
    ),
    "sp-gradients-local": Fault(
        "gradients of norms are not added up over ranks",
        "qwen3",
        ("sp",),
        "norm.weight",
        _not_finalized("_allreduce_non_tensor_model_parallel_grads"),
    ),
    "pp-tied-gradients-apart": Fault(
        "the stages of a tied embedding train it apart", "qwen2", ("pp",), "embed_tokens", _not_finalized("_allreduce_word_embedding_grads")
    ),
}
