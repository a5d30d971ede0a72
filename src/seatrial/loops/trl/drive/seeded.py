"""Rollouts that are the same on one rank and on two (see sampler.py)."""

from __future__ import annotations

from typing import Any

from seatrial.loops.trl.drive import sampler


def seeded_rollouts(seed: int) -> Any:
    """A rollout function for the trainer. Groups must be whole on each rank, or indices would collide."""

    def rollouts(prompts: list[str], trainer: Any) -> dict[str, Any]:
        if len(prompts) % trainer.num_generations:
            raise RuntimeError(f"{len(prompts)} prompts on this rank are not whole groups of {trainer.num_generations}")
        tokenizer, model = trainer.processing_class, trainer.accelerator.unwrap_model(trainer.model)
        prompt_ids = tokenizer(prompts).input_ids
        training = model.training
        model.eval()
        drawn = sampler.seeds(prompts, trainer.state.global_step, seed)
        length = trainer.args.max_completion_length
        completions, logprobs = sampler.sample(model, prompt_ids, drawn, length, tokenizer.eos_token_id, tokenizer.pad_token_id)
        model.train(training)
        return {"prompt_ids": prompt_ids, "completion_ids": completions, "logprobs": logprobs}

    return rollouts
