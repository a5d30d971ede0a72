"""What a level claims of the configuration, compared with the one that a run printed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from seatrial.loops import claims as generic
from seatrial.loops.claims import lookup
from seatrial.loops.verl.dump import read_configs
from seatrial.model.record import CheckResult

SMOKE = {
    "actor_rollout_ref.actor.strategy": "megatron",
    "actor_rollout_ref.actor.megatron.use_mbridge": True,
    "actor_rollout_ref.actor.megatron.vanilla_mbridge": False,
    "actor_rollout_ref.model.lora.rank": "> 0",
}
"""What every level claims, level 3 but for LoRA."""


def in_force(phase: str, claims: Mapping[str, Any], log: Path) -> CheckResult:
    """The configuration that the run printed is the one that the level claims."""
    return generic.in_force(phase, claims, read_configs(log) if log.is_file() else [])


ENGINES = ("actor_rollout_ref.actor.strategy", "engine.strategy")
"""Who trains: of a policy, and of a supervised run."""


def not_exercised(log: Path) -> tuple[str, ...]:
    """Megatron and Megatron-Bridge, unless every configuration that the log shows trains with Megatron."""
    configs = [config for config in read_configs(log) if config] if log.is_file() else []
    engines = {str(lookup(config, key)) for config in configs for key in ENGINES if lookup(config, key) != generic.ABSENT}
    if engines == {"megatron"}:
        bridged = all(lookup(config, "actor_rollout_ref.actor.megatron.use_mbridge") is True for config in configs)
        return () if bridged else ("the log does not show that Megatron-Bridge was used",)
    if not engines:
        return ("the log does not show which engine trained: nothing here shows that Megatron or Megatron-Bridge ran",)
    return (f"the engine was {', '.join(sorted(engines))}: Megatron and Megatron-Bridge never ran",)


def other_run(log: Path) -> str | None:
    """Why the configuration that a log shows is not that of a level, or None."""
    result = in_force("run", SMOKE, log)
    return None if result.passed else f"the log is not of this level: {result.message or result.value}"
