"""TRL's command line in the words of the shadow, read without TRL: defaults are those of the pinned release.

`KNOBS` lists every setting that a step passes through, with the stage that proves it and the values that make it have no effect.
A setting that the shadow has no formula for makes its stages unproven, which a level reports as a limitation.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from seatrial.instruments.shadow import formulas
from seatrial.instruments.shadow.interface import STEP, Knob, Lora, ShadowSettings

KNOBS: dict[str, Knob] = {
    "seed": Knob("data", 42),
    "shuffle_dataset": Knob("data", True),
    "per_device_train_batch_size": Knob("data", 8),
    "gradient_accumulation_steps": Knob("gradient", 1, (1,)),
    "num_generations": Knob("data", 8),
    "steps_per_generation": Knob("data", None, (1,)),
    "generation_batch_size": Knob("data", None),
    "num_iterations": Knob("ratio", 1, (1,)),
    "max_steps": Knob("schedule", -1),
    "temperature": Knob("sampling", 1.0, (1.0,)),
    "top_k": Knob("sampling", 0, (0,), "top_k"),
    "top_p": Knob("sampling", 1.0, (1.0,), "top_p"),
    "min_p": Knob("sampling", None, (None, 0.0), "min_p"),
    "repetition_penalty": Knob("sampling", 1.0, (1.0,)),
    "use_vllm": Knob("sampling", False, (False,)),
    "max_completion_length": Knob("length", 512, (), "truncated"),
    "mask_truncated_completions": Knob("mask", False, (False,), "truncated"),
    "reward_weights": Knob("advantage", None, (None,)),
    "multi_objective_aggregation": Knob("advantage", "sum_then_normalize"),
    "scale_rewards": Knob("advantage", "group"),
    "beta": Knob("kl", 0.0, (0.0,), "kl"),
    "use_bias_correction_kl": Knob("kl", True, (), "off_policy"),
    "sync_ref_model": Knob("reference", False, (False,)),
    "ref_model_sync_steps": Knob("reference", 512, (), "reference_syncs"),
    "ref_model_mixup_alpha": Knob("reference", 0.6, (), "reference_syncs"),
    "loss_type": Knob("loss", "dapo"),
    "importance_sampling_level": Knob("ratio", "token", (), "off_policy"),
    "epsilon": Knob("ratio", 0.2, (), "clipped_low"),
    "epsilon_high": Knob("ratio", None, (), "clipped_high"),
    "delta": Knob("ratio", None, (None,), "two_sided"),
    "vllm_importance_sampling_correction": Knob("ratio", True, (), "corrected"),
    "vllm_importance_sampling_mode": Knob("ratio", "sequence_mask", (), "corrected"),
    "vllm_importance_sampling_clip_max": Knob("ratio", 3.0, (None,), "corrected_high"),
    "vllm_importance_sampling_clip_min": Knob("ratio", None, (None,), "corrected_low"),
    "off_policy_mask_threshold": Knob("ratio", None, (None,), "left_out"),
    "sapo_temperature_pos": Knob("loss", 1.0, (), "off_policy_positive", "sapo"),
    "sapo_temperature_neg": Knob("loss", 1.05, (), "off_policy_negative", "sapo"),
    "vespo_k_pos": Knob("loss", 2.0, (), "off_policy_positive", "vespo"),
    "vespo_lambda_pos": Knob("loss", 3.0, (), "off_policy_positive", "vespo"),
    "vespo_k_neg": Knob("loss", 3.0, (), "off_policy_negative", "vespo"),
    "vespo_lambda_neg": Knob("loss", 2.0, (), "off_policy_negative", "vespo"),
    "top_entropy_quantile": Knob("loss", 1.0, (1.0,)),
    "entropy_coef": Knob("loss", 0.0, (0.0,)),
    "router_aux_loss_coef": Knob("loss", None),
    "gradient_checkpointing": Knob("gradient", True, (False,)),
    "logging_steps": Knob("logging", 10, (1,)),
    "max_grad_norm": Knob("clip", 1.0, (0.0,), "clipped_norm"),
    "optim": Knob("update", "adamw_torch_fused"),
    "optim_args": Knob("update", None, (None,)),
    "learning_rate": Knob("schedule", 1e-6, (0.0,)),
    "lr_scheduler_type": Knob("schedule", "linear", ("constant",)),
    "lr_scheduler_kwargs": Knob("schedule", None, (None,)),
    "warmup_steps": Knob("schedule", 0, (0,)),
    "weight_decay": Knob("update", 0.0, (0.0,)),
    "adam_beta1": Knob("update", 0.9),
    "adam_beta2": Knob("update", 0.999),
    "adam_epsilon": Knob("update", 1e-8),
}
TORCH_ADAMW = ("adamw_torch", "adamw_torch_fused")
LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo")
REFUSED: dict[str, tuple[str, ...]] = {
    "use_adaptive_entropy": ("loss", *STEP, "logging"),
    "generation_kwargs": ("sampling",),
    "cast_lm_head_to_fp32": (),
    "bf16": ("sampling", *STEP, "logging"),
    "fp16": ("sampling", *STEP, "logging"),
    "use_transformers_continuous_batching": ("sampling",),
    "label_smoothing_factor": (*STEP, "logging"),
    "neftune_noise_alpha": ("sampling", *STEP, "logging"),
    "torch_compile": (),
}
"""Settings without a formula, and what cannot be proven with them when they are on."""


BESIDE = (
    *("logging_strategy", "logging_nan_inf_filter", "save_strategy", "save_steps", "report_to", "disable_tqdm"),
    *("dataloader_pin_memory", "bf16", "fp16", "use_cpu", "ddp_backend", "output_dir"),
)
"""Settings that no step depends on, or that change no value of it (`REFUSED` has those that do when they are on)."""


def is_setting(value: Any) -> bool:
    """Whether a value of the trainer's arguments can be kept: plain, and no path of this run."""
    return value is None or isinstance(value, (bool, int, float)) or (isinstance(value, str) and "/" not in value)


def unknown(words: Sequence[str]) -> list[str]:
    """Given settings that no stage proves."""
    return [name for name in given(words) if name not in KNOBS and name not in BESIDE and name not in REFUSED]


def given(words: Sequence[str]) -> dict[str, Any]:
    """Names and values of a TRL command line, the last of each; a name alone is true, several values are a list."""
    found: dict[str, list[str]] = {}
    current: list[str] = []
    for word in words:
        if word.startswith("--"):
            name, separator, value = word[2:].partition("=")
            name = name.replace("-", "_")
            off = name.startswith("no_") and name[3:] in KNOBS
            current = found[name.removeprefix("no_") if off else name] = [value] if separator else (["false"] if off else [])
        else:
            current.append(word)
    return {name: _value(values) for name, values in found.items()}


def _value(values: list[str]) -> Any:
    if len(values) > 1:
        return [_value([value]) for value in values]
    text = values[0] if values else "true"
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if text.lower() == "none":
        return None
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def knob_values(words: Sequence[str]) -> dict[str, Any]:
    got = given(words)
    return {name: got.get(name, knob.default) for name, knob in KNOBS.items()}


def settings(words: Sequence[str], world: int = 1, lora: Lora | None = None, rewards: int = 1, processors: str = "") -> ShadowSettings:
    """The configured values of a run; `processors` are those of a sampler of ours."""
    got, value = given(words), knob_values(words)
    unsupported = _unsupported(got, value, lora, world)
    accumulation, micro = int(value["gradient_accumulation_steps"]), int(value["per_device_train_batch_size"])
    splits = value["steps_per_generation"]
    if splits is None:
        splits = int(value["generation_batch_size"]) // (micro * world) if value["generation_batch_size"] else accumulation
    steps = int(value["max_steps"])
    warmup = float(value["warmup_steps"] or 0)
    optimizer = str(value["optim"])
    scale = {True: "group", False: "none"}.get(value["scale_rewards"], value["scale_rewards"])
    weights = value["reward_weights"]
    if weights is not None and not isinstance(weights, list):
        weights = [weights]
    options, vllm = _pairs(value["optim_args"]), bool(value["use_vllm"])
    low, high = (value[f"vllm_importance_sampling_clip_{end}"] for end in ("min", "max"))
    return ShadowSettings(
        max_steps=steps,
        seed=int(value["seed"]),
        world=world,
        shuffle=bool(value["shuffle_dataset"]),
        seeded_order=True,
        mixes_rows=True,
        partial=True,
        group=int(value["num_generations"]),
        micro_batch=micro,
        accumulation=accumulation,
        splits=int(splits),
        iterations=int(value["num_iterations"]),
        temperature=float(value["temperature"]),
        top_k=int(value["top_k"] or 0),
        top_p=float(value["top_p"]),
        min_p=None if value["min_p"] is None else float(value["min_p"]),
        repetition_penalty=float(value["repetition_penalty"]),
        processors=processors or ("vllm" if vllm else "transformers"),
        max_tokens=int(value["max_completion_length"]),
        reward_weights=tuple(float(weight) for weight in weights) if weights else (1.0,) * rewards,
        aggregation=str(value["multi_objective_aggregation"]),
        scale=str(scale),
        loss_type=str(value["loss_type"]),
        epsilon_low=float(value["epsilon"]),
        epsilon_high=float(value["epsilon"] if value["epsilon_high"] is None else value["epsilon_high"]),
        delta=None if value["delta"] is None else float(value["delta"]),
        beta=float(value["beta"]),
        kl_correction=bool(value["use_bias_correction_kl"]),
        level=str(value["importance_sampling_level"]),
        mask_truncated=bool(value["mask_truncated_completions"]),
        quantile=float(value["top_entropy_quantile"]),
        entropy_coef=float(value["entropy_coef"]),
        off_policy_threshold=None if value["off_policy_mask_threshold"] is None else float(value["off_policy_mask_threshold"]),
        correction=str(value["vllm_importance_sampling_mode"]) if vllm and value["vllm_importance_sampling_correction"] else None,
        correction_bounds=(-math.inf if low is None else float(low), math.inf if high is None else float(high)),
        sapo=(float(value["sapo_temperature_pos"]), float(value["sapo_temperature_neg"])),
        vespo=tuple(float(value[f"vespo_{name}"]) for name in ("k_pos", "lambda_pos", "k_neg", "lambda_neg")),  # type: ignore[arg-type]
        router_coef=None if value["router_aux_loss_coef"] is None else float(value["router_aux_loss_coef"]),
        sync_steps=int(value["ref_model_sync_steps"]) if value["sync_ref_model"] else None,
        sync_alpha=float(value["ref_model_mixup_alpha"]),
        max_grad_norm=float(value["max_grad_norm"]),
        optimizer="adamw" if optimizer in TORCH_ADAMW else optimizer,
        learning_rate=float(value["learning_rate"]),
        betas=(float(value["adam_beta1"]), float(value["adam_beta2"])),
        epsilon=float(value["adam_epsilon"]),
        weight_decay=float(value["weight_decay"]),
        optimizer_options=options,
        schedule=str(value["lr_scheduler_type"]),
        warmup=int(warmup) if warmup >= 1 else math.ceil(steps * warmup),
        schedule_options=_json(value["lr_scheduler_kwargs"]),
        lora=lora,
        merges=vllm and lora is not None,
        unsupported=unsupported,
    )


def _unsupported(got: dict[str, Any], value: dict[str, Any], lora: Lora | None, world: int) -> dict[str, str]:
    """Stages that cannot be proven with these settings, each with the setting."""
    found: dict[str, str] = {}
    for name, stages in REFUSED.items():
        if got.get(name) not in (None, False, 0, 0.0):
            found |= dict.fromkeys(stages, f"--{name} {got[name]} has no formula here")
    everything = (*STEP, "logging")
    for name, stages, known, asked in (
        ("vllm_importance_sampling_mode", everything, formulas.CORRECTIONS, value["use_vllm"]),
        ("loss_type", everything, LOSSES, True),
        ("optim", ("update",), (*TORCH_ADAMW, *formulas.OPTIMIZERS), True),
        ("lr_scheduler_type", ("schedule",), formulas.SCHEDULES, True),
    ):
        if asked and value[name] not in known:
            found |= dict.fromkeys(stages, f"--{name} {value[name]} has no formula here")
    if world > 1 and float(value["top_entropy_quantile"]) < 1:
        found |= dict.fromkeys(everything, "--top_entropy_quantile over several processes has no formula here")
    if lora is not None and lora.dropout:
        found |= dict.fromkeys(("sampling", *STEP, "logging"), "dropout of the adapters is random")  # TRL generates with it, too
    if lora is not None and lora.bias != "none":
        found |= dict.fromkeys(("weights",), f"adapters with bias {lora.bias} have no formula here")
    return found


def _pairs(text: Any) -> dict[str, float | str | bool]:
    """`a=1,b=2` as TRL's optim_args are written."""
    if not isinstance(text, str):
        return {}
    made = dict(part.strip().split("=", 1) for part in text.split(",") if "=" in part)
    return {name: _value([value]) for name, value in made.items()}


def _json(text: Any) -> dict[str, float]:
    if not isinstance(text, str):
        return {}
    try:
        made = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return made if isinstance(made, dict) else {}
