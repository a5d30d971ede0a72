"""verl's FSDP engines, watched from inside the worker: what is trained, and the state after every update.

Facts are written where SEATRIAL_FACTS says:
- `parameters` once the model is built: which are trainable, and how many;
- `state` at the start, after each optimizer update of a step, after a checkpoint was loaded and when one is saved:
  fingerprints of weights, optimizer, scheduler and random number generators.
"""

from __future__ import annotations

import os
from typing import Any

from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead, FSDPEngineWithValueHead

from seatrial.loops.verl.drive import faults
from seatrial.probes import facts, fingerprint


def _whole(value: Any) -> Any:
    """The full tensor of a sharded one; anything else as it is."""
    if hasattr(value, "full_tensor"):
        return value.detach().full_tensor()
    if isinstance(value, dict):
        return {key: _whole(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_whole(item) for item in value]
    return value


def _updates(optimizer: Any) -> list[int] | None:
    """The least and largest count of updates that the optimizer keeps per parameter; None if it keeps none."""
    kept = optimizer.state_dict()["state"].values()
    counts = [int(entry["step"]) for entry in kept if "step" in entry]
    return [min(counts), max(counts)] if counts else None


class _Watched:
    """Mixed into an engine in front of verl's class."""

    role = ""
    module: Any
    optimizer: Any
    lr_scheduler: Any
    engine_config: Any
    without_gradient: set[str] | None = None

    def initialize(self) -> None:
        """Build, then say what was built."""
        super().initialize()  # type: ignore[misc]
        if self.engine_config.forward_only:
            self.role = "reference"
        named = list(self.module.named_parameters())
        row: dict[str, Any] = {"fact": "parameters", "role": self.role, "total": sum(value.numel() for _, value in named)}
        row["trainable"] = sum(value.numel() for _, value in named if value.requires_grad)
        row["trainable_names"] = [name for name, value in named if value.requires_grad]
        row["frozen_names"] = [name for name, value in named if not value.requires_grad]
        facts.append(os.environ["SEATRIAL_FACTS"], row)
        self._record("start", 0)

    def optimizer_step(self) -> Any:
        """Note which parameters have a gradient, then step."""
        idle = {name for name, value in self.module.named_parameters() if value.requires_grad and not _has_gradient(value)}
        self.without_gradient = idle if self.without_gradient is None else self.without_gradient & idle
        faults.before_step(self)
        return super().optimizer_step()  # type: ignore[misc]

    def lr_scheduler_step(self) -> Any:
        """verl steps the scheduler once per training step, after its last update: the state of that step."""
        rate = super().lr_scheduler_step()  # type: ignore[misc]
        self._record("step", int(self.lr_scheduler.last_epoch), {"without_gradient": sorted(self.without_gradient or ())})
        return rate

    def save_checkpoint(self, local_path: str, *args: Any, **kwargs: Any) -> None:
        """Save, then record what the checkpoint must restore."""
        super().save_checkpoint(local_path, *args, **kwargs)  # type: ignore[misc]
        self._record("saved", int(self.lr_scheduler.last_epoch))

    def load_checkpoint(self, local_path: str, *args: Any, **kwargs: Any) -> None:
        """Load, then record what was restored."""
        super().load_checkpoint(local_path, *args, **kwargs)  # type: ignore[misc]
        faults.after_load(self)
        self._record("restored", int(self.lr_scheduler.last_epoch))

    def _record(self, when: str, step: int, extra: dict[str, Any] | None = None) -> None:
        row = {"fact": "state", "role": self.role, "when": when, "step": step, **(extra or {})}
        row["weights"] = fingerprint.tensors((name, _whole(value)) for name, value in fingerprint.named_state(self.module))
        if self.optimizer is not None:
            row["optimizer"] = fingerprint.state(_whole(self.optimizer.state_dict()))
            row["updates"] = _updates(self.optimizer)
            row["scheduler"] = fingerprint.state(self.lr_scheduler.state_dict())
            row["generators"] = fingerprint.generators()
        facts.append(os.environ["SEATRIAL_FACTS"], row)


def _has_gradient(value: Any) -> bool:
    return value.grad is not None and bool(_whole(value.grad).any())


class Actor(_Watched, FSDPEngineWithLMHead):  # type: ignore[misc]
    """The actor's engine; the reference model has the same, for forward passes only."""

    role = "actor"


class Critic(_Watched, FSDPEngineWithValueHead):  # type: ignore[misc]
    """The critic's engine."""

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
