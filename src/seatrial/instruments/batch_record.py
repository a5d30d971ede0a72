"""The batch record: what a loop did in every optimizer step, from dataset row to new weights. The loop writes it, the shadow reads it.

Runs inside a loop's interpreter: standard library, torch and safetensors. A record is `record.jsonl`, one row per event in the
order in which the loop did things, and `record/<number>.safetensors` with the tensors of that row. Two bit-reproducible runs
write equal rows.

| event | what it holds |
|---|---|
| started | every weight before the first step, which parameters train, the adapters in force |
| generated | prompts as given to the generator, drawn tokens, the scores they were drawn from |
| rewarded | one reward function: dataset row, tokens and reward of each completion |
| scored | what the trainer calls advantages, masks, old and reference log-probabilities (read only to say where a step went wrong) |
| loss | one micro-batch: tokens and mask that went into `forward`, and what the trainer made of them |
| updated | one optimizer step: gradients and param_groups in force, weights after it |
| logged | what the trainer logged for the step |
| ended | the weights that training left, and its own history of what it logged |

A critic's events are `value_started`, `value_loss` and `value_updated`, with the same contents.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.optim import optimizer

from seatrial.instruments import facts
from seatrial.instruments.bits import fingerprint

ROWS = "record.jsonl"
TENSORS = "record"
KEEP_NUMEL = 8_000_000  # A model with more elements than this is kept as hashes and samples
SAMPLE = 2048  # elements kept of each tensor of a larger model: evenly spaced, the first and the last among them


class BatchRecord:
    """Writes the record of one process. `step` is the optimizer step that is being prepared, counted from 1."""

    def __init__(self, directory: Path, steps: int | None = None) -> None:
        self.directory, self.steps, self.number, self.step = directory, steps, 0, 1
        self.done = 0  # the last step whose update is recorded
        (directory / TENSORS).mkdir(parents=True, exist_ok=True)

    def open(self) -> bool:
        """Whether this step is still recorded."""
        return self.steps is None or self.step <= self.steps

    def add(
        self, event: str, stage: str, values: Mapping[str, Any] | None = None, tensors: Mapping[str, Any] | None = None, step: int = 0
    ) -> None:
        """Append one event of this step, or of another; tensors are copied to the CPU, and their digests go into the row."""
        self.number += 1
        kept = {name: value.detach().to("cpu", copy=True).contiguous() for name, value in (tensors or {}).items() if value is not None}
        row: dict[str, Any] = {"event": event, "step": step or self.step, "stage": stage, "values": dict(values or {})}
        row["digests"] = fingerprint.tensors(kept.items())
        if kept:
            save_file(kept, str(self.directory / TENSORS / f"{self.number:05d}.safetensors"))
            row["tensors"] = f"{self.number:05d}.safetensors"
        facts.append(self.directory / ROWS, row)


def sample(tensor: Any) -> Any:
    """The elements that are kept of a tensor of a larger model."""
    flat = tensor.detach().reshape(-1)
    if flat.numel() <= SAMPLE:
        return flat
    return flat[torch.linspace(0, flat.numel() - 1, SAMPLE, device=flat.device, dtype=torch.float64).round().long()]


class UpdateHooks:
    """Records every step of torch's optimizers, seen from torch itself: the code under test has no part in it.

    A loop that shards or fuses its tensors overrides `weights` and `grouped`, which give them whole and by the model's own names.
    """

    def __init__(self, record: BatchRecord, model: Any, prefix: str = "", computed: Callable[[], None] = lambda: None) -> None:
        self.record, self.model, self.prefix = record, model, prefix
        self.computed = computed  # called when the gradients of a micro-batch arrive, at least once for each
        self.names = {id(value): name for name, value in model.named_parameters()}
        self.whole = sum(value.numel() for value in model.parameters()) <= KEEP_NUMEL
        trained = {name: value.numel() for name, value in model.named_parameters() if value.requires_grad}
        self.kept_whole = set(trained) if sum(trained.values()) <= KEEP_NUMEL else set()  # of a large model: its adapters, if it has any
        self.norms: dict[str, float] = {}
        self.handles = [optimizer.register_optimizer_step_pre_hook(self._before), optimizer.register_optimizer_step_post_hook(self._after)]
        self.handles += [value.register_post_accumulate_grad_hook(self._accumulated) for value in model.parameters() if value.requires_grad]
        self.pending: dict[str, Any] = {}

    def close(self) -> None:
        for handle in self.handles:
            handle.remove()

    def start(self, values: Mapping[str, Any]) -> None:
        """Record the weights before the first step."""
        facts_of = {"trainable": self.trainable(), "norms": layer_norms(self.model), "whole": self.whole, **values}
        self.record.add(f"{self.prefix}started", "update", facts_of, self._kept(self.weights()))

    def end(self, values: Mapping[str, Any]) -> None:
        """Record the weights once training has returned, and more values."""
        if self.record.open():
            weights = {"weights": fingerprint.tensors(self.weights())}
            self.record.add(f"{self.prefix}ended", "update", {**weights, **values}, step=self.record.done)

    def trainable(self) -> list[str]:
        return [name for name, value in self.model.named_parameters() if value.requires_grad]

    def weights(self) -> Iterable[tuple[str, Any]]:
        """Every parameter, whole, by its name."""
        return self.model.named_parameters()  # type: ignore[no-any-return]

    def grouped(self, optimizer: Any) -> list[dict[str, Any]]:
        """The parameters of each group of an optimizer, whole, by their names: the gradient, or None. Empty if none is this model's."""
        if not any(id(value) in self.names for group in optimizer.param_groups for value in group["params"]):
            return []
        return [{self.names.get(id(value), "?"): value.grad for value in group["params"]} for group in optimizer.param_groups]

    def _kept(self, named: Iterable[tuple[str, Any]]) -> dict[str, Any]:
        return {name: value if self.whole or name in self.kept_whole else sample(value) for name, value in named}

    def _accumulated(self, parameter: Any) -> None:
        """After each backward: the size of the gradient so far, which clipping will change."""
        self.computed()
        if self.record.open() and parameter.grad is not None:
            self.norms[self.names[id(parameter)]] = float(parameter.grad.detach().double().norm())

    def _before(self, optimizer: Any, _: Any, __: Any) -> None:
        parts = self.grouped(optimizer) if self.record.open() else []
        if not parts:
            return
        self.computed()  # where no gradient arrived at all
        groups: list[dict[str, Any]] = []
        gradients: dict[str, Any] = {}
        for named, group in zip(parts, optimizer.param_groups, strict=True):
            gradients |= {name: value for name, value in named.items() if value is not None}
            knobs = {key: value for key, value in group.items() if key != "params" and isinstance(value, (int, float, tuple, list, bool))}
            groups.append({"names": list(named), **knobs})
        self.pending = {
            "values": {"groups": groups, "optimizer": type(optimizer).__name__, "accumulated": dict(self.norms)}
            | {"before": fingerprint.tensors(self.weights())},
            "gradients": {f"gradient/{name}": value.detach().clone() for name, value in self._kept(gradients.items()).items()},
        }
        self.norms.clear()

    def _after(self, _: Any, __: Any, ___: Any) -> None:
        if not self.pending:
            return
        weights = {f"weight/{name}": value for name, value in self._kept(self.weights()).items()}
        if not self.whole:
            self.pending["values"]["after"] = fingerprint.tensors(self.weights())
        self.record.add(f"{self.prefix}updated", "update", self.pending["values"], self.pending["gradients"] | weights)
        self.pending = {}
        self.record.done = self.record.step
        self.record.step += 1


def layer_norms(model: Any) -> list[str]:
    """Names of the parameters of torch's own layer norms."""
    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, torch.nn.LayerNorm)]
    return [f"{name}.{part}" for name, module in layers for part, _ in module.named_parameters()]


def text_digest(given: Any) -> str:
    """Of the text of a prompt or a completion: plain, or messages with parts."""
    return hashlib.sha256(_text(given).encode("utf-8", "surrogatepass")).hexdigest()[:16]


def _text(given: Any) -> str:
    if isinstance(given, str):
        return given
    if isinstance(given, Mapping):
        return _text(given.get("content", given.get("text", "")))
    return "".join(map(_text, given)) if isinstance(given, (list, tuple)) else ""


def adapters_of(model: Any) -> dict[str, dict[str, Any]]:
    """Rank and scale of every PEFT adapter in a model, by its layer."""
    return {
        name: {"rank": int(module.lora_A[key].weight.shape[0]), "scale": float(module.scaling[key]), "adapter": key}
        for name, module in model.named_modules()
        if getattr(module, "lora_A", None)
        for key in module.lora_A
    }


@dataclass(frozen=True)
class Event:
    kind: str
    step: int
    values: dict[str, Any]
    path: Path | None

    def tensors(self) -> dict[str, Any]:
        return load_file(self.path) if self.path else {}


@dataclass(frozen=True)
class Moment:
    """The same event on every rank, rank 0 first; what only rank 0 writes stands alone."""

    kind: str
    step: int
    ranks: tuple[Event, ...]

    def first(self) -> Event:
        return self.ranks[0]


def moments(directory: Path, world: int) -> Iterator[Moment]:
    """The records of all ranks, side by side; ValueError where they do not go together."""
    others = [events(directory / f"rank{rank}") for rank in range(1, world)]
    for event in events(directory):
        together = [event]
        for rank, stream in enumerate(others if event.kind != "logged" else (), 1):
            other = next(stream, None)
            if other is None or (other.kind, other.step) != (event.kind, event.step):
                got = f"{other.kind} of step {other.step}" if other else "nothing more"
                raise ValueError(f"rank 0 recorded {event.kind} of step {event.step}, rank {rank} {got}")
            together.append(other)
        yield Moment(event.kind, event.step, tuple(together))


def events(directory: Path) -> Iterator[Event]:
    """Every row of the record below `directory`; a torn row raises ValueError with its line."""
    with (directory / ROWS).open(encoding="utf-8") as stream:
        for number, line in enumerate(stream, 1):
            try:
                row = json.loads(line)
                name = row.get("tensors")
                yield Event(row["event"], int(row["step"]), _numbers(row["values"]), directory / TENSORS / name if name else None)
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ValueError(f"{directory / ROWS}, line {number}: not a row of a record: {error}") from error


def _numbers(value: Any) -> Any:
    """Values of a row, with the numbers that JSON has no word for (see `facts.plain`)."""
    if isinstance(value, dict):
        return {key: _numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_numbers(item) for item in value]
    return float(value) if value in ("NaN", "Infinity", "-Infinity") else value
