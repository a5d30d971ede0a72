"""What a level claims of the configuration, compared with the one that a run printed.

NeMo-RL falls back to DTensor without a word when Megatron is not switched on: such a run proves nothing of the Bridge.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from seatrial.loops import claims as generic
from seatrial.loops.nemo_rl.after.dump import read_configs
from seatrial.model.record import CheckResult

MEGATRON = "policy.megatron_cfg.enabled"
DTENSOR = "policy.dtensor_cfg.enabled"


def in_force(phase: str, claims: Mapping[str, Any], log: Path) -> CheckResult:
    """The configuration that the run printed is the one that the level claims."""
    return generic.in_force(phase, claims, read_configs(log) if log.is_file() else [])


def other_run(log: Path) -> str | None:
    """Why the configuration that a log shows is not that of a level, or None."""
    printed = read_configs(log) if log.is_file() else []
    if not printed or None in printed:
        return "the log shows no whole `Final config:`, so nothing says that Megatron trained"
    for config in printed:
        megatron, dtensor = (generic.lookup(config or {}, key) for key in (MEGATRON, DTENSOR))
        if megatron is not True or dtensor is True:
            return f"dtensor was used instead of Megatron ({MEGATRON}={megatron}, {DTENSOR}={dtensor})"
    return None
