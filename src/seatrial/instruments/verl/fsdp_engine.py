"""verl's FSDP2 engines on a CPU, watched (see `watched_engine`). Importing this registers them.

verl registers its own for CUDA and NPU only; they run on a CPU as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead, FSDPEngineWithValueHead

from seatrial.instruments.verl.watched_engine import Watched


class _Sharded(Watched):
    """One torch module with sharded tensors, one torch optimizer."""

    module: Any

    def network(self) -> Any:
        return self.module

    def whole(self, value: Any) -> Any:
        """Put the shards together, however deep they are."""
        if hasattr(value, "full_tensor"):
            return value.detach().full_tensor()
        if isinstance(value, dict):
            return {key: self.whole(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.whole(item) for item in value]
        return value

    def gradient(self, value: Any) -> Any:
        return value.grad

    def optimizers(self) -> list[Any]:
        return [self.optimizer]

    def as_exported(self) -> Mapping[str, Any]:
        """Names without what PEFT puts around the layers of the base; tensors as they are."""
        named = self.module.named_parameters(remove_duplicate=False)
        return {
            name.replace(".default.", ".").removeprefix("base_model.model.").replace(".base_layer.", "."): self.whole(value)
            for name, value in named
        }

    def steps_done(self) -> int:
        return int(self.lr_scheduler.last_epoch)


@EngineRegistry.register(model_type="language_model", backend="fsdp2", device="cpu")
class Actor(_Sharded, FSDPEngineWithLMHead):  # type: ignore[misc]
    """The actor's engine; the reference model has the same, for forward passes only."""

    role = "actor"


@EngineRegistry.register(model_type="value_model", backend="fsdp2", device="cpu")
class Critic(_Sharded, FSDPEngineWithValueHead):  # type: ignore[misc]
    role = "critic"

    def _build_module(self) -> Any:
        # verl asks for flash attention in its value model, whatever the configuration says; sdpa is what a CPU has.
        from transformers import AutoModelForTokenClassification

        load = AutoModelForTokenClassification.from_pretrained
        AutoModelForTokenClassification.from_pretrained = lambda *args, **kw: load(*args, **(kw | {"attn_implementation": "sdpa"}))
        try:
            return super()._build_module()
        finally:
            AutoModelForTokenClassification.from_pretrained = load
