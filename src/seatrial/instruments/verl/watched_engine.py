"""verl's engines, watched from inside the worker: facts after every update, and their part of the batch record.

`Watched` stands before an engine class of verl; `fsdp_engine` and `megatron_engine` say how each keeps its model and optimizer.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import verl

from seatrial.instruments import facts
from seatrial.instruments.batch_record import BatchRecord, UpdateHooks, adapters_of
from seatrial.instruments.bits import fingerprint
from seatrial.instruments.verl import verl_process
from seatrial.instruments.verl.verl_process import record_directory

NAMES = {
    "actor": {
        "response_mask": "completion_mask",
        "advantages": "advantages",
        "old_log_probs": "old_per_token_logps",
        "ref_log_prob": "ref_per_token_logps",
    },
    "critic": {"response_mask": "completion_mask", "values": "values", "returns": "returns"},
}
"""Fields of a batch, and what the record calls them."""
OUTPUTS = {"actor": ("log_probs", "logps"), "critic": ("values", "predicted")}
PREFIXES = {"actor": "", "critic": "value_"}
version = 0
"""Of the weights that the generation server holds, as this worker sent them: a round begins with each."""


class ServerRecord:
    """Every completion of the generation server."""

    def __init__(self) -> None:
        place = record_directory()
        self.record = BatchRecord(place / "server") if place else None

    def add(self, prompt: list[int], tokens: list[int], scores: list[Any], asked: Mapping[str, Any], weights: int) -> None:
        """One completion, made with a version of the weights."""
        if self.record is None:
            return
        plain = {name: value for name, value in asked.items() if isinstance(value, (int, float, str, bool, type(None)))}
        tensors = {"prompt": torch.tensor(prompt), "tokens": torch.tensor(tokens), "scores": torch.stack(scores)}
        self.record.add("generated", "sampling", {"version": weights, "asked": plain}, tensors)


class EngineHooks(UpdateHooks):
    """The update of one engine: its tensors whole, by the names that its model gives them."""

    def __init__(self, record: BatchRecord, engine: Any, prefix: str) -> None:
        self.engine = engine
        super().__init__(record, engine.network(), prefix)

    def weights(self) -> Iterable[tuple[str, Any]]:
        return ((name, self.engine.whole(value)) for name, value in self.model.named_parameters())

    def grouped(self, optimizer: Any) -> list[dict[str, Any]]:
        if not any(optimizer is own for own in self.engine.optimizers()):
            return []
        return [{self.names[id(value)]: grad for value, grad in group} for group in self.engine.optimizer_groups(optimizer)]

    def accumulated(self) -> None:
        """The size of each gradient before it is clipped."""
        found = ((name, self.engine.gradient(value)) for name, value in self.model.named_parameters() if value.requires_grad)
        self.norms = {name: float(self.engine.whole(value).double().norm()) for name, value in found if value is not None}


class EngineRecord:
    """The part of one engine that trains."""

    def __init__(self, engine: Any, place: Path) -> None:
        self.engine, self.role, self.prefix = engine, engine.role, PREFIXES[engine.role]
        self.record = BatchRecord(place / self.role)
        self.hooks = EngineHooks(self.record, engine, self.prefix)
        self.forward: dict[str, Any] = {}
        engine.network().register_forward_pre_hook(self._entering, with_kwargs=True)
        self.hooks.start({"adapters": engine.adapters(), "versions": {"verl": verl.__version__}})

    def _entering(self, _: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """Before a forward pass with gradients: the tokens and the mask that the loss is made of."""
        if torch.is_grad_enabled():
            ids = kwargs.get("input_ids", args[0] if args else None)
            mask = kwargs.get("attention_mask")
            self.forward = {"input_ids": ids, "attention_mask": mask if mask is not None and mask.dim() == 2 else None}

    def observed(self, loss_function: Any) -> Any:
        """The loss function, with what it was given and made recorded."""

        def computed(*args: Any, **kwargs: Any) -> Any:
            made = loss_function(*args, **kwargs)
            if self.forward:
                named = self._trainer(kwargs.get("model_output", {}), kwargs.get("data"))
                values = {"trainer/loss": float(made[0].detach()), "round": version}
                self.record.add(f"{self.prefix}loss", "loss", values, {**self.forward, **named})
                self.forward = {}
            return made

        return computed

    def _trainer(self, output: Mapping[str, Any], data: Any) -> dict[str, Any]:
        """What verl calls the values of each token, padded on the right."""
        found = {}
        for name, ours in NAMES[self.role].items():
            value = data.get(name, None) if data is not None else None
            if isinstance(value, torch.Tensor):
                found[f"trainer/{ours}"] = value.to_padded_tensor(0) if value.is_nested else value
        name, ours = OUTPUTS[self.role]
        made, mask = output.get(name), data.get("response_mask", None) if data is not None else None
        if isinstance(made, torch.Tensor) and made.is_nested and mask is not None and mask.is_nested:
            lengths = mask.offsets().diff().tolist()
            # A value of a token stands at the place before it.
            rows = [row.detach()[-length - 1 : -1] for row, length in zip(made.unbind(), lengths, strict=True)]
            found[f"trainer/{ours}"] = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        return found


def attached(engine: Any) -> EngineRecord | None:
    """The record of an engine that trains, where one is kept."""
    place = record_directory()
    return EngineRecord(engine, place) if place and engine.optimizer is not None else None


class Watched:
    """Mixed into an engine in front of verl's class."""

    role = ""
    optimizer: Any
    lr_scheduler: Any
    engine_config: Any
    model_config: Any
    without_gradient: set[str] | None = None
    record: EngineRecord | None = None

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
        return [optimizer.state_dict() for optimizer in self.optimizers()]

    def generators(self) -> dict[str, str]:
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
        self.record = attached(self)

    def forward_backward_batch(self, data: Any, loss_function: Any, forward_only: bool = False) -> Any:
        """Train with a loss function whose arguments and loss are recorded."""
        if self.record is not None and not forward_only:
            loss_function = self.record.observed(loss_function)
        return super().forward_backward_batch(data, loss_function, forward_only=forward_only)  # type: ignore[misc]

    def optimizer_step(self) -> Any:
        """Note which parameters have a gradient, then step."""
        idle = {name for name, value in self.network().named_parameters() if value.requires_grad and not self._has_gradient(value)}
        self.without_gradient = idle if self.without_gradient is None else self.without_gradient & idle
        verl_process.before_step(self)
        if self.record is not None:
            self.record.hooks.accumulated()
        return super().optimizer_step()  # type: ignore[misc]

    def lr_scheduler_step(self) -> Any:
        """verl steps the scheduler once per training step, after its last update: the state of that step."""
        rate = super().lr_scheduler_step()  # type: ignore[misc]
        self._record("step", self.steps_done(), {"without_gradient": sorted(self.without_gradient or ())})
        return rate

    def save_checkpoint(self, local_path: str, *args: Any, **kwargs: Any) -> None:
        super().save_checkpoint(local_path, *args, **kwargs)  # type: ignore[misc]
        self._record("saved", self.steps_done())

    def load_checkpoint(self, local_path: str, *args: Any, **kwargs: Any) -> None:
        super().load_checkpoint(local_path, *args, **kwargs)  # type: ignore[misc]
        verl_process.after_load(self)
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
