"""Short recorded runs beside the main one: each turns on settings that one run cannot have together.

Every loss type, reward scaling and kind of ratio, masked truncation, splits of a generation over optimizer steps, other optimizers and
schedules: four steps each, in the process of the main run.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

STEPS = 4
OTHER_SEED = "7"
RESEEDED = ("grpo",)
"""Variants with that seed: their random numbers are others."""
VARIANTS: dict[str, tuple[str, ...]] = {
    "bnpo": (
        *("--loss_type", "bnpo", "--scale_rewards", "none", "--mask_truncated_completions", "true", "--delta", "1.02"),
        *("--lr_scheduler_type", "linear", "--reward_weights", "0.5", "1.5", "--learning_rate", "1e-2", "--warmup_steps", "0"),
    ),
    "dr_grpo": (
        *("--loss_type", "dr_grpo", "--multi_objective_aggregation", "normalize_then_sum", "--use_bias_correction_kl", "false"),
        *("--lr_scheduler_type", "constant_with_warmup", "--importance_sampling_level", "sequence", "--logging_steps", "2"),
    ),
    "grpo": (
        *("--loss_type", "grpo", "--scale_rewards", "batch", "--shuffle_dataset", "false", "--num_iterations", "1"),
        *("--steps_per_generation", "6", "--sync_ref_model", "false", "--optim", "adagrad", "--seed", OTHER_SEED),
    ),
    "cispo": (
        *("--loss_type", "cispo", "--top_entropy_quantile", "0.6", "--epsilon_high", "1.02", "--optim", "sgd"),
        *("--optim_args", "momentum=0.9", "--learning_rate", "0.05"),
    ),
    "sapo": (
        *("--loss_type", "sapo", "--sapo_temperature_pos", "1.3", "--sapo_temperature_neg", "1.7", "--entropy_coef", "0.02"),
        *("--lr_scheduler_type", "polynomial", "--gradient_checkpointing", "true"),
    ),
    "vespo": (
        *("--loss_type", "vespo", "--vespo_k_pos", "1.5", "--vespo_lambda_pos", "2.5", "--vespo_k_neg", "2.5", "--vespo_lambda_neg", "1.5"),
        *("--off_policy_mask_threshold", "0.02", "--optim", "rmsprop"),
        *("--learning_rate", "3e-4", "--warmup_steps", "0"),
    ),
    "luspo": (
        *("--loss_type", "luspo", "--importance_sampling_level", "sequence", "--max_grad_norm", "0"),
        *("--lr_scheduler_type", "cosine_with_restarts", "--lr_scheduler_kwargs", '{"num_cycles": 2}'),
    ),
}


CHAT = ("luspo",)
"""Variants whose prompts are conversations."""
TILES = {"trl.trainer.utils._CHUNKED_LOGPROB_CHUNK_SIZE": 16, "trl.kernels.chunked_logprob.TOKEN_CHUNK_SIZE": 100}
"""TRL computes log-probabilities in tiles of words and of tokens, which every real model fills and a tiny one does not: variants are
computed in smaller ones. A release without these names goes without."""


def arguments_of(name: str, arguments: argparse.Namespace) -> argparse.Namespace:
    """The driver's options of a variant."""
    return argparse.Namespace(**{**vars(arguments), "chat": name in CHAT})


def words_of(name: str, words: list[str]) -> list[str]:
    """The TRL arguments of a variant: those of the main run, then its own."""
    return [*words, *VARIANTS[name], "--max_steps", str(STEPS)]


@contextmanager
def small_tiles() -> Iterator[None]:
    """Computes log-probabilities in `TILES`."""
    held = []
    for path, size in TILES.items():
        module, _, name = path.rpartition(".")
        found = importlib.import_module(module) if importlib.util.find_spec(module) else None
        if isinstance(getattr(found, name, None), int):
            held.append((found, name, getattr(found, name)))
            setattr(found, name, size)
    try:
        yield
    finally:
        for found, name, size in held:
            setattr(found, name, size)


def run(arguments: Any, words: list[str], model: str) -> None:
    """Train every variant and leave its record in `variants/<name>`."""
    from transformers.utils import logging

    logging.disable_progress_bar()  # the log of a level tells of one training
    with small_tiles():
        _train(arguments, words, model)


def _train(arguments: Any, words: list[str], model: str) -> None:
    from transformers import PrinterCallback

    from seatrial.loops.trl.drive import record, train

    for name in VARIANTS:
        record.say(f"variant {name}")
        place = arguments.out / "variants" / name
        place.mkdir(parents=True, exist_ok=True)
        settings = train.config(place, words_of(name, words))
        recorded = train.recorder(arguments, place)
        trainer = train.build(arguments_of(name, arguments), settings, model, None, recorded=recorded)
        trainer.pop_callback(PrinterCallback)
        trainer.pop_callback(record.MetricsWriter)
        trainer.pop_callback(record.FactsWriter)
        trainer.train()
        recorded.end()
