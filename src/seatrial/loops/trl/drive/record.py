"""Callbacks that write what a training run does: metrics as it goes, and the facts that proofs are made of.

- `MetricsWriter` appends every logged row to metrics.jsonl, in full precision, as soon as it is logged.
- `FactsWriter` fingerprints weights, optimizer, scheduler and random number generators at the start, at every
  checkpoint step and at the end. A resumed run that equals the uninterrupted one does so in all of them.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy
from transformers import TrainerCallback

from seatrial.probes import facts, fingerprint

CLOCKS = ("step_time", "train_runtime", "total_flos")


def timeless(logs: dict[str, Any]) -> dict[str, Any]:
    """What was logged without what a clock measured: two equal runs log the same."""
    return {key: value for key, value in logs.items() if key not in CLOCKS and not key.endswith("_per_second")}


def say(text: str) -> None:
    """A milestone line for the log."""
    print(f"seatrial: {text}", flush=True)


def trainer_state(model: Any, optimizer: Any, scheduler: Any) -> dict[str, Any]:
    """Fingerprints of all state that a checkpoint must carry."""
    return {
        "weights": fingerprint.model(model),
        "optimizer": fingerprint.state(optimizer.state_dict()) if optimizer is not None else {},
        "updates": updates(optimizer),
        "norm": float(sum(float((value.detach().double() ** 2).sum()) for value in model.parameters()) ** 0.5),
        "scheduler": fingerprint.state(scheduler.state_dict()) if scheduler is not None else {},
        "generators": fingerprint.generators(),
    }


def updates(optimizer: Any) -> list[int] | None:
    """The least and largest count of updates that the optimizer itself keeps per parameter; None if it keeps none."""
    kept = optimizer.state_dict()["state"].values() if optimizer is not None else ()
    counts = [int(entry["step"]) for entry in kept if isinstance(entry, dict) and "step" in entry]
    return [min(counts), max(counts)] if counts else None


class MetricsWriter(TrainerCallback):  # type: ignore[misc]
    """Appends one row per logged step."""

    def __init__(self, path: Path, prefix: str = "train") -> None:
        self.path, self.prefix = path, prefix

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Say which step was done; the stall watch and the progress display read it."""
        if state.is_world_process_zero:
            say(f"step {state.global_step} of {state.max_steps}")

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Write the row, except the summary that closes a run."""
        if state.is_world_process_zero and logs and "train_runtime" not in logs:
            # TRL says None where nothing could be measured, as when every row is masked; the shadow knows whether that is so.
            row = {f"{self.prefix}/{key}": value for key, value in logs.items() if value is not None}
            facts.append(self.path, {"step": state.global_step} | row)


class FactsWriter(TrainerCallback):  # type: ignore[misc]
    """Writes fingerprints at the start, at each save and at the end."""

    def __init__(self, path: Path, process: str, save_steps: int | None = None, made: bool = False) -> None:
        self.path, self.process, self.save_steps, self.made = path, process, save_steps, made
        self.without_gradient: set[str] | None = None
        self.idle_at: dict[str, int] = {}

    def _write(self, when: str, step: int, kwargs: dict[str, Any]) -> None:
        row = trainer_state(kwargs["model"], kwargs.get("optimizer"), kwargs.get("lr_scheduler"))
        facts.append(self.path, {"fact": "state", "when": when, "step": step, "process": self.process, **row})

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Record what is trainable, and where the run starts."""
        named = list(kwargs["model"].named_parameters())
        trainable = [name for name, value in named if value.requires_grad]
        row = {
            "fact": "parameters",
            "process": self.process,
            "world_size": args.world_size,
            "device": str(args.device),
            "made": self.made,
            "total": sum(value.numel() for _, value in named),
            "trainable": sum(value.numel() for _, value in named if value.requires_grad),
            "trainable_names": trainable,
            "start_step": state.global_step,
            "max_steps": state.max_steps,
        }
        facts.append(self.path, row)
        self._write("start", state.global_step, kwargs)
        if state.is_world_process_zero:
            say(f"training starts at step {state.global_step} of {state.max_steps}")

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note which parameters have had a gradient so far."""
        named = {name: value for name, value in kwargs["model"].named_parameters() if value.requires_grad}
        left = set(named) if self.without_gradient is None else self.without_gradient
        idle = {name for name, value in named.items() if value.grad is None or not bool(value.grad.any())}
        self.without_gradient = left & idle
        if idle != set(named):  # without any advantage no tensor has a gradient, and that is no fault
            self.idle_at |= {name: state.global_step + 1 for name in idle if name not in self.idle_at}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Record the state that the checkpoint of this step must restore.

        Every generator has moved by then: one that a resume leaves where the seed put it is seen.
        """
        random.random(), numpy.random.random()
        if self.save_steps and state.global_step % self.save_steps == 0 and state.global_step < state.max_steps:
            self._write("checkpoint", state.global_step, kwargs)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Record where the run ended, and what never had a gradient."""
        self._write("end", state.global_step, kwargs)
        rows = [json.dumps(timeless(row), sort_keys=True, default=str) for row in state.log_history]
        facts.append(self.path, {"fact": "history", "process": self.process, "rows": {str(place): row for place, row in enumerate(rows)}})
        row = {"fact": "gradients", "process": self.process, "never": sorted(self.without_gradient or ()), "idle_at": self.idle_at}
        facts.append(self.path, row | {"seen": self.without_gradient is not None})
        if state.is_world_process_zero:
            say(f"training ended at step {state.global_step} of {state.max_steps}")
