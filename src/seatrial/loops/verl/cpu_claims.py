"""What each phase on a CPU claims of verl's configuration: read back from the run's own dump (see `in_force`)."""

from __future__ import annotations

from typing import Any

STRATEGY = "fsdp2"
ROLLOUT = "seatrial"
_ALWAYS: dict[str, Any] = {
    "trainer.use_v1": True,
    "trainer.v1.trainer_mode": "sync",
    "actor_rollout_ref.actor.strategy": STRATEGY,
    "critic.strategy": STRATEGY,
    "actor_rollout_ref.rollout.name": ROLLOUT,
    # The generation server starts from random weights: it can only hold what was synchronised.
    "actor_rollout_ref.rollout.load_format": "dummy",
    "reward.reward_model.enable": False,
}
_GRPO: dict[str, Any] = {
    "algorithm.adv_estimator": "grpo",
    "actor_rollout_ref.actor.use_kl_loss": True,
    "actor_rollout_ref.model.lora_rank": 0,
}
_PPO: dict[str, Any] = {"algorithm.adv_estimator": "gae", "actor_rollout_ref.model.lora_rank": 0}
_SCHEDULE: dict[str, Any] = {"actor_rollout_ref.actor.optim.lr_scheduler_type": "cosine", "critic.optim.lr_scheduler_type": "cosine"}
_BY_PHASE: dict[str, dict[str, Any]] = {
    "grpo": _GRPO,
    "ppo": _PPO | {"actor_rollout_ref.model.lora_rank": 4},
    "full": _PPO | _SCHEDULE | {"actor_rollout_ref.actor.use_kl_loss": True, "trainer.resume_mode": "disable"},
    "resumed": _PPO | _SCHEDULE | {"actor_rollout_ref.actor.use_kl_loss": True, "trainer.resume_mode": "resume_path"},
    "learn": _GRPO,
    "control": _GRPO | {"actor_rollout_ref.actor.optim.lr": 0},
}


def claims(phase: str, steps: int) -> dict[str, Any]:
    """By dotted key."""
    return _ALWAYS | _BY_PHASE[phase] | {"trainer.total_training_steps": steps}
