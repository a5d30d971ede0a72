"""One call of a script of the checkout: its overrides, and what it claims of the configuration in force.

Claims are compared twice: with the configuration that NeMo-RL's own loader composes before the run, and with the one
that the run itself prints.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from seatrial.loops.nemo_rl.runs.checkout import checkout_of
from seatrial.loops.nemo_rl.runs.source import read_source
from seatrial.loops.options import number
from seatrial.loops.overrides import key_of
from seatrial.loops.sizes import KEYS, Sizes
from seatrial.model.loop import Context

GPUS = 2
DEFAULT_MODEL = "Qwen/Qwen2.5-0.5B"
UNWEAKENED: dict[str, Any] = {
    "grpo.overlong_filtering": False,
    "loss_fn.force_on_policy_ratio": False,
    "checkpointing.pretrained_checkpoint": None,
    "checkpointing.checkpoint_dir": None,
    "logger.log_dir": None,
}
"""Settings that take from what every level proves, where the user names them: sequences that are cut off leave the loss,
log-probabilities are not computed again, the Bridge converts no model, evidence goes elsewhere."""
GRPO = "tests/functional/grpo_megatron.sh"
MASKING = "seq_logprob_error_threshold"
"""Sequences with a greater error leave the loss, and the mean of the rest says little."""


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
        "logger.tensorboard_enabled": True,
    }
    place = checkout_of(context)
    if place is None or MASKING in read_source(place).words:  # releases before 0.6 cannot mask, and have no such key
        made[f"grpo.{MASKING}"] = None
    return made | argument_claims(context)


def argument_claims(context: Context) -> dict[str, Any]:
    """What is claimed against the user's own arguments: the model of the trial, unless the script's own is meant, and nothing
    that weakens the level."""
    named = {key_of(word) for word in context.arguments}
    made = {key: value for key, value in UNWEAKENED.items() if any(name == key or name.startswith(f"{key}.") for name in named)}
    return made | ({"policy.model_name": context.model} if "policy.model_name" in named or context.model != DEFAULT_MODEL else {})


def size_claims(sizes: Sizes) -> dict[str, Any]:
    """The parallel sizes."""
    return {f"policy.megatron_cfg.{KEYS[name]}": getattr(sizes, name) for name in KEYS}


def size_overrides(sizes: Sizes) -> tuple[str, ...]:
    """The parallel sizes, as overrides."""
    return tuple(f"{key}={value}" for key, value in size_claims(sizes).items())
