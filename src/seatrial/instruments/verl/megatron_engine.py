"""verl's Megatron engines on a CPU, watched (see `watched_engine`). Importing this registers them.

The shims of `megatron_on_cpu` must be in place before: this module imports Megatron.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.core import tensor_parallel
from verl.utils.megatron_utils import unwrap_model
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead, MegatronEngineWithValueHead

from seatrial.instruments.bits import fingerprint
from seatrial.instruments.verl import megatron_layout, verl_process
from seatrial.instruments.verl.watched_engine import Watched


class _Chunked(Watched):
    """A list of model chunks below Megatron's DDP (one chunk here), and an optimizer of optimizers."""

    module: Any
    tf_config: Any

    def initialize(self) -> None:
        """Build; in full precision where steps are recorded: in bf16 a wrong formula would drown in rounding. verl's configuration knows 16
        bits only, its engine and Megatron know 32."""
        if verl_process.record_directory() is not None:
            object.__setattr__(self.engine_config, "dtype", "float32")
        super().initialize()

    def network(self) -> Any:
        (chunk,) = self.module
        return unwrap_model(chunk)

    def gradient(self, value: Any) -> Any:
        """Megatron's DDP adds up gradients in a buffer of its own."""
        return getattr(value, "main_grad", None)

    def optimizers(self) -> list[Any]:
        return [part.optimizer for part in getattr(self.optimizer, "chained_optimizers", [self.optimizer])]

    def optimizer_groups(self, optimizer: Any) -> list[list[tuple[Any, Any]]]:
        """The distributed optimizer holds flat shards: with one rank, each is a whole parameter."""
        (part,) = (part for part in getattr(self.optimizer, "chained_optimizers", [self.optimizer]) if part.optimizer is optimizer)
        made: list[list[Any]] = [[None] * len(group["params"]) for group in optimizer.param_groups]
        for parameter, (group, order) in part.model_param_group_index_map.items():
            shard = optimizer.param_groups[group]["params"][order]
            made[group][order] = (parameter, None if shard.grad is None else shard.grad.view(parameter.shape))
        return made

    def adapters(self) -> dict[str, dict[str, Any]]:
        """By the layers of the Hugging Face model that a fused layer stands for."""
        found = {
            name: {"rank": int(module.adapter.linear_in.weight.shape[0]), "scale": float(module.adapter.alpha) / float(module.adapter.dim)}
            for name, module in self.network().named_modules()
            if hasattr(module, "adapter")
        }
        return {layer: value for name, value in found.items() for layer in megatron_layout.layers(name)}

    def optimizer_state(self) -> Any:
        """Moments, steps and settings, and the copy of the weights in full precision that is what is really updated."""
        states = [optimizer.state_dict() for optimizer in self.optimizers()]
        for group in (group for state in states for group in state["param_groups"]):
            # A load leaves the saved step where FusedAdam keeps it; torch's AdamW has its own per parameter, which is in `state`.
            group.pop("step", None)
        return [states, [group["params"] for optimizer in self.optimizers() for group in optimizer.param_groups]]

    def steps_done(self) -> int:
        return int(self.lr_scheduler.num_steps)

    def generators(self) -> dict[str, str]:
        regions = tensor_parallel.get_cuda_rng_tracker().get_states()
        return {**super().generators(), **fingerprint.state(regions, "megatron")}

    def as_exported(self) -> Mapping[str, Any] | None:
        return megatron_layout.exported(
            dict(self.network().named_parameters()), self.tf_config.num_query_groups, self.tf_config.kv_channels
        )


@EngineRegistry.register(model_type="language_model", backend="megatron", device="cpu")
class Actor(_Chunked, MegatronEngineWithLMHead):  # type: ignore[misc]
    role = "actor"


@EngineRegistry.register(model_type="value_model", backend="megatron", device="cpu")
class Critic(_Chunked, MegatronEngineWithValueHead):  # type: ignore[misc]
    role = "critic"
