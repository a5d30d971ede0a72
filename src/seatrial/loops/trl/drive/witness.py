"""Watching the trainer's own rollouts: what it generates with, what it learns from, what its images are.

Training metrics look normal when any of this is wrong, so each is measured where it happens, at every step:
- decoding: log-probabilities of the sampled tokens, as the cached decoding with the trainer's own attention mask gave
  them, against one forward pass without a cache and with a mask of our own;
- training: the log-probabilities that the loss is made of, against the same pass of our own;
- advantages: each must have the sign of its reward's distance from the mean of its group.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from seatrial.loops.trl.drive import sampler
from seatrial.probes import facts

ROWS = 8
EPSILON = 1e-6


class Witness:
    """Attached to one trainer; writes one row per step and observation."""

    def __init__(self, metrics: Path) -> None:
        self.metrics = metrics
        self.rewards: list[float] = []
        self.trainer: Any = None

    def reward(self, function: Any) -> Any:
        """The reward function, with its answers remembered."""

        means: list[float] = []

        def observed(*args: Any, **kwargs: Any) -> list[float]:
            self.rewards = [float(value) for value in function(*args, **kwargs)]
            means.append(sum(self.rewards) / max(1, len(self.rewards)))
            return self.rewards

        observed.__name__, observed.means = function.__name__, means  # type: ignore[attr-defined]
        return observed

    def attach(self, trainer: Any) -> None:
        """Put the observations around the trainer's own methods."""
        self.trainer = trainer
        model = trainer.accelerator.unwrap_model(trainer.model)
        generate, score = model.generate, trainer._generate_and_score_completions

        def observed_generate(**kwargs: Any) -> Any:
            made = generate(**kwargs, output_logits=True, return_dict_in_generate=True)
            self._decoding(model, kwargs, made)
            return made.sequences

        def observed_score(inputs: Any) -> Any:
            output = score(inputs)
            self._advantages(output["advantages"].tolist(), trainer.num_generations)
            return output

        if trainer.rollout_func is None:
            model.generate = observed_generate
        trainer._get_per_token_logps_and_entropies = self._observed_logps(trainer._get_per_token_logps_and_entropies, model)
        trainer._generate_and_score_completions = observed_score

    def _write(self, name: str, value: float) -> None:
        rank = self.trainer.accelerator.process_index
        tag = f"rollout/{name}" if rank == 0 else f"rank{rank}/rollout/{name}"
        facts.append(self.metrics, {"step": self.trainer.state.global_step + 1, tag: value})

    def _decoding(self, model: Any, given: dict[str, Any], made: Any) -> None:
        tokenizer = self.trainer._tokenizer
        ids, width = given["input_ids"], given["input_ids"].shape[1]
        chosen = list(range(0, len(ids), max(1, len(ids) // ROWS)))
        prompts = [_unpadded(ids[row].tolist(), tokenizer.pad_token_id) for row in chosen]
        completions = [_until(made.sequences[row, width:].tolist(), tokenizer.eos_token_id) for row in chosen]
        training = model.training
        model.eval()
        own = sampler.logprobs_of(model, prompts, completions, tokenizer.pad_token_id)
        model.train(training)
        table = [torch.log_softmax(step[chosen].float(), -1) for step in made.logits]
        gaps = [
            abs(float(table[place][row, token]) - own[row][place])
            for row, completion in enumerate(completions)
            for place, token in enumerate(completion)
        ]
        self._write("decode_max_dlogp", max(gaps) if gaps and all(math.isfinite(gap) for gap in gaps) else math.nan)

    def _observed_logps(self, inner: Any, model: Any) -> Any:
        """The log-probabilities that the loss is made of, against a forward pass of our own."""

        def observed(*args: Any, **kwargs: Any) -> Any:
            answer = inner(*args, **kwargs)
            if torch.is_grad_enabled():
                names = ("model", "input_ids", "attention_mask", "logits_to_keep")
                given = {**dict(zip(names, args, strict=False)), **kwargs}
                self._training(model, given["input_ids"], int(given["logits_to_keep"]), answer[0].detach())
            return answer

        return observed

    def _training(self, model: Any, ids: Any, kept: int, logps: Any) -> None:
        tokenizer, heat = self.trainer._tokenizer, float(self.trainer.temperature)
        chosen = list(range(0, len(ids), max(1, len(ids) // ROWS)))
        prompts = [_unpadded(ids[row, :-kept].tolist(), tokenizer.pad_token_id) for row in chosen]
        completions = [_trimmed(ids[row, -kept:].tolist(), tokenizer) for row in chosen]
        with torch.no_grad():
            own = sampler.logprobs_of(model, prompts, completions, tokenizer.pad_token_id, heat)
        gaps = [
            abs(float(logps[row, place]) - own[index][place])
            for index, row in enumerate(chosen)
            for place in range(len(completions[index]))
        ]
        self._write("train_max_dlogp", max(gaps) if gaps and all(math.isfinite(gap) for gap in gaps) else math.nan)

    def _advantages(self, advantages: Sequence[float], group: int) -> None:
        rewards = self.rewards
        wrong = abs(len(rewards) - len(advantages))
        for start in range(0, len(rewards) - group + 1, group):
            mean = sum(rewards[start : start + group]) / group
            for reward, advantage in zip(rewards[start : start + group], advantages[start : start + group], strict=False):
                distance = reward - mean
                if not math.isfinite(advantage) or (abs(distance) > EPSILON and advantage * distance <= 0):
                    wrong += 1
        self._write("wrong_advantages", wrong)


def _unpadded(ids: list[int], pad: int) -> list[int]:
    """Without the padding on the left."""
    start = next((place for place, token in enumerate(ids) if token != pad), len(ids))
    return ids[start:]


def _trimmed(ids: list[int], tokenizer: Any) -> list[int]:
    """A completion without what follows its end token, or the padding of a shorter one."""
    if tokenizer.eos_token_id in ids:
        return _until(ids, tokenizer.eos_token_id)
    while ids and ids[-1] == tokenizer.pad_token_id:
        ids = ids[:-1]
    return ids


def _until(ids: list[int], end: int) -> list[int]:
    """Up to and with the end token."""
    return ids[: ids.index(end) + 1] if end in ids else ids
