"""Where the tensors of a dense Megatron decoder belong in a Hugging Face model, worked out without Megatron-Bridge.

Megatron fuses query, key and value into one tensor, by groups of heads: the queries of a group, then its key, then its value;
and gate and up projection into one, the gate first. An adapter of a fused layer has one A for all its parts, and its B is
cut as the layer is. This is the second opinion on what the Bridge exports: the two must agree bit for bit.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

WHOLE = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
}
LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
NORMS = {"input_layernorm.weight": "input_layernorm.weight", "pre_mlp_layernorm.weight": "post_attention_layernorm.weight"}
PARTS = {
    "self_attention.linear_qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attention.linear_proj": ("self_attn.o_proj",),
    "mlp.linear_fc1": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.linear_fc2": ("mlp.down_proj",),
}
ENDS = {
    "weight": "weight",
    "bias": "bias",
    "to_wrap.weight": "weight",
    "to_wrap.bias": "bias",
    "adapter.linear_in.weight": "lora_A.weight",
    "adapter.linear_out.weight": "lora_B.weight",
}


def layers(name: str) -> list[str]:
    """The linear layers that a fused one stands for; the name itself, if this layout does not know it."""
    found = LAYER.fullmatch(name)
    parts = PARTS.get(found[2]) if found else None
    return [f"model.layers.{found[1]}.{part}" for part in parts] if found and parts else [name]


def exported(named: Mapping[str, Any], groups: int, head: int) -> dict[str, Any] | None:
    """The tensors by their names in the other model; None if there is one that this layout does not know."""
    made: dict[str, Any] = {}
    for name, value in named.items():
        found = LAYER.fullmatch(name)
        if name in WHOLE:
            made[WHOLE[name]] = value
        elif found and found[2] in NORMS:
            made[f"model.layers.{found[1]}.{NORMS[found[2]]}"] = value
        elif found and (parts := _parts(found[2], value, groups, head)):
            made.update({f"model.layers.{found[1]}.{key}": part for key, part in parts.items()})
        else:
            return None
    return made


def _parts(name: str, value: Any, groups: int, head: int) -> dict[str, Any]:
    """One tensor of a linear layer as its parts; empty if there is no such layer."""
    layer = next((layer for layer in PARTS if name.startswith(layer + ".")), None)
    end = ENDS.get(name[len(layer) + 1 :]) if layer else None
    if layer is None or end is None:
        return {}
    cut = [value] * len(PARTS[layer]) if end == "lora_A.weight" else _cut(layer, value, groups, head)
    return {f"{part}.{end}": piece for part, piece in zip(PARTS[layer], cut, strict=True)}


def _cut(layer: str, value: Any, groups: int, head: int) -> list[Any]:
    if layer == "mlp.linear_fc1":
        return list(value.chunk(2))
    if layer != "self_attention.linear_qkv":
        return [value]
    rows = value.reshape(groups, -1, head, *value.shape[1:])
    return [piece.reshape(-1, *value.shape[1:]) for piece in (rows[:, :-2], rows[:, -2:-1], rows[:, -1:])]
