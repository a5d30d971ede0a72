"""One call of a script of the checkout: its variables, its overrides, and what it claims of the configuration in force.

Claims are compared twice: with the configuration that Hydra composes before the run, and with the one that the run
itself prints. `"> 0"` and `">= N"` claim a least value, so that a user may ask for more; all else must be equal.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from seatrial.loops.options import number
from seatrial.loops.sizes import KEYS, Sizes
from seatrial.loops.verl.gpu.checkout import WRAPPER, engine, launcher
from seatrial.model.loop import Context

GPUS = 8
ROLES = ("actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic")


@dataclass(frozen=True, slots=True)
class Variant:
    """One call of a script of the checkout."""

    name: str
    """Of the phase."""
    steps: int
    variables: dict[str, str]
    extras: tuple[str, ...]
    """Those of verl's lock that the script asks uv for."""
    overrides: tuple[str, ...] = ()
    claims: dict[str, Any] = field(default_factory=dict)
    sizes: Sizes = field(default_factory=Sizes)
    script: str = WRAPPER
    checkpoints: Path | None = None
    """Where checkpoints go, when not below the phase."""


def gpus(context: Context) -> int:
    """GPUs that the run uses."""
    return number(context.options, "gpus", GPUS)


def common_variables(context: Context) -> dict[str, str]:
    """Variables of every script: the launcher, and the python3 that they start."""
    made = {"VERL_USE_UV": "1" if launcher(context) == "uv" else "0", "DEVICE": "gpu", "RAY_DEDUP_LOGS": "0", "HYDRA_FULL_ERROR": "1"}
    if launcher(context) == "python":
        made["PATH"] = os.pathsep.join((str(context.python.absolute().parent), os.environ.get("PATH", os.defpath)))
    return made


def common_claims(context: Context, roles: tuple[str, ...], sizes: Sizes, fsdp: bool = False, experts: bool = True) -> dict[str, Any]:
    """The engine, its bridge and its sizes for each role; the rollout engine; the GPUs; and that metrics are written."""
    made: dict[str, Any] = {
        **{"trainer.logger": ["console", "file"], "trainer.n_gpus_per_node": gpus(context), "trainer.nnodes": 1},
        **{"actor_rollout_ref.rollout.name": engine(context), "actor_rollout_ref.rollout.tensor_model_parallel_size": sizes.tp},
        "reward.reward_model.enable": bool(context.options.get("reward_model")),
    }
    for role in roles:
        made |= {f"{role}.strategy": "megatron", f"{role}.megatron.use_mbridge": True, f"{role}.megatron.vanilla_mbridge": False}
        made[f"{role}.megatron.use_megatron_fsdp"] = fsdp
        for name, value in asdict(sizes).items():
            if experts or not name.startswith("e"):
                made[f"{role}.megatron.{KEYS[name]}"] = value
    return made
