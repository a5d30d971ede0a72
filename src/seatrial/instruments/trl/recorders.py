"""Writes what a TRL run does: metrics, facts about weights and optimizer, and the batch record of every step."""

from __future__ import annotations

import hashlib
import json
import math
import random
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import peft
import torch
import transformers
import trl
from transformers import TrainerCallback

from seatrial.instruments import facts
from seatrial.instruments.batch_record import BatchRecord, UpdateHooks, adapters_of, text_digest
from seatrial.instruments.bits import fingerprint
from seatrial.instruments.trl.trl_settings import is_setting

CLOCKS = ("step_time", "train_runtime", "total_flos")


def timeless(logs: dict[str, Any]) -> dict[str, Any]:
    """What was logged without what a clock measured: two equal runs log the same."""
    return {key: value for key, value in logs.items() if key not in CLOCKS and not key.endswith("_per_second")}


def say(text: str) -> None:
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


SCORED = (
    *("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "tool_mask", "advantages"),
    *("old_per_token_logps", "ref_per_token_logps", "sampling_per_token_logps", "importance_sampling_ratio"),
)
MOST_BYTES = 2**30  # probabilities of one generation that are kept: of more, none are, and the draw rests on statistics
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_new_tokens", "do_sample", "eos_token_id", "pad_token_id")


class StepRecorder:
    """Attached to one trainer of one process."""

    def __init__(self, directory: Path, steps: int | None = None) -> None:
        self.record = BatchRecord(directory, steps)
        self.trainer: Any = None
        self.forwards: list[dict[str, Any]] = []  # what entered the forward passes of the micro-batch that is being computed
        self.inputs: dict[str, Any] = {}  # what the trainer says that its loss is made of
        self.logps: list[Any] = []
        self.loss: float | None = None
        self.rewards: Any = None  # the trainer's table of rewards

    def reward(self, function: Any) -> Any:
        """The reward function, with what it got and answered recorded; None stands for NaN."""

        def recorded(prompts: Any, completions: Any, completion_ids: Any, row: Any = None, **kwargs: Any) -> Any:
            answer = function(prompts=prompts, completions=completions, completion_ids=completion_ids, row=row, **kwargs)
            if self.trainer is not None and self.record.open():
                ids, lengths = _padded(completion_ids)
                rewards = torch.tensor([math.nan if value is None else float(value) for value in answer], dtype=torch.float64)
                rows = torch.tensor([-1 if value is None else int(value) for value in row or [None] * len(prompts)])
                texts = {name: [text_digest(text) for text in given] for name, given in (("prompts", prompts), ("texts", completions))}
                tensors = {"completion_ids": ids, "lengths": lengths, "rewards": rewards, "rows": rows}
                self.record.add("rewarded", "reward", {"function": function.__name__, **texts}, tensors)
            return answer

        recorded.__name__ = function.__name__
        return recorded

    def attach(self, trainer: Any) -> None:
        """Put the hooks on; call it once the trainer is built."""
        self.trainer = trainer
        self.model = trainer.accelerator.unwrap_model(trainer.model)
        self.hooks = UpdateHooks(self.record, self.model, computed=self._computed)
        # Functions, since a copy of the model takes them along; a method would be copied with all that the recorder holds.
        if trainer.rollout_func is None:
            generate = self.model.generate
            self.model.generate = lambda *args, **kwargs: self._generated(generate, *args, **kwargs)
        else:
            trainer.rollout_func = partial(self._rolled, trainer.rollout_func)
        self.model.register_forward_pre_hook(lambda *given: self._entering(*given), with_kwargs=True)
        for name, observed in (
            ("_calculate_rewards", self._rewarded),
            ("_generate_and_score_completions", self._scored),
            ("_get_per_token_logps_and_entropies", self._logps_computed),
            ("_compute_loss", self._loss_computed),
        ):
            if callable(getattr(trainer, name, None)):
                setattr(trainer, name, partial(observed, getattr(trainer, name)))
        trainer.add_callback(_Callback(self))

    def end(self) -> None:
        state = self.trainer.state
        self.hooks.end({"history": [timeless(row) for row in state.log_history] if state.is_world_process_zero else None})

    def _generated(self, generate: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.record.open():
            return generate(*args, **kwargs)
        with Drawing() as drawing:
            made = generate(*args, **kwargs)
        sequences = made if isinstance(made, torch.Tensor) else made.sequences
        given: Any = next((kwargs[name] for name in ("input_ids", "inputs") if kwargs.get(name) is not None), args[0] if args else None)
        values = {name: getattr(kwargs.get("generation_config"), name, None) for name in SAMPLING}
        tensors = {"prompt_ids": given, "prompt_mask": kwargs.get("attention_mask"), "sequences": sequences}
        values["random_state"] = hashlib.sha256(drawing.state.numpy().tobytes()).hexdigest()[:16]
        tensors |= {"pixel_values": kwargs.get("pixel_values"), **drawing.tensors(sequences.shape[1] - given.shape[1])}
        self.record.add("generated", "sampling", values, tensors)
        return made

    def _rolled(self, rollout: Any, prompts: Any, trainer: Any) -> Any:
        made = rollout(prompts, trainer)
        self.rolled("rollout_func", made)
        return made

    def rolled(self, source: str, made: dict[str, Any]) -> None:
        """What another generator than the model's own made: tokens, and how likely it says they were.

        `told` is what the trainer was told of that, where it was told something else.
        """
        if self.record.open():
            self.record.add("generated", "sampling", {"source": source}, _ragged(made))

    def _rewarded(self, calculate: Any, *args: Any, **kwargs: Any) -> Any:
        self.rewards = calculate(*args, **kwargs)
        return self.rewards

    def _scored(self, score: Any, *args: Any, **kwargs: Any) -> Any:
        output = score(*args, **kwargs)
        if self.record.open() and self.model.training and isinstance(output, dict):
            tensors = {name: output[name] for name in SCORED if isinstance(output.get(name), torch.Tensor)}
            tensors |= {"rewards": self.rewards} if isinstance(self.rewards, torch.Tensor) else {}
            self.record.add("scored", "advantage", {}, {f"trainer/{name}": value for name, value in tensors.items()})
        return output

    def _entering(self, _: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """Before a forward pass with gradients: the tokens and the mask that the loss is made of."""
        if torch.is_grad_enabled() and self.record.open():
            ids = kwargs.get("input_ids", args[0] if args else None)
            pictures = {} if kwargs.get("pixel_values") is None else {"pixel_values": kwargs["pixel_values"]}
            self.forwards.append({"input_ids": ids, "attention_mask": kwargs.get("attention_mask"), **pictures})

    def _logps_computed(self, compute: Any, *args: Any, **kwargs: Any) -> Any:
        answer = compute(*args, **kwargs)
        if torch.is_grad_enabled() and self.record.open() and isinstance(answer, tuple):
            self.logps.append(answer[0].detach())
        return answer

    def _loss_computed(self, compute: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        self.forwards, self.logps = [], []
        loss = compute(model, inputs, *args, **kwargs)
        if self.record.open():
            self.loss = float(loss.detach())
            self.inputs = {name: inputs[name] for name in SCORED if isinstance(inputs.get(name), torch.Tensor)}
        return loss

    def _computed(self) -> None:
        """The gradient of a micro-batch has arrived: record what its forward passes were made of, whatever computed them."""
        if not self.forwards:
            return
        named = {f"trainer/{name}": value for name, value in self.inputs.items()}
        if self.logps and len({value.shape[1] for value in self.logps}) == 1:
            named["trainer/logps"] = torch.cat(self.logps)
        values = {"trainer/loss": self.loss, "training": bool(self.model.training)}
        self.record.add("loss", "loss", values, {**_together(self.forwards, self.trainer._tokenizer.pad_token_id), **named})
        self.forwards, self.logps, self.inputs, self.loss = [], [], {}, None


class Drawing:
    """Sees the probabilities that `torch.multinomial` is given while it is entered, and the random state before the first."""

    def __enter__(self) -> Drawing:
        self.state, self.shares, self.inner, self.kept = torch.get_rng_state(), list[Any](), torch.multinomial, 0

        def multinomial(shares: Any, *args: Any, **kwargs: Any) -> Any:
            self.kept += shares.numel() * 4
            if self.kept <= MOST_BYTES:
                self.shares.append(shares.detach().to("cpu", torch.float32))
            return self.inner(shares, *args, **kwargs)

        torch.multinomial = multinomial
        return self

    def __exit__(self, *_: object) -> None:
        torch.multinomial = self.inner

    def tensors(self, length: int) -> dict[str, Any]:
        if not length or len(self.shares) != length or any(part.shape != self.shares[0].shape for part in self.shares):
            return {}
        return {"shares": torch.stack(self.shares, 1), "random_state": self.state}


def _together(forwards: list[dict[str, Any]], pad: int) -> dict[str, Any]:
    """The forward passes of one micro-batch as one; rows of different widths are padded on the right."""
    if len(forwards) == 1:
        return forwards[0]
    width = max(part["input_ids"].shape[1] for part in forwards)
    made = {}
    for name in forwards[0]:
        parts = [part[name] for part in forwards]
        if name in ("input_ids", "attention_mask"):
            filler = pad if name == "input_ids" else 0
            parts = [torch.nn.functional.pad(part, (0, width - part.shape[1]), value=filler) for part in parts if part is not None]
        made[name] = torch.cat(parts) if len(parts) == len(forwards) else None
    return made


class _Callback(TrainerCallback):  # type: ignore[misc]
    """The parts of the record that the trainer's own events bring."""

    def __init__(self, recorder: StepRecorder) -> None:
        self.recorder = recorder

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        recorder = self.recorder
        recorder.record.step = state.global_step + 1
        if recorder.record.steps is not None:
            recorder.record.steps += state.global_step
        adapters = adapters_of(recorder.model)
        named = {name: value for name, value in vars(args).items() if not name.startswith("_") and not name.endswith("_port")}
        settings = {name: value for name, value in named.items() if is_setting(value)}
        values = {
            "adapters": adapters,
            "start_step": state.global_step,
            "world_size": args.world_size,
            "arguments": settings,
            "versions": {"trl": trl.__version__, "transformers": transformers.__version__, "peft": peft.__version__},
        }
        recorder.hooks.start(values)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        record = self.recorder.record
        if logs and "train_runtime" not in logs and state.global_step == record.done and state.is_world_process_zero:
            record.add("logged", "logging", timeless(logs), step=state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Take the hooks off torch's optimizers: another trainer may follow in this process."""
        self.recorder.hooks.close()


def _ragged(made: dict[str, Any]) -> dict[str, Any]:
    """Prompts and completions of a rollout function as padded tensors with their lengths."""
    tensors = {}
    for name in ("prompt_ids", "completion_ids", "logprobs", *(["told"] if "told" in made else [])):
        tensors[name], tensors[f"{name}/lengths"] = _padded(made[name])
    return tensors


def _padded(rows: Any) -> tuple[Any, Any]:
    """Rows of any lengths as one tensor, filled up with 0, and their lengths."""
    width = max([1, *map(len, rows)])
    return torch.tensor([[*row, *[0] * (width - len(row))] for row in rows]), torch.tensor([len(row) for row in rows])
