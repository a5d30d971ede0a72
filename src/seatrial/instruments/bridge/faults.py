"""All seeded bugs of the ladder by name, and those of training and loops: adapters, data parallelism, checkpoints, stale exports.

Each patches a class of the Bridge or of Megatron-Core in a rung's own process; everything else runs as ever.
`seatrial probe bridge --fault list` names them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from seatrial.instruments.bridge import faults_model
from seatrial.instruments.bridge.faults_model import BridgeFault


def _nothing(*_args: Any, **_kwargs: Any) -> None:
    """What should be done is not."""


def _adapters_elsewhere() -> None:
    from megatron.bridge.peft.module_matcher import ModuleMatcher

    plain = ModuleMatcher.match
    confused = {"linear_proj": "linear_fc2", "linear_fc2": "linear_proj"}

    def match(self: Any, m: Any, name: str | None = None, prefix: str | None = None) -> Any:
        return plain(self, m, confused.get(name or "", name), prefix)

    ModuleMatcher.match = match


def _merge_without_scale() -> None:
    from megatron.bridge.peft.lora_merge import LoRAMerge

    plain = LoRAMerge.merge

    def merge(self: Any, base_weight: Any, linear_out: Any, linear_in: Any, _alpha: int, dim: int, **rest: Any) -> Any:
        return plain(self, base_weight, linear_out, linear_in, dim, dim, **rest)

    LoRAMerge.merge = merge


def _base_not_frozen() -> None:
    from megatron.bridge.peft.base import PEFT

    PEFT.freeze_model = _nothing


def _adapter_export(change: Callable[[str], str | None]) -> Callable[[], None]:
    """The adapter export with other names; None leaves a tensor out."""

    def apply() -> None:
        from megatron.bridge.models.conversion.peft_bridge import MegatronPeftBridge

        plain = MegatronPeftBridge.stream_adapter_weights_megatron_to_hf

        def stream(self: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
            for item in plain(self, *args, **kwargs):
                name = change(item.param_name)
                if name is not None:
                    yield item._replace(param_name=name)

        MegatronPeftBridge.stream_adapter_weights_megatron_to_hf = stream

    return apply


def _gate_for_up(name: str) -> str:
    other = {"gate_proj": "up_proj", "up_proj": "gate_proj"}
    found = next((part for part in other if part in name), None)
    return name.replace(found, other[found]) if found and "lora_B" in name else name


def _without_v(name: str) -> str | None:
    return None if "layers.1." in name and "v_proj" in name else name


def _loaded_optimizer(change: Callable[[dict[str, Any]], None]) -> Callable[[], None]:
    """What the optimizer keeps of each parameter, changed after a load."""

    def apply() -> None:
        from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

        plain = DistributedOptimizer.load_state_dict

        def load_state_dict(self: Any, state_dict: Any) -> None:
            plain(self, state_dict)
            for kept in self.optimizer.state.values():
                change(kept)

        DistributedOptimizer.load_state_dict = load_state_dict

    return apply


def _no_moments(kept: dict[str, Any]) -> None:
    for name in ("exp_avg", "exp_avg_sq"):
        kept[name].zero_()


def _no_step(kept: dict[str, Any]) -> None:
    kept["step"].zero_()


def _settings_lost() -> None:
    """A load brings the moments and leaves the groups' settings as they are."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    plain = DistributedOptimizer.load_state_dict

    def load_state_dict(self: Any, state_dict: Any) -> None:
        kept = [(group["lr"], group["weight_decay"]) for group in self.optimizer.param_groups]
        plain(self, state_dict)
        for group, (lr, decay) in zip(self.optimizer.param_groups, kept, strict=True):
            group.update(lr=lr, weight_decay=decay)

    DistributedOptimizer.load_state_dict = load_state_dict


def _router_detached() -> None:
    """Which experts is chosen as ever, and learned by nobody."""
    from megatron.core.transformer.moe.router import TopKRouter

    plain = TopKRouter.routing

    def routing(self: Any, *args: Any, **kwargs: Any) -> Any:
        weights, chosen = plain(self, *args, **kwargs)
        return weights.detach(), chosen

    TopKRouter.routing = routing


def _norm_frozen() -> None:
    from megatron.core.transformer.attention import SelfAttention

    plain = SelfAttention.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        plain(self, *args, **kwargs)
        self.q_layernorm.weight.requires_grad_(False)

    SelfAttention.__init__ = init


def _weight_not_saved() -> None:
    """One kind of weight is not in the checkpoint, and the load does not insist on it."""
    from megatron.core.models.gpt import GPTModel

    sharded, load = GPTModel.sharded_state_dict, GPTModel.load_state_dict

    def sharded_state_dict(self: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        made = sharded(self, *args, **kwargs)
        return {name: value for name, value in made.items() if "self_attention.linear_proj.weight" not in name}

    def load_state_dict(self: Any, state: Any, **_strict: bool) -> Any:
        return load(self, state, strict=False)

    GPTModel.sharded_state_dict, GPTModel.load_state_dict = sharded_state_dict, load_state_dict


def _gradients_stay_local() -> None:
    from megatron.core.distributed import DistributedDataParallel

    DistributedDataParallel.finish_grad_sync = _nothing


def _gradients_are_summed() -> None:
    from megatron.core.distributed import DistributedDataParallel

    plain = DistributedDataParallel.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        plain(self, *args, **kwargs)
        for group in (*self.bucket_groups, *self.expert_parallel_bucket_groups):
            for bucket in group.buckets:
                bucket.gradient_scaling_factor = 1.0

    DistributedDataParallel.__init__ = init


def _export_keeps_first() -> None:
    """A cache of exported tensors that nobody empties."""
    from megatron.bridge import AutoBridge

    plain = AutoBridge.export_hf_weights
    kept: dict[str, Any] = {}

    def export_hf_weights(self: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
        for item in plain(self, *args, **kwargs):
            name = item.param_name
            yield item._replace(weight=kept.setdefault(name, item.weight.clone())) if "q_proj.weight" in name else item

    AutoBridge.export_hf_weights = export_hf_weights


TRAINING_FAULTS: dict[str, BridgeFault] = {
    "lora-wrong-module": BridgeFault("adapters land on another module than asked", "qwen2", ("lora",), "linear_proj", _adapters_elsewhere),
    "lora-merge-scale-wrong": BridgeFault("the merge forgets alpha / dim", "qwen2", ("lora",), "_proj.weight", _merge_without_scale),
    "lora-base-trains": BridgeFault("base weights are not frozen", "qwen2", ("lora",), "decoder.layers.", _base_not_frozen),
    "adapter-export-swapped": BridgeFault(
        "adapters of gate and up are exchanged", "qwen2", ("lora",), "_proj", _adapter_export(_gate_for_up)
    ),
    "adapter-export-drops": BridgeFault("one adapter is not exported", "qwen2", ("lora",), "v_proj", _adapter_export(_without_v)),
    "optimizer-state-lost": BridgeFault(
        "a load leaves the moments at zero", "qwen2", ("checkpoint",), "exp_avg", _loaded_optimizer(_no_moments)
    ),
    "checkpoint-step-lost": BridgeFault("a load leaves the step at zero", "qwen2", ("checkpoint",), "step of", _loaded_optimizer(_no_step)),
    "checkpoint-settings-lost": BridgeFault("a load leaves rate and decay as they are", "qwen2", ("checkpoint",), "lr of", _settings_lost),
    "router-detached": BridgeFault("no gradient reaches the router", "qwen3-moe", ("policy",), "mlp.gate.weight", _router_detached),
    "norm-frozen": BridgeFault("the norm of queries does not train", "qwen3", ("policy",), "q_norm.weight", _norm_frozen),
    "checkpoint-drops-tensor": BridgeFault("one weight is not restored", "qwen2", ("checkpoint",), "linear_proj.weight", _weight_not_saved),
    "ddp-no-average": BridgeFault("gradients are not reduced over ranks", "qwen2", ("optimizer",), ".weight", _gradients_stay_local),
    "ddp-sum": BridgeFault("gradients are summed over ranks, not averaged", "qwen2", ("optimizer",), "norm", _gradients_are_summed),
    "policy-export-stale": BridgeFault("the export keeps tensors of an earlier step", "qwen2", ("policy",), "q_proj", _export_keeps_first),
}


STALE = "layers.1.self_attn.o_proj.weight"


def _export_stale() -> None:
    """A cache by name in the mapping, which nobody clears."""
    from megatron.bridge.models.conversion import param_mapping

    plain, cache = param_mapping.AutoMapping.megatron_to_hf, dict[str, Any]()

    def megatron_to_hf(self: Any, weights: Any, module: Any) -> Any:
        made = plain(self, weights, module)
        return {name: cache.setdefault(name, value.detach().clone()) if name.endswith(STALE) else value for name, value in made.items()}

    param_mapping.AutoMapping.megatron_to_hf = megatron_to_hf


def _export_swapped() -> None:
    """Gate and up change places as soon as they are not those of the checkpoint."""
    import torch
    from megatron.bridge.models.conversion import param_mapping

    plain, first = param_mapping.GatedMLPMapping.megatron_to_hf, dict[str, Any]()

    def megatron_to_hf(self: Any, weights: Any, module: Any) -> Any:
        made = plain(self, weights, module)
        known = first.setdefault(str(self.megatron_param), weights.detach().clone())
        if torch.equal(known, weights):
            return made
        (gate, one), (up, two) = made.items()
        return {gate: two, up: one}

    param_mapping.GatedMLPMapping.megatron_to_hf = megatron_to_hf


def _step_without_effect() -> None:
    """The optimizer says that it stepped."""
    from megatron.core.optimizer import optimizer

    for owner in (optimizer.MixedPrecisionOptimizer, optimizer.FP32Optimizer):
        owner.step_with_ready_grads = lambda _self: True


LOOP_FAULTS: dict[str, BridgeFault] = {
    "loop-export-stale": BridgeFault(
        "one tensor is exported as it was at first", "llama", ("loop",), "self_attention.linear_proj", _export_stale
    ),
    "export-swapped": BridgeFault("gate and up change places after the first step", "llama", ("loop",), "mlp.linear_fc1", _export_swapped),
    "step-without-effect": BridgeFault("the optimizer never steps", "llama", ("loop",), "word_embeddings", _step_without_effect),
}


FAULTS: dict[str, BridgeFault] = {**faults_model.WEIGHT_FAULTS, **faults_model.NUMBER_FAULTS, **TRAINING_FAULTS, **LOOP_FAULTS}


def apply_fault(name: str) -> None:
    """Make the Bridge of this process have the bug."""
    FAULTS[name].apply()
