"""Rung build: the provider builds a model from the HF configuration, and has the values that the configuration says.

Only values whose meaning is certain are compared; the rest is for parity to find.
"""

from __future__ import annotations

from typing import Any

from seatrial.probes.bridge.rank import Rank
from seatrial.probes.bridge.session import unwrapped

SAME: dict[str, tuple[str, ...]] = {
    "hidden_size": ("hidden_size",),
    "num_layers": ("num_hidden_layers",),
    "num_attention_heads": ("num_attention_heads",),
    "vocab_size": ("vocab_size",),
    "layernorm_epsilon": ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps"),
    "rotary_base": ("rope_theta",),
    "seq_length": ("max_position_embeddings",),
    "init_method_std": ("initializer_range",),
    "share_embeddings_and_output_weights": ("tie_word_embeddings",),
}
"""A provider's value, and the names that HF configurations have for it."""
PLAIN_ATTENTION = {"num_query_groups": ("num_key_value_heads",), "kv_channels": ("head_dim",)}
EXPERTS = {
    "num_moe_experts": ("num_experts", "num_local_experts", "n_routed_experts"),
    "moe_router_topk": ("num_experts_per_tok",),
    "moe_ffn_hidden_size": ("moe_intermediate_size",),
    "moe_router_topk_scaling_factor": ("routed_scaling_factor",),
}
DENSE = {"ffn_hidden_size": ("intermediate_size",)}


def run(rank: Rank) -> None:
    """Build without weights."""
    session = rank.session()
    provider = session.provider(load=False)
    (chunk,) = session.build(load=False, provider=provider)
    model = unwrapped(chunk)
    parameters = {name: list(value.shape) for name, value in model.named_parameters()}
    rank.write(
        "build",
        provider=type(session.bridge._model_bridge).__name__,
        parameters=parameters,
        settings=settings(rank.config(), provider),
    )


def settings(config: Any, provider: Any) -> list[dict[str, Any]]:
    """Every value that the configuration says and the provider has to carry: both sides."""
    experts = any(_said(config, name) for name in EXPERTS["num_moe_experts"])
    asked = {**SAME, **(EXPERTS if experts else DENSE), **({} if getattr(provider, "multi_latent_attention", False) else PLAIN_ATTENTION)}
    found = []
    for field, names in asked.items():
        said = next(((name, _said(config, name)) for name in names if _said(config, name) is not None), None)
        if said is not None and hasattr(provider, field):
            found.append({"key": said[0], "config": said[1], "field": field, "provider": _plain(getattr(provider, field))})
    return found


def _said(config: Any, name: str) -> Any:
    """A number of the configuration. transformers 5 keeps the rotary base in `rope_parameters`, some models one per kind of layer."""
    value = getattr(config, name, None)
    if value is None and name == "rope_theta":
        value = (getattr(config, "rope_parameters", None) or {}).get(name)
    return value if isinstance(value, (bool, int, float)) else None


def _plain(value: Any) -> Any:
    return value if isinstance(value, (bool, int, float)) or value is None else str(value)
