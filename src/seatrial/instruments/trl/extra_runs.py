"""Short recorded runs beside the main one: variants of the settings, and the arms of the learning level.

    python -m seatrial.instruments.trl.extra_runs --seeds 5 [options of train.py] -- [TRL arguments]

Level 6 trains each seed twice, the second time with learning rate 0. It writes `learn/<seed>/reward`, `control/<seed>/reward`
and the gains.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from seatrial.instruments.trl import train
from seatrial.instruments.trl.train import TRAINER
from seatrial.instruments.witness import ImportProofs

STEPS = 4
OTHER_SEED = "7"
RESEEDED = ("grpo",)  # variants with that seed: their random numbers are others
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


CHAT = ("luspo",)  # variants whose prompts are conversations
TILES = {"trl.trainer.utils._CHUNKED_LOGPROB_CHUNK_SIZE": 16, "trl.kernels.chunked_logprob.TOKEN_CHUNK_SIZE": 100}
"""TRL computes log-probabilities in tiles of words and of tokens, which every real model fills and a tiny one does not: variants are
computed in smaller ones. A release without these names goes without."""


def arguments_of(name: str, arguments: argparse.Namespace) -> argparse.Namespace:
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


def run_variants(arguments: Any, words: list[str], model: str) -> None:
    """Train every variant and leave its record in `variants/<name>`."""
    from transformers import PrinterCallback
    from transformers.utils import logging

    from seatrial.instruments.trl import recorders

    logging.disable_progress_bar()  # the log of a level tells of one training
    with small_tiles():
        for name in VARIANTS:
            recorders.say(f"variant {name}")
            place = arguments.out / "variants" / name
            place.mkdir(parents=True, exist_ok=True)
            settings = train.config(place, words_of(name, words))
            recorded = train.recorder(arguments, place)
            trainer = train.build(arguments_of(name, arguments), settings, model, None, recorded=recorded)
            for callback in (PrinterCallback, recorders.MetricsWriter, recorders.FactsWriter):
                trainer.pop_callback(callback)
            trainer.train()
            recorded.end()


WINDOW = 4
RECORDED_STEPS = 4  # steps of the first learning arm that are recorded, for the shadow to recompute


def gain(rewards: list[float]) -> float:
    """Mean of the last window minus mean of the first; the windows never overlap."""
    if len(rewards) < 2 * WINDOW:
        raise RuntimeError(f"a learning signal needs at least {2 * WINDOW} steps, got {len(rewards)}")
    return sum(rewards[-WINDOW:]) / WINDOW - sum(rewards[:WINDOW]) / WINDOW


def averages(trainer: Any) -> list[float]:
    """The mean of every answer that the first reward function gives from now on."""
    function, given = trainer.reward_funcs[0], list[float]()

    def averaged(*args: Any, **kwargs: Any) -> list[float]:
        rewards = [float(value) for value in function(*args, **kwargs)]
        given.append(sum(rewards) / max(1, len(rewards)))
        return rewards

    averaged.__name__ = function.__name__
    trainer.reward_funcs[0] = averaged
    return given


def learning_arm(arguments: Any, words: list[str], name: str, seed: int) -> list[float]:
    """Train one arm and return its rewards by step, as our reward function gave them."""
    from seatrial.instruments import facts
    from seatrial.instruments.bits import fingerprint
    from seatrial.instruments.trl import recorders

    out: Path = arguments.out
    place, rate = out / name / str(seed), ["--learning_rate", "0.0"] if name == "control" else []
    settings = train.config(place, [*words, "--seed", str(seed), *rate])
    recorded = train.recorder(arguments, place, RECORDED_STEPS) if name == "learn" and seed == 1 else None
    trainer = train.build(arguments, settings, train.model_path(arguments), None, recorded=recorded)
    given = averages(trainer)
    trainer.pop_callback(recorders.MetricsWriter)
    trainer.pop_callback(recorders.FactsWriter)
    trainer.add_callback(recorders.MetricsWriter(out / "metrics.jsonl", f"{name}/{seed}"))
    before, chance = fingerprint.model(trainer.model), fingerprint.generators()
    recorders.say(f"arm {name} seed {seed}")
    trainer.train()
    after = fingerprint.model(trainer.model)
    row = {"fact": "arm", "arm": name, "seed": seed, "names": len(before), "changed": len(fingerprint.differing(before, after))}
    row |= {"generators": chance} | {"max_steps": trainer.state.max_steps, "updates": recorders.updates(trainer.optimizer)}
    said = [row["reward"] for row in trainer.state.log_history if "reward" in row]
    row["misreported"] = sum(abs(one - two) > 1e-4 for one, two in zip(given, said, strict=False)) + abs(len(given) - len(said))
    facts.append(out / "facts.jsonl", row)
    return given


def main() -> None:
    own, words = train.split_words(sys.argv[1:])
    parser = train.parser()
    parser.add_argument("--seeds", type=int, default=5)
    arguments = parser.parse_args(own)
    arguments.out.mkdir(parents=True, exist_ok=True)
    imports = ImportProofs(arguments.imports, train.process_name(), arguments.under_test)
    imports.prove(TRAINER)
    from seatrial.instruments import facts
    from seatrial.instruments.trl import recorders

    recorders.say("building the model")
    for index in range(1, arguments.seeds + 1):
        learned, idle = (gain(learning_arm(arguments, words, name, index)) for name in ("learn", "control"))
        row = {"step": index, "signal/gain": learned, "signal/control_gain": idle, "signal/gain_over_control": learned - idle}
        facts.append(arguments.out / "metrics.jsonl", row)
        recorders.say(f"seed {index} of {arguments.seeds}: gain {learned:.3f}, control {idle:.3f}")
    imports.close(TRAINER)
    recorders.say("run complete")


if __name__ == "__main__":
    main()
