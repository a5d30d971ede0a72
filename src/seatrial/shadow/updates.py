"""Schedules and optimizers from their published formulas, and which parameters decay."""

from __future__ import annotations

import math
import re
from collections.abc import Container, Mapping
from typing import Any

import torch

from seatrial.shadow.settings import Settings

EPS = 1.2e-7
"""The spacing of fp32 numbers around 1."""
NO_DECAY = tuple(re.compile(pattern) for pattern in (r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"))
ADAM = ("adamw", "adam")
OPTIMIZERS = (*ADAM, "sgd", "adagrad", "rmsprop")
SCHEDULES = (
    "constant",
    "constant_with_warmup",
    "linear",
    "cosine",
    "cosine_with_restarts",
    "polynomial",
    "inverse_sqrt",
    "cosine_with_min_lr",
)

BOUNDED = ("bounded_constant", "bounded_linear", "bounded_cosine")
"""Schedules from `init_lr` up to the learning rate, then down to `min_lr` at `decay_steps`."""


def rate(step: int, s: Settings) -> float:
    """The learning rate of an optimizer step, counted from 1."""
    done = (step - 1) // s.steps_per_round() if s.rate_per_round else step - 1
    done += int(s.schedule_options.get("ahead", 0))
    warm, total = s.warmup, s.max_steps
    if s.schedule in BOUNDED:
        return _bounded(done, s)
    if s.schedule == "constant":
        return s.learning_rate
    if done < warm:
        return s.learning_rate * done / max(1, warm)
    if s.schedule == "constant_with_warmup":
        return s.learning_rate
    if s.schedule == "linear":
        return s.learning_rate * max(0.0, (total - done) / max(1, total - warm))
    if s.schedule == "inverse_sqrt":
        span = s.schedule_options.get("timescale") or warm or 10_000
        return s.learning_rate / math.sqrt((done + span - warm) / span)
    share = (done - warm) / max(1, total - warm)
    if s.schedule == "cosine":
        cycles = s.schedule_options.get("num_cycles", 0.5)
        return s.learning_rate * max(0.0, 0.5 * (1 + math.cos(math.pi * cycles * 2 * share)))
    if s.schedule == "cosine_with_restarts":
        cycles = s.schedule_options.get("num_cycles", 1)
        return s.learning_rate * (0.0 if share >= 1 else max(0.0, 0.5 * (1 + math.cos(math.pi * ((cycles * share) % 1.0)))))
    if s.schedule == "cosine_with_min_lr":
        low = s.schedule_options.get("min_lr_rate", s.schedule_options.get("min_lr", 0.0) / s.learning_rate)
        cycles = s.schedule_options.get("num_cycles", 0.5)
        return s.learning_rate * max(0.0, 0.5 * (1 + math.cos(math.pi * cycles * 2 * share)) * (1 - low) + low)
    if s.schedule == "polynomial":
        end, power = s.schedule_options.get("lr_end", 1e-7), s.schedule_options.get("power", 1.0)
        if done > total:
            return end
        return float((s.learning_rate - end) * (1 - (done - warm) / (total - warm)) ** power + end)
    raise ValueError(f"no formula for the schedule {s.schedule}")


def _bounded(done: int, s: Settings) -> float:
    low, start = s.schedule_options.get("min_lr", 0.0), s.schedule_options.get("init_lr", 0.0)
    warm, end = s.warmup, s.schedule_options.get("decay_steps", s.max_steps)
    if warm > 0 and done <= warm:
        return start + (s.learning_rate - start) * done / warm
    if s.schedule == "bounded_constant":
        return s.learning_rate
    if done > end:
        return low
    share = (done - warm) / max(1.0, end - warm)
    kept = 1 - share if s.schedule == "bounded_linear" else 0.5 * (1 + math.cos(math.pi * share))
    return low + kept * (s.learning_rate - low)


class Moments:
    """The optimizer's state in fp64, fed with the gradients that were recorded."""

    def __init__(self, settings: Settings, norms: Container[str] = ()) -> None:
        self.settings, self.norms = settings, norms
        self.state: dict[str, dict[str, Any]] = {}
        self.slack: dict[str, Any] = {}
        """What rounding in fp32 may change of each weight, where a gradient and a decay nearly cancel."""

    def decays(self, name: str, dimensions: int) -> bool:
        """Whether weight decay applies to a parameter, by the rule of `Settings.decays`: `named` also knows norms as layers of torch."""
        if self.settings.decays == "all":
            return True
        if self.settings.decays == "matrices":
            return dimensions > 1 and not name.endswith(".bias")
        plain = name.removeprefix("base_model.model.")
        return plain not in self.norms and not any(pattern.search(name.lower()) for pattern in NO_DECAY)

    def step(self, weights: Mapping[str, Any], gradients: Mapping[str, Any], lr: float) -> dict[str, Any]:
        """The weights after one step."""
        return {name: self._one(name, weights[name].double(), gradients[name].double(), lr) for name in gradients}

    def _one(self, name: str, weight: Any, gradient: Any, lr: float) -> Any:
        s = self.settings
        kept = self.state.setdefault(name, {"count": 0})
        kept["count"] += 1
        decay = s.weight_decay if self.decays(name, weight.dim()) else 0.0
        if s.optimizer in ADAM:
            return self._adam(kept, weight, gradient, lr, decay)
        lost = 8 * EPS * lr * (gradient.abs() + (decay * weight).abs())
        gradient = gradient + decay * weight
        options = s.optimizer_options
        if s.optimizer == "sgd":
            momentum = float(options.get("momentum", 0.0))
            if momentum:
                kept["buffer"] = gradient.clone() if "buffer" not in kept else momentum * kept["buffer"] + gradient
                kept["lost"] = momentum * kept.get("lost", 0.0) + lost
                lost = kept["lost"] + lost
                gradient = gradient + momentum * kept["buffer"] if options.get("nesterov") else kept["buffer"]
            self.slack[name] = lost
            return weight - lr * gradient
        if s.optimizer == "adagrad":
            kept["sum"] = kept.get("sum", torch.zeros_like(weight)) + gradient**2
            below = kept["sum"].sqrt() + float(options.get("eps", 1e-10))
            self.slack[name] = lost / below
            return weight - lr * gradient / below
        if s.optimizer == "rmsprop":
            alpha = float(options.get("alpha", 0.99))
            kept["square"] = alpha * kept.get("square", torch.zeros_like(weight)) + (1 - alpha) * gradient**2
            below = kept["square"].sqrt() + float(options.get("eps", 1e-8))
            self.slack[name] = lost / below
            return weight - lr * gradient / below
        raise ValueError(f"no formula for the optimizer {s.optimizer}")

    def _adam(self, kept: dict[str, Any], weight: Any, gradient: Any, lr: float, decay: float) -> Any:
        s = self.settings
        one, two = s.betas
        if s.optimizer == "adam" and decay:
            gradient = gradient + decay * weight
        kept["mean"] = one * kept.get("mean", torch.zeros_like(weight)) + (1 - one) * gradient
        kept["square"] = two * kept.get("square", torch.zeros_like(weight)) + (1 - two) * gradient**2
        mean, square = kept["mean"] / (1 - one ** kept["count"]), kept["square"] / (1 - two ** kept["count"])
        shrunk = weight * (1 - lr * decay) if s.optimizer == "adamw" else weight
        return shrunk - lr * mean / (square.sqrt() + s.epsilon)
