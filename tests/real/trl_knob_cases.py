"""Recorded runs (SEATRIAL_SHADOWS) against other settings than they were given: what their tables call proven must diverge.

A run with A, recomputed as if B had been configured, is what a bug looks like that takes A for B.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from seatrial.instruments.trl import extra_runs, shadow, train, trl_settings

OTHER = {
    "seed": "7",
    "shuffle_dataset": "false",
    "per_device_train_batch_size": "6",
    "gradient_accumulation_steps": "1",
    "num_generations": "3",
    "steps_per_generation": "6",
    "num_iterations": "3",
    "max_steps": "9",
    "temperature": "0.85",
    "top_k": "30",
    "top_p": "0.9",
    "min_p": "0.02",
    "repetition_penalty": "1.05",
    "use_vllm": "true",
    "vllm_importance_sampling_correction": "false",
    "vllm_importance_sampling_mode": "token_mask",
    "vllm_importance_sampling_clip_max": "1.2",
    "vllm_importance_sampling_clip_min": "0.85",
    "max_completion_length": "7",
    "mask_truncated_completions": "false",
    "reward_weights": "1.0 0.6",
    "multi_objective_aggregation": "normalize_then_sum",
    "scale_rewards": "batch",
    "beta": "0.11",
    "use_bias_correction_kl": "false",
    "sync_ref_model": "false",
    "ref_model_sync_steps": "2",
    "ref_model_mixup_alpha": "0.6",
    "loss_type": "grpo",
    "importance_sampling_level": "sequence",
    "epsilon": "0.06",
    "epsilon_high": "0.1",
    "delta": "1.5",
    "off_policy_mask_threshold": "0.5",
    "sapo_temperature_pos": "1.0",
    "sapo_temperature_neg": "1.05",
    "vespo_k_pos": "2.0",
    "vespo_lambda_pos": "3.0",
    "vespo_k_neg": "3.0",
    "vespo_lambda_neg": "2.0",
    "top_entropy_quantile": "0.8",
    "entropy_coef": "0.03",
    "max_grad_norm": "1.4",
    "optim": "adagrad",
    "optim_args": "momentum=0.8",
    "learning_rate": "1e-3",
    "lr_scheduler_type": "linear",
    "lr_scheduler_kwargs": '{"num_cycles": 3}',
    "warmup_steps": "1",
    "weight_decay": "0.05",
    "adam_beta1": "0.9",
    "adam_beta2": "0.999",
    "adam_epsilon": "1e-8",
}
"""Another value of each setting, in no variant's words."""
SAME = {
    ("bnpo", "lr_scheduler_type"): "constant",
    ("dr_grpo", "importance_sampling_level"): "token",
    ("dr_grpo", "multi_objective_aggregation"): "sum_then_normalize",
    ("dr_grpo", "use_bias_correction_kl"): "true",
    ("grpo", "loss_type"): "bnpo",
    ("grpo", "scale_rewards"): "group",
    ("grpo", "shuffle_dataset"): "true",
    ("grpo", "steps_per_generation"): "3",
    ("grpo", "optim"): "rmsprop",
    ("luspo", "importance_sampling_level"): "token",
    ("sync", "use_vllm"): "false",
    ("lora", "use_vllm"): "false",
}
"""Where the other value is the variant's own."""
UNSEEN = {
    "max_steps": "of a constant schedule, a run of another length has the same rates",
    "use_bias_correction_kl": "the correction needs a ratio that is not one",
    "gradient_checkpointing": "no formula depends on it",
    "logging_steps": "the shadow follows the log, whenever that comes",
    "router_aux_loss_coef": "a dense model has no router",
    "generation_batch_size": "the same as steps_per_generation in other words",
}
"""Settings that are left out here."""


def recorded() -> Iterator[tuple[Any, list[str]]]:
    """Arguments and TRL's words of each shadow: one command a line."""
    parser = train.parser()
    parser.add_argument("--record-dir", type=Path, required=True)
    parser.add_argument("--world", type=int, default=1)
    for line in Path(os.environ["SEATRIAL_SHADOWS"]).read_text(encoding="utf-8").splitlines():
        argv = shlex.split(line)
        split = argv.index("--")
        yield parser.parse_args(argv[:split]), argv[split + 1 :]


def knobs(place: Path) -> list[dict[str, Any]]:
    """The table of a recomputed run."""
    return list(json.loads((place / "shadow.json").read_text(encoding="utf-8"))["knobs"])


def unseen(run: str, arguments: Any, place: Path, words: list[str], done: set[str]) -> list[str]:
    """Proven settings of a run that may be taken for another value without a divergence; those that were tried are `done`."""
    wrong = []
    for row in knobs(place):
        name = row["knob"]
        if row["status"] != "proven" or name in done or name not in OTHER or (name in UNSEEN and run):
            continue
        value = SAME.get((run, name), OTHER[name])
        if trl_settings.given(["--" + name, *shlex.split(value)])[name] == row["configured"]:
            continue
        found = shadow.recompute(arguments, place, [*words, f"--{name}", *shlex.split(value)])
        done.add(name)
        if found["divergence"] is None:
            wrong.append(f"{run or 'main'}: {name} {row['configured']} taken for {value}")
    return wrong


def case_every_proven_setting_diverges_as_another() -> None:
    """Of the main run of level 0 and every variant."""
    ((arguments, words),) = recorded()
    done: set[str] = set()
    place: Path = arguments.record_dir
    wrong = unseen("", arguments, place, words, done)
    for run in extra_runs.VARIANTS:
        own = extra_runs.words_of(run, words)
        wrong += unseen(run, extra_runs.arguments_of(run, arguments), place / "variants" / run, own, done)
    assert wrong == [], wrong
    proven = {row["knob"] for row in knobs(place) if row["status"] == "proven"}
    assert proven & set(OTHER) <= done | set(UNSEEN), sorted(proven & set(OTHER) - done)
    assert set(trl_settings.KNOBS) <= set(OTHER) | set(UNSEEN), "a knob without another value"
