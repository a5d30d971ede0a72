"""Names of local layers in a family's mapping registry, where the family maps only those of Transformer Engine.

Shims local-norm-names and local-expert-names: the mappings themselves stay the family's own, under the names that local layers have.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from seatrial.probes.megatron import shims

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
            shims.dropped("local-norm-names", "upstream maps the norms of local layers itself")
        elif fused in known:
            shims.used("local-norm-names")
            yield _renamed(known[fused], local)


def _experts(known: Mapping[str, Any]) -> Iterator[Any]:
    for name, mapping in known.items():
        for layer in EXPERTS:
            fused = f".experts.{layer}.weight*"
            local = name.replace(fused, f".experts.local_experts.*.{layer}.weight")
            if name.endswith(fused) and local not in known:
                shims.used("local-expert-names")
                yield _renamed(mapping, local)


def _renamed(mapping: Any, name: str) -> Any:
    """The same mapping under another Megatron name: its class may do more than copy, such as centre a norm around zero."""
    other = copy.copy(mapping)
    other.megatron_param = name
    return other
