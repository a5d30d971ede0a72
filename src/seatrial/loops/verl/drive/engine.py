"""verl's engines, watched from inside the worker: what is trained, and the state after every update.

`Watched` is mixed in front of an engine class of verl; `fsdp_engine` and `megatron_engine` say how each keeps its model and
optimizer. Facts are written where SEATRIAL_FACTS says:
- `parameters` once the model is built: which are trainable, and how many;
- `files` of the actor: the tensors of the model's own files, in the precision of training;
- `state` at the start, after each optimizer update of a step, after a checkpoint was loaded and when one is saved:
  fingerprints of weights, optimizer, scheduler and random number generators.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from seatrial.instruments.batch_record import adapters_of
from seatrial.loops.verl.drive import faults, step_record
from seatrial.probes import facts, fingerprint


class Watched:
    """Mixed into an engine in front of verl's class."""

    role = ""
    optimizer: Any
    lr_scheduler: Any
    engine_config: Any
    model_config: Any
    without_gradient: set[str] | None = None
    record: step_record.EngineRecord | None = None

    def network(self) -> Any:
        """The model as one torch module."""
        raise NotImplementedError

    def whole(self, value: Any) -> Any:
        """The full tensor of one that may be sharded."""
        return value

    def gradient(self, value: Any) -> Any:
        """The gradient of a parameter, or None."""
        raise NotImplementedError

    def optimizers(self) -> list[Any]:
        """The torch optimizers that make the updates."""
        raise NotImplementedError

    def optimizer_groups(self, optimizer: Any) -> list[list[tuple[Any, Any]]]:
        """The model's parameters in each group of a torch optimizer, with their gradients, whole; the gradient may be None."""
        return [
            [(value, None if value.grad is None else self.whole(value.grad)) for value in group["params"]]
            for group in optimizer.param_groups
        ]

    def adapters(self) -> dict[str, dict[str, Any]]:
        """Rank and scale of every adapter, by its layer."""
        return adapters_of(self.network())

    def steps_done(self) -> int:
        """How often the scheduler was advanced."""
        raise NotImplementedError

    def optimizer_state(self) -> Any:
        """All that the optimizer knows."""
        return [optimizer.state_dict() for optimizer in self.optimizers()]

    def generators(self) -> dict[str, str]:
        """The random number generators of this process."""
        return fingerprint.generators()

    def as_exported(self) -> Mapping[str, Any] | None:
        """What the generator is to hold, by its names there, worked out without the code that exports; None where that is not known."""
        return None

    def initialize(self) -> None:
        """Build, then say what was built."""
        super().initialize()  # type: ignore[misc]
        if self.engine_config.forward_only:
            self.role = "reference"
        named = list(self.network().named_parameters())
        row: dict[str, Any] = {"fact": "parameters", "role": self.role, "total": sum(value.numel() for _, value in named)}
        row["trainable"] = sum(value.numel() for _, value in named if value.requires_grad)
        row["trainable_names"] = [name for name, value in named if value.requires_grad]
        row["frozen_names"] = [name for name, value in named if not value.requires_grad]
        facts.append(os.environ["SEATRIAL_FACTS"], row)
        if self.role == "actor":
            held = fingerprint.tensors(_files(Path(self.model_config.local_path), named[0][1].dtype))
            facts.append(os.environ["SEATRIAL_FACTS"], {"fact": "files", "tensors": held})
        self._record("start", 0)
        self.record = step_record.attached(self)

    def forward_backward_batch(self, data: Any, loss_function: Any, forward_only: bool = False) -> Any:
        """Train with a loss function whose arguments and loss are recorded."""
        if self.record is not None and not forward_only:
            loss_function = self.record.observed(loss_function)
        return super().forward_backward_batch(data, loss_function, forward_only=forward_only)  # type: ignore[misc]

    def optimizer_step(self) -> Any:
        """Note which parameters have a gradient, then step."""
        idle = {name for name, value in self.network().named_parameters() if value.requires_grad and not self._has_gradient(value)}
        self.without_gradient = idle if self.without_gradient is None else self.without_gradient & idle
        faults.before_step(self)
        if self.record is not None:
            self.record.hooks.accumulated()
        return super().optimizer_step()  # type: ignore[misc]

    def lr_scheduler_step(self) -> Any:
        """verl steps the scheduler once per training step, after its last update: the state of that step."""
        rate = super().lr_scheduler_step()  # type: ignore[misc]
        self._record("step", self.steps_done(), {"without_gradient": sorted(self.without_gradient or ())})
        return rate

    def save_checkpoint(self, local_path: str, *args: Any, **kwargs: Any) -> None:
        """Save, then record what the checkpoint must restore."""
        super().save_checkpoint(local_path, *args, **kwargs)  # type: ignore[misc]
        self._record("saved", self.steps_done())

    def load_checkpoint(self, local_path: str, *args: Any, **kwargs: Any) -> None:
        """Load, then record what was restored."""
        super().load_checkpoint(local_path, *args, **kwargs)  # type: ignore[misc]
        faults.after_load(self)
        self._record("restored", self.steps_done())

    def _record(self, when: str, step: int, extra: dict[str, Any] | None = None) -> None:
        row = {"fact": "state", "role": self.role, "when": when, "step": step, **(extra or {})}
        row["weights"] = fingerprint.tensors((name, self.whole(value)) for name, value in fingerprint.named_state(self.network()))
        exported = self.as_exported() if self.role == "actor" else None
        if exported is not None:
            row["exported"] = fingerprint.tensors(exported.items())
        if self.optimizer is not None:
            row["optimizer"] = fingerprint.state(self.whole(self.optimizer_state()))
            row["updates"] = self._updates()
            row["scheduler"] = fingerprint.state(self.lr_scheduler.state_dict())
            row["generators"] = self.generators()
        facts.append(os.environ["SEATRIAL_FACTS"], row)

    def _updates(self) -> list[int] | None:
        """The least and largest count of updates that the optimizers keep per parameter; None if they keep none."""
        kept = [entry for optimizer in self.optimizers() for entry in optimizer.state_dict()["state"].values()]
        counts = [int(entry["step"]) for entry in kept if "step" in entry]
        return [min(counts), max(counts)] if counts else None

    def _has_gradient(self, value: Any) -> bool:
        found = self.gradient(value)
        return found is not None and bool(self.whole(found).any())


def _files(directory: Path, dtype: Any) -> Iterator[tuple[str, Any]]:
    """Every tensor of a model's files, rounded as it is rounded when the model is built."""
    from safetensors.torch import load_file

    for path in sorted(directory.glob("*.safetensors")):
        for name, value in load_file(path).items():
            yield name, value.to(dtype)
