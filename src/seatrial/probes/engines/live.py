"""What the model of a generation worker holds, by exported name: read through the coordinate map. Runs inside the worker.

- The map is learned once, after the first refit, through the model's own load_weights, and the weights are restored bit for bit.
  It needs a second copy of the weights for that time, on the host.
- A name that does not lie wholly on this rank, or that the loader transforms, is not proven here; it is left out, and counted.
- Where the runtime has another dtype than what was sent, the value sent is cast likewise, and compared with that.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from seatrial.probes import fingerprint

BATCH = 1 << 30
"""Bytes that are gathered before they are hashed."""


def model_of(worker: Any) -> Any:
    """The model of a vLLM worker, without what captures its graphs."""
    runner = worker.model_runner
    return runner.get_model() if hasattr(runner, "get_model") else runner.model


def replica_of(worker: Any, process: str) -> str:
    """A name for this rank of this engine. A loop that numbers its engines keeps the number over a restart."""
    return f"{os.environ.get('VERL_REPLICA_RANK', process)}/{getattr(worker, 'rank', 0)}"


def dtype_of(model: Any) -> Any:
    """What most floating-point weights of the model are held in."""
    counts: dict[Any, int] = {}
    for value in model.parameters():
        if value.is_floating_point():
            counts[value.dtype] = counts.get(value.dtype, 0) + value.numel()
    return max(counts, key=lambda dtype: counts[dtype], default=None)


def held(worker: Any) -> dict[str, str]:
    """Hashes of every parameter and buffer that a vLLM worker generates with; those of a draft model begin with `drafter.`."""
    named = list(fingerprint.named_state(model_of(worker)))
    drafter = getattr(getattr(worker.model_runner, "drafter", None), "model", None)
    if hasattr(drafter, "named_parameters"):
        named += [(f"drafter.{name}", tensor) for name, tensor in fingerprint.named_state(drafter)]
    return fingerprint.tensors(named)


class Live:
    """The map of one worker, and what it read last."""

    def __init__(self, worker: Any, layouts: Mapping[str, list[Any]]) -> None:
        import torch

        from seatrial.probes.refit import coordinates, coverage

        model = model_of(worker)
        export = {
            name: torch.empty(shape, dtype=getattr(torch, dtype.removeprefix("torch.")), device="meta")
            for name, (dtype, shape) in layouts.items()
        }
        before = fingerprint.digest(fingerprint.model(model))
        self.layouts = dict(layouts)
        self.map = coordinates.learn(model, model.load_weights, export)
        self.restored = fingerprint.digest(fingerprint.model(model)) == before
        self.misplaced = coverage.misplaced(self.map)
        self.watch = coverage.Watch(model, self.map)
        self.last: dict[str, str] = {}
        self._of: dict[str, Any] = {}
        """The part of the map that concerns one name: a search through all tables for each name takes long in a large model."""
        tables: dict[str, dict[str, Any]] = {}
        for runtime, table in self.map.tables.items():
            for owner in torch.unique(table.owner).tolist():
                tables.setdefault(self.map.ids.names[owner], {})[runtime] = table
        self._of = {name: dataclasses.replace(self.map, tables=own) for name, own in tables.items()}

    def row(self) -> dict[str, Any]:
        """The map as a fact."""
        elements = sum(int(table.length.sum()) for table in self.map.tables.values())
        row = {"elements": elements, "runs": self.map.count, "duplicates": self.map.duplicates, "restored": self.restored}
        return {**row, "misplaced": self.misplaced}

    def coverage(self, worker: Any, replica: str) -> dict[str, Any]:
        """What became of every tensor of the runtime and every name since the map was learned. What never changed shows only at the end."""
        from seatrial.probes.refit import coverage

        self.watch.look()
        row = coverage.classify(model_of(worker), self.map, self.watch.touched, self.watch.moved).row(replica, ())
        del row["fact"]
        return row

    def read(self, worker: Any) -> dict[str, tuple[str, str]]:
        """dtype and hash of each name that lies wholly here."""
        model, found = model_of(worker), {}
        batch: dict[str, Any] = {}
        size = 0
        for place, (name, part) in enumerate(self._of.items(), 1):
            value = part.gather(model, name)
            if value is not None:
                batch[name] = value
                size += value.numel() * value.element_size()
            if size > BATCH or place == len(self._of):  # a GPU is waited for once per batch, and no second model is held
                hashes = fingerprint.tensors(batch.items())
                found.update({each: (str(batch[each].dtype), hashes[each]) for each in batch})
                batch, size = {}, 0
        return found
