"""What each phase on a CPU claims of verl's configuration: read back from the run's own dump (see `in_force`)."""

from __future__ import annotations

from typing import Any

ROLLOUT = "seatrial"
RANK = 4
"""Of every adapter."""
_ALWAYS: dict[str, Any] = {
    "trainer.use_v1": True,
    "trainer.v1.trainer_mode": "sync",
    "actor_rollout_ref.rollout.name": ROLLOUT,
    # The generation server starts from random weights: it can only hold what was synchronised.
    "actor_rollout_ref.rollout.load_format": "dummy",
    "reward.reward_model.enable": False,
}
_FSDP2: dict[str, Any] = {
    "model_engine": "dp",
    "actor_rollout_ref.actor.strategy": "fsdp2",
    "critic.strategy": "fsdp2",
}
_MEGATRON: dict[str, Any] = {
    "model_engine": "megatron",
    "actor_rollout_ref.actor.strategy": "megatron",
    "critic.strategy": "megatron",
    "actor_rollout_ref.model.lora.merge": False,
    **{
        f"{part}.megatron.{key}": value
        for part in ("actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic")
        for key, value in {
            "use_mbridge": True,
            "vanilla_mbridge": False,
            "use_megatron_fsdp": False,
            "use_distributed_optimizer": True,
            "dtype": "bfloat16",
            "tensor_model_parallel_size": 1,
            "pipeline_model_parallel_size": 1,
            "context_parallel_size": 1,
        }.items()
    },
}
_GRPO: dict[str, Any] = {"algorithm.adv_estimator": "grpo", "actor_rollout_ref.actor.use_kl_loss": True}
_PPO: dict[str, Any] = {"algorithm.adv_estimator": "gae"}
_NO_KL: dict[str, Any] = {"actor_rollout_ref.actor.use_kl_loss": False}
_BY_PHASE: dict[str, dict[str, Any]] = {
    "grpo": _GRPO,
    "ppo": _PPO | _NO_KL,
    "full": _PPO | {"trainer.resume_mode": "disable"},
    "resumed": _PPO | {"trainer.resume_mode": "resume_path"},
    "learn": _GRPO,
    "control": _GRPO | {"actor_rollout_ref.actor.optim.lr": 0},
}
_SAVING = ("full", "resumed")


def claims(strategy: str, phase: str, steps: int) -> dict[str, Any]:
    """By dotted key."""
    own = _megatron(phase) if strategy == "megatron" else _fsdp2(phase)
    return _ALWAYS | own | _BY_PHASE[phase] | {"trainer.total_training_steps": steps}


def _fsdp2(phase: str) -> dict[str, Any]:
    made: dict[str, Any] = _FSDP2 | {"actor_rollout_ref.model.lora_rank": RANK if phase == "ppo" else 0}
    if phase in _SAVING:
        made |= {f"{part}.optim.lr_scheduler_type": "cosine" for part in ("actor_rollout_ref.actor", "critic")}
        made["actor_rollout_ref.actor.use_kl_loss"] = True
    return made


def _megatron(phase: str) -> dict[str, Any]:
    made: dict[str, Any] = _MEGATRON | {"actor_rollout_ref.model.lora.rank": RANK if phase in ("ppo", *_SAVING) else 0}
    made["critic.model.lora.rank"] = RANK if phase == "ppo" else 0
    if phase in _SAVING:
        for part in ("actor_rollout_ref.actor.optim", "critic.optim"):
            made |= {f"{part}.lr_decay_style": "cosine", f"{part}.use_checkpoint_opt_param_scheduler": True}
        made |= _NO_KL
    return made
