"""One call of a script of the checkout: its overrides, and what it claims of the configuration in force.

Claims are compared twice: with the configuration that NeMo-RL's own loader composes before the run, and with the one
that the run itself prints.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from seatrial.loops.options import number
from seatrial.loops.sizes import KEYS, Sizes
from seatrial.model.loop import Context

GPUS = 2
DEFAULT_MODEL = "Qwen/Qwen2.5-0.5B"
GRPO = "tests/functional/grpo_megatron.sh"


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a script of the checkout."""

    name: str
    """Of the phase."""
    script: str
    """Relative to the checkout."""
    steps: int
    """Training steps to reach; the user's own number counts."""
    overrides: tuple[str, ...] = ()
    claims: dict[str, Any] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)
    sizes: Sizes = field(default_factory=Sizes)
    trainers: int = 1
    """How many of the GPUs train: the rest generates."""
    assertions: bool = True
    """The script's own thresholds hold for this call: it runs as many steps as the script was written for."""


def gpus(context: Context) -> int:
    """GPUs of the host."""
    return number(context.options, "gpus", GPUS)


def model_overrides(context: Context) -> tuple[str, ...]:
    """Model and tokenizer, when another than the scripts' own was asked for."""
    if context.model == DEFAULT_MODEL:
        return ()
    return (f"policy.model_name={context.model}", f"policy.tokenizer.name={context.model}")


def common_claims(context: Context, steps: int, key: str = "grpo.max_num_steps") -> dict[str, Any]:
    """Megatron and not DTensor; as many steps as are expected; metrics are written; no sequence is masked away."""
    made: dict[str, Any] = {
        **{"policy.megatron_cfg.enabled": True, "policy.dtensor_cfg.enabled": False, key: f">= {steps}"},
        **{"logger.tensorboard_enabled": True, "grpo.seq_logprob_error_threshold": None},
    }
    if context.model != DEFAULT_MODEL:
        made["policy.model_name"] = context.model
    return made


def size_claims(sizes: Sizes) -> dict[str, Any]:
    """The parallel sizes."""
    return {f"policy.megatron_cfg.{KEYS[name]}": getattr(sizes, name) for name in KEYS}


def size_overrides(sizes: Sizes) -> tuple[str, ...]:
    """The parallel sizes, as overrides."""
    return tuple(f"{key}={value}" for key, value in size_claims(sizes).items())
