"""A recorded run of level 0 (SEATRIAL_LEVEL) against other settings than it was given: each must diverge at its stage.

A run with A, recomputed as if B had been configured, is what a bug looks like that takes A for B.
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from seatrial.instruments.verl import shadow, train

ACTOR = "actor_rollout_ref.actor"
GRPO = {
    "actor_rollout_ref.rollout.temperature=1.0": "sampling",
    "data.max_response_length=9": "length",
    "algorithm.norm_adv_by_std_in_grpo=False": "advantage",
    f"{ACTOR}.kl_loss_coef=0.2": "kl",
    f"{ACTOR}.clip_ratio_low=0.2": "loss",
    f"{ACTOR}.clip_ratio_c=3.0": "loss",
    f"{ACTOR}.entropy_coeff=0.02": "loss",
    f"{ACTOR}.loss_agg_mode=token-mean": "loss",
    f"{ACTOR}.optim.clip_grad=0.4": "clip",
    f"{ACTOR}.optim.lr=2e-3": "schedule",
    f"{ACTOR}.optim.betas=[0.9,0.999]": "update",
    f"{ACTOR}.optim.weight_decay=0.01": "update",
}
PPO = {
    "actor_rollout_ref.model.lora_alpha=4": "weights",
    "algorithm.gamma=1.0": "advantage",
    "algorithm.lam=0.95": "advantage",
    "critic.cliprange_value=0.5": "loss",
    "critic.optim.clip_grad=1.0": "clip",
    "critic.optim.lr=2e-3": "schedule",
    "critic.optim.betas=[0.9,0.999]": "update",
}


def words(run: str) -> list[str]:
    """What the recorded run was given."""
    place = Path(os.environ["SEATRIAL_LEVEL"])
    text = (place / "command.sh").read_text(encoding="utf-8").replace("\\\n", " ")
    line = next(line for line in text.splitlines() if "seatrial.instruments.verl.train " in line and f"/{run} " in line)
    found = [word.replace("$OUT", str(place)) for word in shlex.split(line)]
    return found[found.index("seatrial.instruments.verl.train") + 1 :]


def stages(run: str, settings: dict[str, str]) -> dict[str, str | None]:
    """The stage at which each setting diverges."""
    given = words(run)
    split = given.index("--")
    arguments, found = train.parser().parse_args(given[:split]), {}
    for setting in settings:
        divergence = shadow.recompute(arguments, [*given[split + 1 :], setting])["divergence"]
        found[setting] = divergence["stage"] if divergence else None
    return found


def case_settings_of_grpo() -> None:
    assert stages("grpo", GRPO) == GRPO


def case_settings_of_ppo() -> None:
    assert stages("ppo", PPO) == PPO
