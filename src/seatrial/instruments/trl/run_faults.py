"""Known real-world bugs, injected on purpose. A trial that passes with one of them is broken.

Each fault acts where the real bug acted: in the reward, the optimizer, the checkpoint, the refit, the ranks, the
process. Those of the refit act inside the generation process (see generator.py).
"""

from __future__ import annotations

import os
import time
from typing import Any

from transformers import TrainerCallback

from seatrial.instruments.trl.fault_names import FAULTS


class Saboteur(TrainerCallback):  # type: ignore[misc]
    """Faults that act between steps."""

    def __init__(self, fault: str) -> None:
        self.fault = fault
        self.kept: dict[str, Any] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Faults that act before the first step."""
        model, optimizer = kwargs["model"], kwargs["optimizer"]
        if self.fault == "no-optimizer-step":
            optimizer.step = lambda *_, **__: None
        elif self.fault == "skip-update":
            step = optimizer.step
            optimizer.step = lambda *args, **kw: step(*args, **kw) if state.global_step % 2 else None
        elif self.fault == "forget-optimizer" and state.global_step:
            optimizer.optimizer.state.clear()
        elif self.fault == "frozen-adapter":
            self.kept = {name: value.detach().clone() for name, value in model.named_parameters() if value.requires_grad}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Faults that act after a step."""
        named = dict(kwargs["model"].named_parameters())
        if self.fault == "frozen-adapter":
            for name, value in self.kept.items():
                named[name].data.copy_(value)
        elif self.fault == "train-base":
            next(value for name, value in named.items() if not value.requires_grad).data.view(-1)[0] += 1e-3
        elif self.fault == "nan-weight" and state.global_step == 2:
            next(iter(named.values())).data.view(-1)[0] = float("nan")
        elif self.fault == "early-exit" and state.global_step == 2:
            os._exit(0)
        elif self.fault == "hang" and state.global_step == 2:
            time.sleep(10**6)


def reward(function: Any, fault: str | None) -> Any:
    """The reward function, or a broken one of the same name."""
    calls = 0

    def broken(completion_ids: Any, **kwargs: Any) -> list[float]:
        nonlocal calls
        calls += 1
        if fault == "reward-raises" and calls == 3:
            raise RuntimeError("reward backend unavailable")
        return [0.5] * len(completion_ids) if fault == "constant-reward" else function(completion_ids=completion_ids, **kwargs)

    broken.__name__ = function.__name__
    return broken if fault in ("constant-reward", "reward-raises") else function


def trainer(built: Any, fault: str | None) -> None:
    """Faults that act on the trainer object."""
    if fault == "no-grad-sync":
        built.accelerator.prepare = _without_ddp(built.accelerator)
    elif fault == "forget-rng":
        built._load_rng_state = lambda *_: None
    elif fault == "nan-loss":
        inner = built.training_step
        built.training_step = lambda *args, **kw: inner(*args, **kw) + (float("nan") if built.state.global_step == 2 else 0.0)
    elif fault == "frozen-layer":
        built.model.model.layers[0].requires_grad_(False)
    elif fault == "wrong-reference":
        for value in built.ref_model.parameters():
            value.data *= 1.5
    elif fault == "half-advantages":
        built._generate_and_score_completions = _half(built._generate_and_score_completions)
    elif fault in ("wrong-mask", "blind-generation", "swapped-pictures"):
        built.model.generate = _misled(built.model.generate, fault)
    elif fault == "blind" and hasattr(built.processing_class, "image_processor"):
        kind = type(built.processing_class.image_processor)  # of the class: a processor is saved with the model
        kind.preprocess = _blank(kind.preprocess)
    if fault in FAULTS:
        built.add_callback(Saboteur(fault))


def _half(score: Any) -> Any:
    def scored(inputs: Any) -> Any:
        output = score(inputs)
        output["advantages"][: len(output["advantages"]) // 2] = 0
        return output

    return scored


def _misled(generate: Any, fault: str) -> Any:
    def generated(**kwargs: Any) -> Any:
        if fault == "wrong-mask":
            kwargs["attention_mask"] = kwargs["attention_mask"] * 0 + 1
        elif "pixel_values" in kwargs:
            pictures = kwargs["pixel_values"]
            kwargs["pixel_values"] = pictures * 0 if fault == "blind-generation" else pictures.roll(len(pictures) // 2 + 4, 0)
        return generate(**kwargs)

    return generated


def _blank(preprocess: Any) -> Any:
    def blank(processor: Any, images: Any, *args: Any, **kwargs: Any) -> Any:
        made = preprocess(processor, images, *args, **kwargs)
        for index, value in enumerate(made["pixel_values"]):
            made["pixel_values"][index] = value * 0
        return made

    return blank


def _without_ddp(accelerator: Any) -> Any:
    """`prepare` that leaves the model unwrapped, so that no gradient is exchanged."""
    original = accelerator.prepare

    def prepare(*objects: Any, **kwargs: Any) -> Any:
        import torch

        placement = [not isinstance(item, torch.nn.Module) for item in objects]
        return original(*objects, device_placement=placement, **kwargs) if all(placement) else objects[0] if len(objects) == 1 else objects

    return prepare
