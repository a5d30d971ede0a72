"""Fills the parts of a batch record inside verl's processes; `assemble` makes one record of them when the run is over.

| part | process | what it holds |
|---|---|---|
| server | the generation server | each completion: prompt and sampling settings as asked for, tokens, the scores they were drawn from |
| rewards.jsonl | the reward worker | each call of the reward function |
| actor, critic | the worker | weights at the start, what enters `forward` with gradients, each update with gradients and param_groups |

What verl calls advantages, returns or masks is added from what its loss function is given: the shadow reads it only to say where a step
went wrong. SEATRIAL_RECORD names the directory; without it nothing is recorded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import verl

from seatrial.instruments.batch_record import BatchRecord, UpdateHooks
from seatrial.loops.verl.drive.record_parts import directory

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
        place = directory()
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
        """Put together from their shards."""
        return ((name, self.engine.whole(value)) for name, value in self.model.named_parameters())

    def grouped(self, optimizer: Any) -> list[dict[str, Any]]:
        """As the engine keeps them."""
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
    place = directory()
    return EngineRecord(engine, place) if place and engine.optimizer is not None else None
