"""Seeded bugs of the ladder: each patches a class or function of the Bridge or of Megatron-Core in a rung's own process.

A bug that is wrong in the same way on import and export gives every weight back: only a forward pass (`parity`) can see it.
`seatrial probe bridge --fault list` names them all.
"""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class BridgeFault:
    text: str
    model: str
    """A family that can have it."""
    rungs: tuple[str, ...]
    """Those that must fail by it."""
    named: str
    """What the failure must name: a part of a tensor's, mapping's or module's name."""
    apply: Callable[[], None]


FAULTS: dict[str, BridgeFault] = {}
Apply = Callable[[], None]
CONVERSION = "megatron.bridge.models.conversion"
MAPPING = f"{CONVERSION}.param_mapping"
QWEN2 = "megatron.bridge.models.qwen.qwen2_bridge:Qwen2Bridge"
DISTRIBUTED = "megatron.core.distributed:DistributedDataParallel"
SHARDED = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer"


def fault(name: str, text: str, rungs: str, named: str, model: str = "qwen2") -> Callable[[Apply], Apply]:
    """Register a function that makes the Bridge of this process have a bug."""

    def register(apply: Apply) -> Apply:
        FAULTS[name] = BridgeFault(text, model, tuple(rungs.split()), named, apply)
        return apply

    return register


def found(place: str) -> tuple[Any, str, Any]:
    """Owner, name and value of `module:function` or `module:Class.function`."""
    module, _, path = place.partition(":")
    owner, (*parents, name) = importlib.import_module(module), path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    return owner, name, getattr(owner, name)


def wrap(place: str, wrapper: Callable[..., Any]) -> None:
    """Call `wrapper(plain, …)` wherever upstream calls the function `plain`."""
    owner, name, plain = found(place)
    setattr(owner, name, functools.wraps(plain)(lambda *args, **kwargs: wrapper(plain, *args, **kwargs)))


def around(place: str) -> Callable[[Callable[..., Any]], Apply]:
    """A bug that is one wrapper of a function."""
    return lambda wrapper: lambda: wrap(place, wrapper)


def replaced(place: str, value: Any) -> Apply:

    def apply() -> None:
        owner, name, _ = found(place)
        setattr(owner, name, value)

    return apply


def nothing(*_args: Any, **_kwargs: Any) -> None:
    """What should be done is not."""


def provider_has(**settings: Any) -> Apply:
    """The family's provider has these settings, whatever the configuration says."""

    def provider_bridge(plain: Any, self: Any, hf_pretrained: Any) -> Any:
        provider = plain(self, hf_pretrained)
        for name, value in settings.items():
            if not hasattr(provider, name):
                raise AttributeError(f"the provider has no {name}: this fault no longer fits the Bridge")
            setattr(provider, name, value)
        return provider

    return around(f"{QWEN2}.provider_bridge")(provider_bridge)


def registry(change: Callable[[list[Any]], list[Any]]) -> Apply:

    def mapping_registry(plain: Any, self: Any) -> Any:
        from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry

        return MegatronMappingRegistry(*change(list(plain(self))))

    return around(f"{QWEN2}.mapping_registry")(mapping_registry)


def stream(change: Callable[[list[Any], int], list[Any]]) -> Apply:
    """What is exported, changed; `change` gets the number of earlier exports, too."""
    earlier: list[int] = []

    def stream_weights(plain: Any, self: Any, *given: Any, **named: Any) -> Iterator[Any]:
        changed = change(list(plain(self, *given, **named)), len(earlier))
        earlier.append(1)
        yield from changed

    return around(f"{CONVERSION}.model_bridge:MegatronModelBridge.stream_weights_megatron_to_hf")(stream_weights)


own_head = provider_has(share_embeddings_and_output_weights=False)
fault("epsilon-ignored", "the provider keeps its own norm epsilon", "build", "rms_norm_eps")(provider_has(layernorm_epsilon=1e-5))
fault("rope-ignored", "the provider keeps its own rotary base", "build", "rope_theta")(provider_has(rotary_base=10000))
fault("tied-not-tied", "a tied model is built with an output layer of its own", "build", "tie_word_embeddings")(own_head)
fault(
    "tied-head-unfilled", "the output layer of a tied model, built by mistake, never gets weights", "import mapping", "output_layer.weight"
)(own_head)


@fault("missing-bias", "no mapping has the bias of q, k and v", "mapping", "linear_qkv.bias")
@registry
def _without_bias(mappings: list[Any]) -> list[Any]:
    return [mapping for mapping in mappings if not mapping.megatron_param.endswith("linear_qkv.bias")]


@fault("bias-misnamed", "the mapping of the bias of q, k and v has names that are not on disk", "import mapping roundtrip", "_proj.bias")
@registry
def _bias_misnamed(mappings: list[Any]) -> list[Any]:
    """The Bridge warns, and goes on without."""
    for mapping in mappings:
        if mapping.megatron_param.endswith("linear_qkv.bias"):
            mapping.hf_param = {key: name.replace("_proj.bias", "_bias") for key, name in mapping.hf_param.items()}
    return mappings


@fault("ambiguous-glob", "a second mapping has the same name", "mapping", "mlp.linear_fc2.weight")
@registry
def _second_glob(mappings: list[Any]) -> list[Any]:
    """A mapping that was copied, and half edited. The first still wins."""
    _, _, mapping = found(f"{MAPPING}:AutoMapping")
    return [*mappings, mapping("decoder.layers.*.mlp.linear_fc2.weight", "model.layers.*.mlp.up_proj.weight")]


@fault(
    "fused-norm-misnamed", "the norm that Transformer Engine fuses is mapped to a name that is not on disk", "mapping", "layer_norm_weight"
)
@registry
def _fused_norm_misnamed(mappings: list[Any]) -> list[Any]:
    for mapping in mappings:
        if mapping.megatron_param.endswith("linear_qkv.layer_norm_weight"):
            mapping.hf_param = "model.layers.*.no_such_norm.weight"
    return mappings


@fault("norms-exchanged", "input and post-attention norm are exchanged in the mapping", "parity", "input_layernorm")
@registry
def _norms_exchanged(mappings: list[Any]) -> list[Any]:
    names = ["model.layers.*.input_layernorm.weight", "model.layers.*.post_attention_layernorm.weight"]
    for mapping in mappings:
        if mapping.hf_param in names:
            mapping.hf_param = names[1 - names.index(mapping.hf_param)]
    return mappings


def qkv(merge: bool) -> Apply:
    """q, k and v one after the other instead of group by group: on export, and if `merge`, on import too."""

    def split(config: Any, qkv: Any, *_: Any) -> tuple[Any, ...]:
        size = config.kv_channels or config.hidden_size // config.num_attention_heads
        sizes = [size * config.num_attention_heads, size * config.num_query_groups, size * config.num_query_groups]
        return tuple(qkv.split(sizes))

    def join(_config: Any, q: Any, k: Any, v: Any) -> Any:
        import torch

        return torch.cat([q, k, v])

    def apply() -> None:
        for kind in ("weights", "biases"):
            replaced(f"{MAPPING}:split_qkv_{kind}", split)()
            if merge:
                replaced(f"{MAPPING}:merge_qkv_{kind}", join)()

    return apply


fault("qkv-interleave", "q, k, v are concatenated instead of interleaved by group", "parity", "linear_qkv")(qkv(True))
fault("qkv-interleave-export", "the export takes q, k, v as concatenated, not interleaved", "roundtrip reload", "self_attn.")(qkv(False))


def gate_up(on_import: bool, on_export: bool) -> Apply:

    def load(plain: Any, self: Any, hf_weights: Any, megatron_module: Any) -> Any:
        return plain(self, {"gate": hf_weights["up"], "up": hf_weights["gate"]}, megatron_module)

    def export(plain: Any, *args: Any) -> Any:
        made = plain(*args)
        return dict(zip(made, reversed(made.values()), strict=True))

    def apply() -> None:
        if on_import:
            wrap(f"{MAPPING}:GatedMLPMapping.hf_to_megatron", load)
        if on_export:
            wrap(f"{MAPPING}:GatedMLPMapping.megatron_to_hf", export)

    return apply


fault("gate-up-swapped", "gate and up are swapped on import and export", "parity", "mlp.linear_fc1", "llama")(gate_up(True, True))
fault("gate-up-swapped-import", "gate and up are swapped on import", "roundtrip reload", "gate_proj", "llama")(gate_up(True, False))
fault("gate-up-swapped-export", "gate and up are swapped on export", "roundtrip reload", "gate_proj", "llama")(gate_up(False, True))


def neighbour(name: str) -> str:
    return re.sub(r"experts\.(\d+)\.", lambda match: f"experts.{int(match[1]) ^ 1}.", name)


@fault("expert-permutation", "experts are imported and exported under wrong numbers", "parity", "layers.0.mlp", "qwen3-moe")
@around(f"{MAPPING}:MegatronParamMapping._resolve_names")
def _experts_both_ways(plain: Any, self: Any, captures: Any) -> Any:
    ours, theirs = plain(self, captures)
    return ours, neighbour(theirs) if isinstance(theirs, str) else {key: neighbour(name) for key, name in theirs.items()}


@fault("expert-permutation-export", "experts are exported under wrong numbers", "roundtrip reload", "experts.0.", "qwen3-moe")
@around(f"{MAPPING}:MegatronParamMapping.gather_from_ep_ranks")
def _experts_on_export(plain: Any, *args: Any) -> Any:
    return {neighbour(name): value for name, value in plain(*args).items()}


@fault("expert-dropped", "one tensor of the last expert is not exported", "roundtrip order", "experts.3.down_proj", "qwen3-moe")
@stream
def _expert_dropped(exported: list[Any], _: int) -> list[Any]:
    return [item for item in exported if "experts.3.down_proj" not in item[0]]


@fault("head-dropped", "an untied output head is not exported", "roundtrip order", "lm_head.weight", "llama")
@stream
def _head_dropped(exported: list[Any], _: int) -> list[Any]:
    return [item for item in exported if item[0] != "lm_head.weight"]


@fault("vocab-padding-kept", "padding rows of the vocabulary are exported", "roundtrip", "embed_tokens")
def _padding_kept() -> None:
    """The vocabulary is padded to 128 rows, asked or not; nothing cuts them off on export."""

    def provide(plain: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        self.should_pad_vocab, self.make_vocab_size_divisible_by = True, 128
        return plain(self, *args, **kwargs)

    def hf_to_megatron(plain: Any, self: Any, hf_weights: Any, megatron_module: Any) -> Any:
        made = plain(self, hf_weights, megatron_module)
        rows = megatron_module.weight.shape[0] - made.shape[0]
        _, _, pad = found(f"{MAPPING}:_pad_right_dim0")
        return made if rows <= 0 else pad(made, rows)

    wrap("megatron.bridge.models.gpt_provider:GPTModelProvider.provide", provide)
    wrap(f"{MAPPING}:ColumnParallelMapping.hf_to_megatron", hf_to_megatron)


@fault("export-rounded", "fp32 weights are exported through bf16", "roundtrip reload", "embed_tokens.weight", "llama")
@stream
def _rounded(exported: list[Any], _: int) -> list[Any]:
    return [(name, value.bfloat16().to(value.dtype)) for name, value in exported]


kept_norms: dict[str, Any] = {}


@fault("export-stale", "norms are exported as they were the first time", "order", "norm.weight", "qwen3-moe")
@stream
def _kept_norms(exported: list[Any], _: int) -> list[Any]:
    return [(name, kept_norms.setdefault(name, value.clone())) if "norm" in name else (name, value) for name, value in exported]


@fault("order-unstable", "each export starts at another tensor", "order", "model.", "llama")
@stream
def _turned(exported: list[Any], earlier: int) -> list[Any]:
    return exported[earlier:] + exported[:earlier]


@fault("layers-woven", "the export comes by kind of tensor, not by layer", "order", "_proj", "llama")
@stream
def _layers_woven(exported: list[Any], _: int) -> list[Any]:
    """Sorted by the last part of the name: all k_proj, then all q_proj, over all layers."""
    return sorted(exported, key=lambda item: re.sub(r"^.*\.\d+\.", "", item[0]))


fault("rope-base-wrong", "the provider ignores rope_theta and keeps the default base", "parity", "rotary frequency")(
    provider_has(rotary_base=10000.0)
)
fault("norm-epsilon-wrong", "the provider keeps Megatron's default epsilon of norms", "parity", "input_layernorm")(
    provider_has(layernorm_epsilon=1e-5)
)


@fault("activation-wrong", "the provider asks for GELU where the model has SiLU", "parity", "activation")
def _wrong_activation() -> None:
    import torch

    provider_has(activation_func=torch.nn.functional.gelu)()


fault("softmax-scale-wrong", "attention is scaled by the size of a head and not by its root", "parity", "softmax scale")(
    provider_has(softmax_scale=1 / 32)
)


def _tie_broken(_self: Any, model: Any) -> None:
    """The last stage keeps what its copy was initialised with."""
    from megatron.core.utils import unwrap_model

    for chunk in unwrap_model(model):
        if chunk.post_process and not chunk.pre_process:
            chunk.output_layer.weight.data.normal_(0, 0.02)


fault("tied-embedding-broken", "the last pipeline stage's copy of the tied embedding is not set after the import", "pp", "output_layer")(
    replaced(f"{CONVERSION}.model_bridge:MegatronModelBridge._broadcast_shared_embeddings", _tie_broken)
)


@fault("tp-shard-swapped", "ranks get each other's piece of gate and up, and the export puts them back", "tp sp", "mlp.linear_fc1")
def _shards_swapped() -> None:
    def scatter(plain: Any, self: Any, splits: Any, *args: Any, **kwargs: Any) -> Any:
        return plain(self, splits[::-1] if splits else splits, *args, **kwargs)

    wrap(f"{MAPPING}:GatedMLPMapping.scatter_to_tp_ranks", scatter)
    wrap(f"{MAPPING}:GatedMLPMapping.gather_from_tp_ranks", lambda plain, *args: plain(*args)[::-1])


@fault("tp-shard-repeated", "every rank gets the first piece of row-parallel weights", "tp sp", "self_attn.o_proj.weight")
@around(f"{MAPPING}:RowParallelMapping.scatter_to_tp_ranks")
def _same_shard(plain: Any, self: Any, splits: Any, *args: Any, **kwargs: Any) -> Any:
    """As if each rank were rank 0."""
    return plain(self, [splits[0]] * len(splits) if splits else splits, *args, **kwargs)


@fault("expert-offset-wrong", "experts of the second rank take the numbers of the first rank's", "ep", "experts.2", "qwen3-moe")
@around(f"{CONVERSION}.model_bridge:_megatron_local_name_to_global")
def _local_expert_numbers(plain: Any, models: Any, config: Any, param_name: str, vp_stage: Any = None) -> str:
    """Experts keep the number that they have on their rank."""
    name: str = plain(models, config, param_name, vp_stage)
    local = re.search(r"\.local_experts\.\d+\.", param_name)
    return re.sub(r"\.local_experts\.\d+\.", local.group(), name) if local else name


# The package has a function of the same name as this module.
FINALIZE = "megatron.core.distributed.finalize_model_grads"
fault("sp-gradients-local", "gradients of norms are not added up over ranks", "sp", "norm.weight", "qwen3")(
    replaced(f"{FINALIZE}:_allreduce_non_tensor_model_parallel_grads", nothing)
)
fault("pp-tied-gradients-apart", "the stages of a tied embedding train it apart", "pp", "embed_tokens")(
    replaced(f"{FINALIZE}:_allreduce_word_embedding_grads", nothing)
)


@fault("lora-wrong-module", "adapters land on another module than asked", "lora", "linear_proj")
@around("megatron.bridge.peft.module_matcher:ModuleMatcher.match")
def _adapters_elsewhere(plain: Any, self: Any, m: Any, name: str | None = None, prefix: str | None = None) -> Any:
    confused = {"linear_proj": "linear_fc2", "linear_fc2": "linear_proj"}
    return plain(self, m, confused.get(name or "", name), prefix)


@fault("lora-merge-scale-wrong", "the merge forgets alpha / dim", "lora", "_proj.weight")
@around("megatron.bridge.peft.lora_merge:LoRAMerge.merge")
def _merge_without_scale(plain: Any, self: Any, base: Any, linear_out: Any, linear_in: Any, _alpha: int, dim: int, **rest: Any) -> Any:
    return plain(self, base, linear_out, linear_in, dim, dim, **rest)


fault("lora-base-trains", "base weights are not frozen", "lora", "decoder.layers.")(
    replaced("megatron.bridge.peft.base:PEFT.freeze_model", nothing)
)


def adapter_export(change: Callable[[str], str | None]) -> Apply:
    """The adapter export with other names; None leaves a tensor out."""

    def stream_adapters(plain: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
        for item in plain(*args, **kwargs):
            name = change(item.param_name)
            if name is not None:
                yield item._replace(param_name=name)

    return around(f"{CONVERSION}.peft_bridge:MegatronPeftBridge.stream_adapter_weights_megatron_to_hf")(stream_adapters)


@fault("adapter-export-swapped", "adapters of gate and up are exchanged", "lora", "_proj")
@adapter_export
def _gate_for_up(name: str) -> str:
    other = {"gate_proj": "up_proj", "up_proj": "gate_proj"}
    part = next((part for part in other if part in name), None)
    return name.replace(part, other[part]) if part and "lora_B" in name else name


@fault("adapter-export-drops", "one adapter is not exported", "lora", "v_proj")
@adapter_export
def _without_v(name: str) -> str | None:
    return None if "layers.1." in name and "v_proj" in name else name


def loaded_optimizer(*zeroed: str) -> Apply:

    def load_state_dict(plain: Any, self: Any, state_dict: Any) -> None:
        plain(self, state_dict)
        for kept in self.optimizer.state.values():
            for name in zeroed:
                kept[name].zero_()

    return around(f"{SHARDED}.load_state_dict")(load_state_dict)


fault("optimizer-state-lost", "a load leaves the moments at zero", "checkpoint", "exp_avg")(loaded_optimizer("exp_avg", "exp_avg_sq"))
fault("checkpoint-step-lost", "a load leaves the step at zero", "checkpoint", "step of")(loaded_optimizer("step"))


@fault("checkpoint-settings-lost", "a load leaves rate and decay as they are", "checkpoint", "lr of")
@around(f"{SHARDED}.load_state_dict")
def _settings_lost(plain: Any, self: Any, state_dict: Any) -> None:
    """A load brings the moments and leaves the groups' settings as they are."""
    kept = [(group["lr"], group["weight_decay"]) for group in self.optimizer.param_groups]
    plain(self, state_dict)
    for group, (lr, decay) in zip(self.optimizer.param_groups, kept, strict=True):
        group.update(lr=lr, weight_decay=decay)


@fault("router-detached", "no gradient reaches the router", "policy", "mlp.gate.weight", "qwen3-moe")
@around("megatron.core.transformer.moe.router:TopKRouter.routing")
def _router_detached(plain: Any, *args: Any, **kwargs: Any) -> Any:
    """Experts are chosen as ever, and the choice is never learned."""
    weights, chosen = plain(*args, **kwargs)
    return weights.detach(), chosen


@fault("norm-frozen", "the norm of queries does not train", "policy", "q_norm.weight", "qwen3")
@around("megatron.core.transformer.attention:SelfAttention.__init__")
def _norm_frozen(plain: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    plain(self, *args, **kwargs)
    self.q_layernorm.weight.requires_grad_(False)


@fault("checkpoint-drops-tensor", "one weight is not restored", "checkpoint", "linear_proj.weight")
def _weight_not_saved() -> None:
    """It is not in the checkpoint, and the load does not insist on it."""

    def sharded(plain: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        made = plain(*args, **kwargs)
        return {name: value for name, value in made.items() if "self_attention.linear_proj.weight" not in name}

    model = "megatron.core.models.gpt:GPTModel"
    wrap(f"{model}.sharded_state_dict", sharded)
    wrap(f"{model}.load_state_dict", lambda plain, self, state, **_strict: plain(self, state, strict=False))


fault("ddp-no-average", "gradients are not reduced over ranks", "optimizer", ".weight")(
    replaced(f"{DISTRIBUTED}.finish_grad_sync", nothing)
)


@fault("ddp-sum", "gradients are summed over ranks, not averaged", "optimizer", "norm")
@around(f"{DISTRIBUTED}.__init__")
def _gradients_are_summed(plain: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    plain(self, *args, **kwargs)
    for group in (*self.bucket_groups, *self.expert_parallel_bucket_groups):
        for bucket in group.buckets:
            bucket.gradient_scaling_factor = 1.0


first_export: dict[str, Any] = {}
"""What a cache of exported tensors holds that is never emptied."""
STALE = "layers.1.self_attn.o_proj.weight"


@fault("policy-export-stale", "the export keeps tensors of an earlier step", "policy", "q_proj")
@around("megatron.bridge:AutoBridge.export_hf_weights")
def _export_keeps_first(plain: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
    for item in plain(*args, **kwargs):
        name = item.param_name
        yield item._replace(weight=first_export.setdefault(name, item.weight.clone())) if "q_proj.weight" in name else item


@fault("loop-export-stale", "one tensor is exported as it was at first", "loop", "self_attention.linear_proj", "llama")
@around(f"{MAPPING}:AutoMapping.megatron_to_hf")
def _export_stale(plain: Any, *args: Any) -> Any:
    """A cache by name in the mapping."""
    made = plain(*args)
    return {name: first_export.setdefault(name, value.detach().clone()) if name.endswith(STALE) else value for name, value in made.items()}


@fault("export-swapped", "gate and up change places after the first step", "loop", "mlp.linear_fc1", "llama")
@around(f"{MAPPING}:GatedMLPMapping.megatron_to_hf")
def _export_swapped(plain: Any, self: Any, weights: Any, module: Any) -> Any:
    """Gate and up change places as soon as they are not those of the checkpoint."""
    import torch

    made = plain(self, weights, module)
    if torch.equal(first_export.setdefault(str(self.megatron_param), weights.detach().clone()), weights):
        return made
    (gate, one), (up, two) = made.items()
    return {gate: two, up: one}


@fault("step-without-effect", "the optimizer never steps", "loop", "word_embeddings", "llama")
def _step_without_effect() -> None:
    """It says that it stepped."""
    for owner in ("MixedPrecisionOptimizer", "FP32Optimizer"):
        replaced(f"megatron.core.optimizer.optimizer:{owner}.step_with_ready_grads", lambda _self: True)()
