"""verl's Hydra overrides in the words of the shadow, read without verl: defaults are those of the pinned release.

`KNOBS` lists every setting that a step passes through, with the stage that proves it and the values that make it have no effect.
A setting that the shadow has no formula for makes its stages unproven, which a level reports as a limitation.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from seatrial.instruments.shadow import formulas
from seatrial.instruments.shadow.interface import STEP, Knob, Lora, ShadowSettings

ALGORITHM, ROLLOUT, MODEL, ACTOR, CRITIC = (
    "algorithm",
    "actor_rollout_ref.rollout",
    "actor_rollout_ref.model",
    "actor_rollout_ref.actor",
    "critic",
)
GRPO_FLOOR = 1e-6
"""What verl adds to the standard deviation of a group."""
KL_NAMES = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3-bounded", "k3": "k3-bounded"}
MEGATRON = "megatron"


def _optim(part: str, clipped: str, only: str = "") -> dict[str, Knob]:
    """The settings of an optimizer, which actor and critic both have."""
    return {
        f"{part}.optim.lr": Knob("schedule", 1e-6 if part == ACTOR else 1e-5, (0,), only=only),
        f"{part}.optim.lr_warmup_steps": Knob("schedule", -1, (-1, 0, None), only=only),
        f"{part}.optim.lr_warmup_steps_ratio": Knob("schedule", 0.0, (0.0, 0), only=only),
        f"{part}.optim.weight_decay": Knob("update", 0.01, (0.0, 0), only=only),
        f"{part}.optim.clip_grad": Knob("clip", 1.0, (), clipped, only=only),
    }


def _fsdp2(part: str, only: str = "") -> dict[str, Knob]:
    return {
        f"{part}.optim.optimizer": Knob("update", "AdamW", only=only),
        f"{part}.optim.betas": Knob("update", [0.9, 0.999], only=only),
        f"{part}.optim.lr_scheduler_type": Knob("schedule", "constant", ("constant",), only=only),
        f"{part}.optim.min_lr_ratio": Knob("schedule", 0.0, (0.0, 0, None), only=only),
        f"{part}.optim.num_cycles": Knob("schedule", 0.5, (), only=only),
        f"{part}.optim.zero_indexed_step": Knob("schedule", True, (True,), only=only),
        f"{part}.optim.override_optimizer_config": Knob("update", None, (None,), only=only),
    }


def _megatron(part: str, only: str = "") -> dict[str, Knob]:
    return {
        f"{part}.optim.optimizer": Knob("update", "adam", only=only),
        f"{part}.optim.lr_decay_style": Knob("schedule", "linear", ("constant",), only=only),
        f"{part}.optim.lr_decay_steps": Knob("schedule", None, (None,), only=only),
        f"{part}.optim.lr_warmup_init": Knob("schedule", 0.0, (0.0, 0), only=only),
        f"{part}.optim.min_lr": Knob("schedule", 0.0, (0.0, 0), only=only),
        **{
            f"{part}.optim.override_optimizer_config.{name}": Knob("update", default, only=only)
            for name, default in (("adam_beta1", 0.9), ("adam_beta2", 0.999), ("adam_eps", 1e-8))
        },
    }


COMMON: dict[str, Knob] = {
    "data.train_batch_size": Knob("data", 1024),
    "data.shuffle": Knob("data", True),
    "data.max_response_length": Knob("length", 512, (), "truncated"),
    f"{ROLLOUT}.n": Knob("data", 1, (1,)),
    f"{ROLLOUT}.temperature": Knob("sampling", 1.0, (1.0, 1)),
    f"{ROLLOUT}.top_k": Knob("sampling", -1, (-1,)),
    f"{ROLLOUT}.top_p": Knob("sampling", 1, (1, 1.0)),
    f"{ALGORITHM}.adv_estimator": Knob("advantage", "gae"),
    f"{ALGORITHM}.norm_adv_by_std_in_grpo": Knob("advantage", True, only="grpo"),
    f"{ALGORITHM}.gamma": Knob("advantage", 1.0, (1.0, 1), only="gae"),
    f"{ALGORITHM}.lam": Knob("advantage", 1.0, (1.0, 1), only="gae"),
    f"{ALGORITHM}.use_kl_in_reward": Knob("advantage", False, (False,)),
    f"{ALGORITHM}.kl_penalty": Knob("advantage", "kl", (), "reward_kl"),
    f"{ALGORITHM}.kl_ctrl.kl_coef": Knob("advantage", 0.001, (), "reward_kl"),
    f"{ALGORITHM}.kl_ctrl.type": Knob("advantage", "fixed", (), "reward_kl"),
    f"{ACTOR}.use_kl_loss": Knob("kl", False, (False,)),
    f"{ACTOR}.kl_loss_coef": Knob("kl", 0.001, (0.0, 0), "kl"),
    f"{ACTOR}.kl_loss_type": Knob("kl", "low_var_kl", (), "kl"),
    f"{ACTOR}.entropy_coeff": Knob("loss", 0, (0, 0.0)),
    f"{ACTOR}.loss_agg_mode": Knob("loss", "token-mean"),
    f"{ACTOR}.loss_scale_factor": Knob("loss", None, (None,)),
    f"{ACTOR}.policy_loss.loss_mode": Knob("loss", "vanilla"),
    f"{ACTOR}.clip_ratio": Knob("ratio", 0.2, (), "clipped_low"),
    f"{ACTOR}.clip_ratio_low": Knob("ratio", 0.2, (), "clipped_low"),
    f"{ACTOR}.clip_ratio_high": Knob("ratio", 0.2, (), "clipped_high"),
    f"{ACTOR}.clip_ratio_c": Knob("ratio", 3.0, (), "dual_clipped"),
    f"{ACTOR}.ppo_mini_batch_size": Knob("data", 256),
    f"{ACTOR}.ppo_micro_batch_size_per_gpu": Knob("gradient", None),
    f"{ACTOR}.ppo_epochs": Knob("ratio", 1, (1,)),
    f"{ACTOR}.shuffle": Knob("data", False, (False,)),
    "trainer.total_training_steps": Knob("schedule", None),
    f"{CRITIC}.ppo_mini_batch_size": Knob("data", None, only="gae"),
    f"{CRITIC}.ppo_epochs": Knob("value", None, (1,), only="gae"),
    f"{CRITIC}.cliprange_value": Knob("loss", 0.5, (), "value_clipped", only="gae"),
    f"{CRITIC}.loss_agg_mode": Knob("loss", None, only="gae"),
    f"{CRITIC}.loss_scale_factor": Knob("loss", None, (None,), only="gae"),
    "trainer.critic_warmup": Knob("data", 0, (0,), only="gae"),
    **_optim(ACTOR, "clipped_norm"),
    **_optim(CRITIC, "critic_clipped_norm", "gae"),
}
INHERITED = {
    f"{CRITIC}.{name}": f"{ACTOR}.{name}" for name in ("ppo_mini_batch_size", "ppo_epochs", "loss_agg_mode", "loss_scale_factor", "shuffle")
}
"""Settings of the critic that are the actor's, unless they are set."""
REFUSED: dict[str, tuple[str, ...]] = {
    f"{ACTOR}.use_prefix_grouper": (*STEP, "logging"),
    f"{ALGORITHM}.use_pf_ppo": ("advantage", *STEP, "logging"),
    f"{ALGORITHM}.filter_groups.enable": ("data", *STEP, "logging"),
    f"{ALGORITHM}.rollout_correction.rollout_is": (*STEP, "logging"),
    f"{ALGORITHM}.rollout_correction.rollout_rs": (*STEP, "logging"),
    f"{ALGORITHM}.rollout_correction.bypass_mode": (*STEP, "logging"),
    f"{MODEL}.use_fused_kernels": (),
    f"{MODEL}.lora_adapter_path": ("weights",),
    f"{MODEL}.lora.dropout": (*STEP, "logging"),
}
"""Settings without a formula, and what cannot be proven with them when they are on."""


def knobs(words: Sequence[str]) -> dict[str, Knob]:
    made = _megatron if strategy(given(words)) == MEGATRON else _fsdp2
    return {**COMMON, **made(ACTOR), **made(CRITIC, "gae")}


def given(words: Sequence[str]) -> dict[str, Any]:
    """Keys and values of Hydra overrides, the last of each."""
    found = {}
    for word in words:
        key, separator, text = word.partition("=")
        if separator:
            found[key.lstrip("+~")] = _value(text)
    return found


def _value(text: str) -> Any:
    """A number, a list, a truth value or nothing, as Hydra reads them; else the text."""
    plain = text.strip()
    if plain.lower() in ("true", "false"):
        return plain.lower() == "true"
    if plain.lower() in ("null", "none", ""):
        return None
    if plain.startswith("[") and plain.endswith("]"):
        return [_value(item) for item in plain[1:-1].split(",") if item.strip()]
    if re.fullmatch(r"[-+]?\d{1,300}", plain):  # Python reads no 5,000 digits; as a float they are infinite
        return int(plain)
    try:
        return float(plain)
    except ValueError:
        pass
    try:
        return json.loads(plain)
    except (ValueError, RecursionError):
        return plain


def strategy(values: Mapping[str, Any]) -> str:
    """The engine of the actor."""
    return MEGATRON if values.get("model_engine") == MEGATRON else str(values.get(f"{ACTOR}.strategy", "fsdp"))


def knob_values(words: Sequence[str]) -> dict[str, Any]:
    got = given(words)
    made = {name: got.get(name, knob.default) for name, knob in knobs(words).items()}
    return made | {name: made[source] for name, source in INHERITED.items() if name in made and name not in got}


def settings(words: Sequence[str]) -> ShadowSettings:
    """The configured values of a run, with the critic's where there is one."""
    got, value = given(words), knob_values(words)
    engine, estimator = strategy(got), value[f"{ALGORITHM}.adv_estimator"]
    kl_loss, kl_reward = bool(value[f"{ACTOR}.use_kl_loss"]), bool(value[f"{ALGORITHM}.use_kl_in_reward"])
    clip = float(value[f"{ACTOR}.clip_ratio"])
    low, high = value[f"{ACTOR}.clip_ratio_low"], value[f"{ACTOR}.clip_ratio_high"]
    made = ShadowSettings(
        max_steps=int(value["trainer.total_training_steps"]),
        shuffle=bool(value["data.shuffle"]),
        arrival=True,
        free_split=bool(got.get(f"{ACTOR}.use_dynamic_bsz", False)),
        group=int(value[f"{ROLLOUT}.n"]),
        temperature=float(value[f"{ROLLOUT}.temperature"]),
        top_k=max(0, int(value[f"{ROLLOUT}.top_k"])),
        top_p=float(value[f"{ROLLOUT}.top_p"]),
        processors="temperature",
        max_tokens=int(value["data.max_response_length"]),
        scale="group" if value[f"{ALGORITHM}.norm_adv_by_std_in_grpo"] else "none",
        std_floor=GRPO_FLOOR,
        estimator="gae" if estimator == "gae" else "group",
        gamma=float(value[f"{ALGORITHM}.gamma"]),
        lam=float(value[f"{ALGORITHM}.lam"]),
        reward_beta=float(value[f"{ALGORITHM}.kl_ctrl.kl_coef"]) if kl_reward else 0.0,
        reward_kl=_kl(value[f"{ALGORITHM}.kl_penalty"]),
        loss_type=str(value[f"{ACTOR}.loss_agg_mode"]),
        loss_scale=_number(value[f"{ACTOR}.loss_scale_factor"]),
        epsilon_low=clip if low is None else float(low),
        epsilon_high=clip if high is None else float(high),
        dual_clip=float(value[f"{ACTOR}.clip_ratio_c"]),
        beta=float(value[f"{ACTOR}.kl_loss_coef"]) if kl_loss else 0.0,
        kl_type=_kl(value[f"{ACTOR}.kl_loss_type"]),
        kl_correction=False,
        entropy_coef=float(value[f"{ACTOR}.entropy_coeff"]),
        lora=_lora(got, engine, MODEL),
        unsupported=_unsupported(got, value, engine),
    )
    made = replace(made, **_update(value, ACTOR, engine), **_batches(value, ACTOR))
    if estimator != "gae":
        return made
    critic = replace(
        made,
        free_split=True,  # verl 0.9.1 cuts the critic's mini-batches by tokens, whatever its micro-batch size says
        loss_type=str(value[f"{CRITIC}.loss_agg_mode"]),
        loss_scale=_number(value[f"{CRITIC}.loss_scale_factor"]),
        value_clip=float(value[f"{CRITIC}.cliprange_value"]),
        lora=_lora(got, engine, f"{CRITIC}.model"),
        **_update(value, CRITIC, engine),
        **_batches(value, CRITIC),
    )
    return replace(made, critic=critic)


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


def _kl(name: Any) -> str:
    """The estimate that verl's name stands for; one without a formula keeps its name, and is refused elsewhere."""
    text = str(name)
    base = KL_NAMES.get(text.removesuffix("+"), text)
    return f"{base}+" if text.endswith("+") else base


def _batches(value: Mapping[str, Any], part: str) -> dict[str, Any]:
    """How the rows of a round are cut into mini-batches and micro-batches."""
    group = int(value[f"{ROLLOUT}.n"])
    rows, mini = int(value["data.train_batch_size"]) * group, int(value[f"{part}.ppo_mini_batch_size"]) * group
    micro = mini if part == CRITIC else int(value[f"{part}.ppo_micro_batch_size_per_gpu"] or mini)
    return {"micro_batch": micro, "accumulation": mini // micro, "splits": rows // micro, "iterations": int(value[f"{part}.ppo_epochs"])}


def _update(value: Mapping[str, Any], part: str, engine: str) -> dict[str, Any]:
    at = f"{part}.optim"
    steps, warmup = int(value["trainer.total_training_steps"]), value[f"{at}.lr_warmup_steps"]
    made: dict[str, Any] = {
        "rate_per_round": True,
        "max_grad_norm": float(value[f"{at}.clip_grad"]),
        "learning_rate": float(value[f"{at}.lr"]),
        "weight_decay": float(value[f"{at}.weight_decay"]),
    }
    if engine == MEGATRON:
        decay = int(value[f"{at}.lr_decay_steps"] or steps)
        override = f"{at}.override_optimizer_config"
        return made | {
            "optimizer": "adamw",
            "decays": "matrices",
            "betas": (float(value[f"{override}.adam_beta1"]), float(value[f"{override}.adam_beta2"])),
            "epsilon": float(value[f"{override}.adam_eps"]),
            "warmup": int(warmup) if warmup and int(warmup) > 0 else int(float(value[f"{at}.lr_warmup_steps_ratio"] or 0) * decay),
            "schedule": f"bounded_{value[f'{at}.lr_decay_style']}",
            "schedule_options": {
                "min_lr": float(value[f"{at}.min_lr"]),
                "init_lr": float(value[f"{at}.lr_warmup_init"]),
                "decay_steps": decay,
            },
        }
    more = value[f"{at}.override_optimizer_config"] or {}
    cosine = value[f"{at}.lr_scheduler_type"] == "cosine"
    options = {
        "min_lr_rate": float(value[f"{at}.min_lr_ratio"] or 0.0),
        "num_cycles": float(value[f"{at}.num_cycles"]),
        "ahead": 0 if value[f"{at}.zero_indexed_step"] else 1,
    }
    return made | {
        "optimizer": str(value[f"{at}.optimizer"]).lower(),
        "decays": "all",
        "betas": tuple(float(item) for item in value[f"{at}.betas"]),
        "epsilon": float(more.get("eps", 1e-8)) if isinstance(more, dict) else 1e-8,
        "warmup": int(warmup) if warmup and int(warmup) > 0 else int(float(value[f"{at}.lr_warmup_steps_ratio"] or 0) * steps),
        "schedule": "cosine_with_min_lr" if cosine else "constant_with_warmup",
        "schedule_options": options if cosine else {},
    }


def _lora(got: Mapping[str, Any], engine: str, model: str) -> Lora | None:
    """The adapters that are asked for: in Megatron, those of every linear layer."""
    if engine == MEGATRON:
        rank, alpha = int(got.get(f"{model}.lora.rank", 0)), float(got.get(f"{model}.lora.alpha", 32))
        return Lora(rank, alpha) if rank else None
    rank, alpha = int(got.get(f"{model}.lora_rank", 0)), float(got.get(f"{model}.lora_alpha", 16))
    targets: Any = got.get(f"{model}.target_modules", "all-linear")
    return Lora(rank, alpha, targets=tuple(targets) if isinstance(targets, list) else targets) if rank else None


def _unsupported(got: Mapping[str, Any], value: Mapping[str, Any], engine: str) -> dict[str, str]:
    """Stages that cannot be proven with these settings, each with the setting."""
    found: dict[str, str] = {}

    def refuse(name: str, stages: Sequence[str]) -> None:
        found.update({stage: f"{name}={got.get(name, value.get(name))} has no formula here" for stage in stages})

    for name, stages in REFUSED.items():
        if got.get(name) not in (None, False, 0, 0.0):
            refuse(name, stages)
    if value[f"{ALGORITHM}.adv_estimator"] not in ("grpo", "gae"):
        refuse(f"{ALGORITHM}.adv_estimator", (*STEP, "logging"))
    if value[f"{ACTOR}.policy_loss.loss_mode"] != "vanilla":
        refuse(f"{ACTOR}.policy_loss.loss_mode", (*STEP, "logging"))
    for part in (ACTOR, CRITIC):
        if value[f"{part}.loss_agg_mode"] not in formulas.REDUCTIONS:
            refuse(f"{part}.loss_agg_mode", (*STEP, "logging"))
        optimizer = str(value[f"{part}.optim.optimizer"]).lower()
        if optimizer not in (("adam",) if engine == MEGATRON else ("adamw",)):
            refuse(f"{part}.optim.optimizer", ("update",))
        if engine != MEGATRON and got.get(f"{part}.optim.override_optimizer_config"):
            refuse(f"{part}.optim.override_optimizer_config", ("update",))
        if engine == MEGATRON and value[f"{part}.optim.lr_decay_style"] not in ("constant", "linear", "cosine"):
            refuse(f"{part}.optim.lr_decay_style", ("schedule",))
    if value[f"{ALGORITHM}.use_kl_in_reward"] and value[f"{ALGORITHM}.kl_ctrl.type"] != "fixed":
        refuse(f"{ALGORITHM}.kl_ctrl.type", (*STEP, "logging"))
    for name, used in ((f"{ACTOR}.kl_loss_type", f"{ACTOR}.use_kl_loss"), (f"{ALGORITHM}.kl_penalty", f"{ALGORITHM}.use_kl_in_reward")):
        if value[used] and _kl(value[name]).removesuffix("+") not in formulas.KL_TYPES:
            refuse(name, (*STEP, "logging"))
    if int(value["trainer.critic_warmup"] or 0) > 0:
        refuse("trainer.critic_warmup", ("data", *STEP, "logging"))
    return found
