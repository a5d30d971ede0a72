"""Fills the batch record of a TRL trainer: hooks on the model, the reward functions and torch's optimizer.

What the change cannot bend is taken where it happens: what goes into and comes out of `generate` and `forward`, what our reward
functions get and return, what torch's optimizer sees. What the trainer calls advantages or masks is added where its methods still
have their names; the shadow reads it only to say where a step went wrong.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
import transformers
import trl
from transformers import TrainerCallback

from seatrial.instruments.batch_record import BatchRecord, UpdateHooks, adapters_of
from seatrial.loops.trl.drive.configured import KNOBS

SCORED = (
    *("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "tool_mask", "advantages"),
    *("old_per_token_logps", "ref_per_token_logps"),
)
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_new_tokens", "do_sample", "eos_token_id", "pad_token_id")


class StepRecorder:
    """Attached to one trainer of one process."""

    def __init__(self, directory: Path, steps: int | None = None) -> None:
        self.record = BatchRecord(directory, steps)
        self.trainer: Any = None
        self.forward: dict[str, Any] = {}
        self.logps: Any = None
        self.rewards: Any = None
        """The trainer's table of rewards."""

    def reward(self, function: Any) -> Any:
        """The reward function, with what it got and answered recorded; None stands for NaN."""

        def recorded(prompts: Any, completions: Any, completion_ids: Any, row: Any = None, **kwargs: Any) -> Any:
            answer = function(prompts=prompts, completions=completions, completion_ids=completion_ids, row=row, **kwargs)
            if self.trainer is not None and self.record.open():
                lengths = torch.tensor([len(ids) for ids in completion_ids])
                width = max([1, *map(len, completion_ids)])
                ids = torch.tensor([[*ids, *[0] * (width - len(ids))] for ids in completion_ids])
                rewards = torch.tensor([math.nan if value is None else float(value) for value in answer], dtype=torch.float64)
                rows = torch.tensor([-1 if value is None else int(value) for value in row or [None] * len(prompts)])
                values = {"function": function.__name__}
                tensors = {"completion_ids": ids, "lengths": lengths, "rewards": rewards, "rows": rows}
                self.record.add("rewarded", "reward", values, tensors)
            return answer

        recorded.__name__ = function.__name__
        return recorded

    def attach(self, trainer: Any) -> None:
        """Put the hooks on; call it once the trainer is built."""
        self.trainer = trainer
        self.model = trainer.accelerator.unwrap_model(trainer.model)
        self.hooks = UpdateHooks(self.record, self.model)
        if trainer.rollout_func is None:
            self.model.generate = self._generating(self.model.generate)
        else:
            trainer.rollout_func = self._rolling(trainer.rollout_func)
        self.model.register_forward_pre_hook(self._entering, with_kwargs=True)
        for name, wrap in (
            ("_calculate_rewards", self._rewarding),
            ("_generate_and_score_completions", self._scoring),
            ("_get_per_token_logps_and_entropies", self._logps),
            ("_compute_loss", self._losing),
        ):
            if callable(getattr(trainer, name, None)):
                setattr(trainer, name, wrap(getattr(trainer, name)))
        trainer.add_callback(_Callback(self))

    def end(self) -> None:
        """Call it once training has returned."""
        self.hooks.end()

    def _recorded(self) -> bool:
        """Whether what happens now belongs to a step of training that is recorded."""
        return self.record.open() and bool(self.model.training)

    def _generating(self, generate: Any) -> Any:
        def generated(*args: Any, **kwargs: Any) -> Any:
            if not self.record.open():
                return generate(*args, **kwargs)
            asked = {name: kwargs[name] for name in ("return_dict_in_generate",) if name in kwargs}
            state = torch.get_rng_state() if self.model.device.type == "cpu" else None
            made = generate(*args, **{**kwargs, "output_scores": True, "return_dict_in_generate": True})
            config = kwargs.get("generation_config")
            values = {name: getattr(config, name, None) for name in SAMPLING}
            given = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
            tensors = {"prompt_ids": given, "prompt_mask": kwargs.get("attention_mask"), "sequences": made.sequences}
            extra = {name: kwargs[name] for name in ("pixel_values",) if name in kwargs}
            drawn = {"scores": torch.stack(made.scores, 1).float(), "random_state": state}
            self.record.add("generated", "sampling", values, tensors | extra | drawn)
            return made if asked.get("return_dict_in_generate") else made.sequences

        return generated

    def _rolling(self, rollout: Any) -> Any:
        def rolled(prompts: Any, trainer: Any) -> Any:
            made = rollout(prompts, trainer)
            if self.record.open():
                self.record.add("generated", "sampling", {"source": "rollout_func"}, _ragged(made))
            return made

        return rolled

    def _rewarding(self, calculate: Any) -> Any:
        def calculated(*args: Any, **kwargs: Any) -> Any:
            self.rewards = calculate(*args, **kwargs)
            return self.rewards

        return calculated

    def _scoring(self, score: Any) -> Any:
        def scored(*args: Any, **kwargs: Any) -> Any:
            output = score(*args, **kwargs)
            if self._recorded() and isinstance(output, dict):
                tensors = {name: output[name] for name in SCORED if isinstance(output.get(name), torch.Tensor)}
                tensors |= {"rewards": self.rewards} if isinstance(self.rewards, torch.Tensor) else {}
                self.record.add("scored", "advantage", {}, tensors)
            return output

        return scored

    def _entering(self, _: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """Before a forward pass with gradients: the tokens and the mask that the loss is made of."""
        if torch.is_grad_enabled() and self._recorded():
            ids = kwargs.get("input_ids", args[0] if args else None)
            extra = {name: kwargs[name] for name in ("pixel_values",) if kwargs.get(name) is not None}
            self.forward = {"input_ids": ids, "attention_mask": kwargs.get("attention_mask"), **extra}

    def _logps(self, inner: Any) -> Any:
        def observed(*args: Any, **kwargs: Any) -> Any:
            answer = inner(*args, **kwargs)
            if torch.is_grad_enabled() and self._recorded() and isinstance(answer, tuple):
                self.logps = answer[0].detach()
            return answer

        return observed

    def _losing(self, compute: Any) -> Any:
        def computed(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            self.forward, self.logps = {}, None
            loss = compute(model, inputs, *args, **kwargs)
            if self._recorded() and self.forward:
                named = {f"trainer/{name}": inputs[name] for name in SCORED if isinstance(inputs.get(name), torch.Tensor)}
                if self.logps is not None:
                    named["trainer/logps"] = self.logps
                self.record.add("loss", "loss", {"loss": float(loss.detach())}, {**self.forward, **named})
            return loss

        return computed


class _Callback(TrainerCallback):  # type: ignore[misc]
    """The parts of the record that the trainer's own events bring."""

    def __init__(self, recorder: StepRecorder) -> None:
        self.recorder = recorder

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Record where the weights start, and which adapters are in force."""
        recorder = self.recorder
        recorder.record.step = state.global_step + 1
        if recorder.record.steps is not None:
            recorder.record.steps += state.global_step
        adapters = adapters_of(recorder.model)
        settings = {
            name: value for name, value in vars(args).items() if name in KNOBS and isinstance(value, (int, float, str, list, type(None)))
        }
        values = {
            "adapters": adapters,
            "start_step": state.global_step,
            "world_size": args.world_size,
            "arguments": settings,
            "version": trl.__version__,
            "release": transformers.__version__,
        }
        recorder.hooks.start(values)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Record what was logged for the step that has just ended."""
        record = self.recorder.record
        if logs and "train_runtime" not in logs and state.global_step == record.done and state.is_world_process_zero:
            clocks = ("step_time",)
            record.add("logged", "logging", {key: value for key, value in logs.items() if key not in clocks}, step=state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Take the hooks off torch's optimizers: another trainer may follow in this process."""
        self.recorder.hooks.close()


def _ragged(made: dict[str, Any]) -> dict[str, Any]:
    """Prompts and completions of a rollout function as padded tensors with their lengths."""
    tensors = {}
    for name in ("prompt_ids", "completion_ids", "logprobs"):
        rows = made[name]
        width = max([1, *map(len, rows)])
        tensors[name] = torch.tensor([[*ids, *[0] * (width - len(ids))] for ids in rows])
        tensors[f"{name}/lengths"] = torch.tensor([len(ids) for ids in rows])
    return tensors
