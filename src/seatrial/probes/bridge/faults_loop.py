"""Seeded bugs that only a loop shows: the first export and the first weights are right, later ones are not."""

from __future__ import annotations

from typing import Any

from seatrial.probes.bridge.fault import Fault

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


FAULTS: dict[str, Fault] = {
    "loop-export-stale": Fault(
        "one tensor is exported as it was at first", "llama", ("loop",), "self_attention.linear_proj", _export_stale
    ),
    "export-swapped": Fault("gate and up change places after the first step", "llama", ("loop",), "mlp.linear_fc1", _export_swapped),
    "step-without-effect": Fault("the optimizer never steps", "llama", ("loop",), "word_embeddings", _step_without_effect),
}
