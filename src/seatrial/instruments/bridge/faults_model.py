"""Seeded bugs of the model that the Bridge builds: provider settings, weights and names that go to the wrong place or the wrong rank.

- Each patches a class or function of the Bridge; the Bridge does the rest as ever.
- A bug that is wrong in the same way on import and export gives every weight back: only a forward pass (`parity`) can see it.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class BridgeFault:
    """One bug."""

    text: str
    model: str
    """A family that can have it."""
    rungs: tuple[str, ...]
    """Those that must fail by it."""
    named: str
    """What the failure must name: a part of a tensor's, mapping's or module's name."""
    apply: Callable[[], None]


Patch = Callable[[], None]


def _conversion() -> Any:
    from megatron.bridge.models.conversion import param_mapping

    return param_mapping


def _model_bridge() -> Any:
    from megatron.bridge.models.conversion.model_bridge import MegatronModelBridge

    return MegatronModelBridge


def _qwen2() -> Any:
    from megatron.bridge.models.qwen.qwen2_bridge import Qwen2Bridge

    return Qwen2Bridge


def _setting(field: str, value: Any) -> Patch:
    """The family's provider has `value`, whatever the configuration says."""

    def apply() -> None:
        owner = _qwen2()
        plain = owner.provider_bridge

        def provider_bridge(self: Any, hf_pretrained: Any) -> Any:
            provider = plain(self, hf_pretrained)
            setattr(provider, field, value)
            return provider

        owner.provider_bridge = provider_bridge

    return apply


def _registry(change: Callable[[list[Any]], list[Any]]) -> Patch:
    """The family's mappings, changed."""

    def apply() -> None:
        from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry

        owner = _qwen2()
        plain = owner.mapping_registry
        owner.mapping_registry = lambda self: MegatronMappingRegistry(*change(list(plain(self))))

    return apply


def _without_bias(mappings: list[Any]) -> list[Any]:
    return [mapping for mapping in mappings if not mapping.megatron_param.endswith("linear_qkv.bias")]


def _bias_misnamed(mappings: list[Any]) -> list[Any]:
    """The mapping of the bias asks for names that no checkpoint has: the Bridge warns, and goes on without."""
    for mapping in mappings:
        if mapping.megatron_param.endswith("linear_qkv.bias"):
            mapping.hf_param = {key: name.replace("_proj.bias", "_bias") for key, name in mapping.hf_param.items()}
    return mappings


def _norms_exchanged(mappings: list[Any]) -> list[Any]:
    """The norm before attention and the norm before the MLP change places."""
    names = ["model.layers.*.input_layernorm.weight", "model.layers.*.post_attention_layernorm.weight"]
    for mapping in mappings:
        if mapping.hf_param in names:
            mapping.hf_param = names[1 - names.index(mapping.hf_param)]
    return mappings


def _fused_norm_misnamed(mappings: list[Any]) -> list[Any]:
    """The name that layers of Transformer Engine have leads nowhere; that of local layers is right."""
    for mapping in mappings:
        if mapping.megatron_param.endswith("linear_qkv.layer_norm_weight"):
            mapping.hf_param = "model.layers.*.no_such_norm.weight"
    return mappings


def _second_glob(mappings: list[Any]) -> list[Any]:
    """A mapping that was copied, and half edited. The first still wins."""
    wrong = _conversion().AutoMapping("decoder.layers.*.mlp.linear_fc2.weight", "model.layers.*.mlp.up_proj.weight")
    return [*mappings, wrong]


def _qkv(merge: bool) -> Patch:
    """q, k and v one after the other instead of group by group: on export, and if `merge`, on import too."""

    def split(config: Any, qkv: Any, *_: Any) -> tuple[Any, ...]:
        size = config.kv_channels or config.hidden_size // config.num_attention_heads
        sizes = [size * config.num_attention_heads, size * config.num_query_groups, size * config.num_query_groups]
        return tuple(qkv.split(sizes))

    def join(_config: Any, q: Any, k: Any, v: Any) -> Any:
        import torch

        return torch.cat([q, k, v])

    def apply() -> None:
        owner = _conversion()
        owner.split_qkv_weights = owner.split_qkv_biases = split
        if merge:
            owner.merge_qkv_weights = owner.merge_qkv_biases = join

    return apply


def _gate_up(on_import: bool, on_export: bool) -> Patch:
    """Gate and up change places."""

    def apply() -> None:
        owner = _conversion().GatedMLPMapping
        load, export = owner.hf_to_megatron, owner.megatron_to_hf

        def hf_to_megatron(self: Any, hf_weights: Any, megatron_module: Any) -> Any:
            return load(self, {"gate": hf_weights["up"], "up": hf_weights["gate"]}, megatron_module)

        def megatron_to_hf(self: Any, megatron_weights: Any, megatron_module: Any) -> Any:
            made = export(self, megatron_weights, megatron_module)
            return dict(zip(made, reversed(made.values()), strict=True))

        if on_import:
            owner.hf_to_megatron = hf_to_megatron
        if on_export:
            owner.megatron_to_hf = megatron_to_hf

    return apply


def _neighbour(name: str) -> str:
    """The name of the other expert of a pair."""
    return re.sub(r"experts\.(\d+)\.", lambda found: f"experts.{int(found[1]) ^ 1}.", name)


def _experts_on_export() -> None:
    """Experts leave under their neighbours' numbers."""
    owner = _conversion().MegatronParamMapping
    plain = owner.gather_from_ep_ranks

    def gather_from_ep_ranks(self: Any, megatron_weights: Any, megatron_module: Any, hf_param_name: Any) -> Any:
        made = plain(self, megatron_weights, megatron_module, hf_param_name)
        return {_neighbour(name): value for name, value in made.items()}

    owner.gather_from_ep_ranks = gather_from_ep_ranks


def _experts_both_ways() -> None:
    """Experts come and leave under their neighbours' numbers; the router does not know."""
    owner = _conversion().MegatronParamMapping
    plain = owner._resolve_names

    def _resolve_names(self: Any, captures: Any) -> Any:
        ours, theirs = plain(self, captures)
        return ours, _neighbour(theirs) if isinstance(theirs, str) else {key: _neighbour(name) for key, name in theirs.items()}

    owner._resolve_names = _resolve_names


def _padding_kept() -> None:
    """The vocabulary is padded to 128 rows, asked or not; nobody cuts them off on export."""
    from megatron.bridge.models.gpt_provider import GPTModelProvider

    provide = GPTModelProvider.provide

    def padded(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.should_pad_vocab, self.make_vocab_size_divisible_by = True, 128
        return provide(self, *args, **kwargs)

    GPTModelProvider.provide = padded
    owner = _conversion().ColumnParallelMapping
    plain = owner.hf_to_megatron

    def hf_to_megatron(self: Any, hf_weights: Any, megatron_module: Any) -> Any:
        made = plain(self, hf_weights, megatron_module)
        rows = megatron_module.weight.shape[0] - made.shape[0]
        return made if rows <= 0 else _conversion()._pad_right_dim0(made, rows)

    owner.hf_to_megatron = hf_to_megatron


def _stream(change: Callable[[list[Any], int], list[Any]]) -> Patch:
    """What is exported, changed; the number of earlier exports is given."""

    def apply() -> None:
        owner = _model_bridge()
        plain = owner.stream_weights_megatron_to_hf
        earlier: list[int] = []

        def stream_weights_megatron_to_hf(self: Any, *given: Any, **named: Any) -> Iterator[Any]:
            found = change(list(plain(self, *given, **named)), len(earlier))
            earlier.append(1)
            yield from found

        owner.stream_weights_megatron_to_hf = stream_weights_megatron_to_hf

    return apply


def _kept_norms() -> Callable[[list[Any], int], list[Any]]:
    """Norms are exported from a cache that the first export filled."""
    kept: dict[str, Any] = {}

    def change(stream: list[Any], _: int) -> list[Any]:
        return [(name, kept.setdefault(name, value.clone())) if "norm" in name else (name, value) for name, value in stream]

    return change


def _head_dropped(stream: list[Any], _: int) -> list[Any]:
    return [item for item in stream if item[0] != "lm_head.weight"]


def _expert_dropped(stream: list[Any], _: int) -> list[Any]:
    return [item for item in stream if "experts.3.down_proj" not in item[0]]


def _turned(stream: list[Any], earlier: int) -> list[Any]:
    return stream[earlier:] + stream[:earlier]


def _layers_woven(stream: list[Any], _: int) -> list[Any]:
    """Sorted by the last part of the name: all k_proj, then all q_proj, over all layers."""
    return sorted(stream, key=lambda item: re.sub(r"^.*\.\d+\.", "", item[0]))


def _rounded(stream: list[Any], _: int) -> list[Any]:
    """Through bf16, and back."""
    return [(name, value.bfloat16().to(value.dtype)) for name, value in stream]


WEIGHT_FAULTS: dict[str, BridgeFault] = {
    "epsilon-ignored": BridgeFault(
        "the provider keeps its own norm epsilon", "qwen2", ("build",), "rms_norm_eps", _setting("layernorm_epsilon", 1e-5)
    ),
    "rope-ignored": BridgeFault(
        "the provider keeps its own rotary base", "qwen2", ("build",), "rope_theta", _setting("rotary_base", 10000)
    ),
    "tied-not-tied": BridgeFault(
        "a tied model is built with an output layer of its own",
        "qwen2",
        ("build",),
        "tie_word_embeddings",
        _setting("share_embeddings_and_output_weights", False),
    ),
    "tied-head-unfilled": BridgeFault(
        "the output layer of a tied model, built by mistake, never gets weights",
        "qwen2",
        ("import", "mapping"),
        "output_layer.weight",
        _setting("share_embeddings_and_output_weights", False),
    ),
    "missing-bias": BridgeFault(
        "no mapping has the bias of q, k and v", "qwen2", ("mapping",), "linear_qkv.bias", _registry(_without_bias)
    ),
    "bias-misnamed": BridgeFault(
        "the mapping of the bias of q, k and v has names that are not on disk",
        "qwen2",
        ("import", "mapping", "roundtrip"),
        "_proj.bias",
        _registry(_bias_misnamed),
    ),
    "ambiguous-glob": BridgeFault(
        "a second mapping has the same name", "qwen2", ("mapping",), "mlp.linear_fc2.weight", _registry(_second_glob)
    ),
    "fused-norm-misnamed": BridgeFault(
        "the norm that Transformer Engine fuses is mapped to a name that is not on disk",
        "qwen2",
        ("mapping",),
        "layer_norm_weight",
        _registry(_fused_norm_misnamed),
    ),
    "norms-exchanged": BridgeFault(
        "input and post-attention norm are exchanged in the mapping", "qwen2", ("parity",), "input_layernorm", _registry(_norms_exchanged)
    ),
    "qkv-interleave": BridgeFault(
        "q, k, v are concatenated instead of interleaved by group", "qwen2", ("parity",), "linear_qkv", _qkv(True)
    ),
    "qkv-interleave-export": BridgeFault(
        "the export takes q, k, v as concatenated, not interleaved", "qwen2", ("roundtrip", "reload"), "self_attn.", _qkv(False)
    ),
    "gate-up-swapped": BridgeFault(
        "gate and up are swapped on import and export", "llama", ("parity",), "mlp.linear_fc1", _gate_up(True, True)
    ),
    "gate-up-swapped-import": BridgeFault(
        "gate and up are swapped on import", "llama", ("roundtrip", "reload"), "gate_proj", _gate_up(True, False)
    ),
    "gate-up-swapped-export": BridgeFault(
        "gate and up are swapped on export", "llama", ("roundtrip", "reload"), "gate_proj", _gate_up(False, True)
    ),
    "expert-permutation": BridgeFault(
        "experts are imported and exported under wrong numbers", "qwen3-moe", ("parity",), "layers.0.mlp", _experts_both_ways
    ),
    "expert-permutation-export": BridgeFault(
        "experts are exported under wrong numbers", "qwen3-moe", ("roundtrip", "reload"), "experts.0.", _experts_on_export
    ),
    "expert-dropped": BridgeFault(
        "one tensor of the last expert is not exported",
        "qwen3-moe",
        ("roundtrip", "order"),
        "experts.3.down_proj",
        _stream(_expert_dropped),
    ),
    "head-dropped": BridgeFault(
        "an untied output head is not exported", "llama", ("roundtrip", "order"), "lm_head.weight", _stream(_head_dropped)
    ),
    "vocab-padding-kept": BridgeFault(
        "padding rows of the vocabulary are exported", "qwen2", ("roundtrip",), "embed_tokens", _padding_kept
    ),
    "export-rounded": BridgeFault(
        "fp32 weights are exported through bf16", "llama", ("roundtrip", "reload"), "embed_tokens.weight", _stream(_rounded)
    ),
    "export-stale": BridgeFault(
        "norms are exported as they were the first time", "qwen3-moe", ("order",), "norm.weight", _stream(_kept_norms())
    ),
    "order-unstable": BridgeFault("each export starts at another tensor", "llama", ("order",), "model.", _stream(_turned)),
    "layers-woven": BridgeFault("the export comes by kind of tensor, not by layer", "llama", ("order",), "_proj", _stream(_layers_woven)),
}


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


NUMBER_FAULTS: dict[str, BridgeFault] = {
    "rope-base-wrong": BridgeFault(
        "the provider ignores rope_theta and keeps the default base",
        "qwen2",
        ("parity",),
        "rotary frequency",
        lambda: _provider_has(rotary_base=10000.0),
    ),
    "norm-epsilon-wrong": BridgeFault(
        "the provider keeps Megatron's default epsilon of norms",
        "qwen2",
        ("parity",),
        "input_layernorm",
        lambda: _provider_has(layernorm_epsilon=1e-5),
    ),
    "activation-wrong": BridgeFault(
        "the provider asks for GELU where the model has SiLU", "qwen2", ("parity",), "activation", _wrong_activation
    ),
    "softmax-scale-wrong": BridgeFault(
        "attention is scaled by the size of a head and not by its root",
        "qwen2",
        ("parity",),
        "softmax scale",
        lambda: _provider_has(softmax_scale=1 / 32),
    ),
    "tied-embedding-broken": BridgeFault(
        "the last pipeline stage's copy of the tied embedding is not set after the import", "qwen2", ("pp",), "output_layer", _tie_broken
    ),
    "tp-shard-swapped": BridgeFault(
        "ranks get each other's piece of gate and up, and the export puts them back",
        "qwen2",
        ("tp", "sp"),
        "mlp.linear_fc1",
        _shards_swapped,
    ),
    "tp-shard-repeated": BridgeFault(
        "every rank gets the first piece of row-parallel weights", "qwen2", ("tp", "sp"), "self_attn.o_proj.weight", _same_shard
    ),
    "expert-offset-wrong": BridgeFault(
        "experts of the second rank take the numbers of the first rank's", "qwen3-moe", ("ep",), "experts.2", _local_expert_numbers
    ),
    "sp-gradients-local": BridgeFault(
        "gradients of norms are not added up over ranks",
        "qwen3",
        ("sp",),
        "norm.weight",
        _not_finalized("_allreduce_non_tensor_model_parallel_grads"),
    ),
    "pp-tied-gradients-apart": BridgeFault(
        "the stages of a tied embedding train it apart", "qwen2", ("pp",), "embed_tokens", _not_finalized("_allreduce_word_embedding_grads")
    ),
}
