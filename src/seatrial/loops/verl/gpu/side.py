"""verl on GPUs: its own wrapper script, with the environment of a level, in the checkout.

Each level begins with the phase `imports`, which asks the driver and a real Ray worker where they import from; then come
the calls of the script (`calls`, `variants`). What a level claims of the configuration is checked before the run
(`preflight`, `compose`) and read back after it (`in_force`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from seatrial.loops.options import number
from seatrial.loops.verl.gpu import architecture, models
from seatrial.loops.verl.gpu.calls import phases
from seatrial.loops.verl.gpu.checkout import import_path, interpreter
from seatrial.loops.verl.gpu.preflight import findings
from seatrial.loops.verl.gpu.proofs import proofs
from seatrial.loops.verl.gpu.variant import GPUS
from seatrial.loops.verl.gpu.variants import LEARNING_STEPS
from seatrial.model.knowledge import Level
from seatrial.model.loop import Context

__all__ = ["DEFAULT_MODEL", "findings", "import_path", "interpreter", "levels", "limitations", "phases", "proofs"]

DEFAULT_MODEL = "Qwen/Qwen2.5-0.5B"


def levels(ladder: Sequence[Level], options: Mapping[str, str]) -> tuple[Level, ...]:
    """The ladder with these options: what cannot be run says why, and a cluster is asked for the GPUs that are used."""
    count = number(options, "gpus", GPUS)
    costs = [level.cost.model_copy(update={"gpus": count}) for level in ladder]
    return tuple(level.model_copy(update={"cost": cost, **_changed(level, options)}) for level, cost in zip(ladder, costs, strict=True))


def _changed(level: Level, options: Mapping[str, str]) -> dict[str, object]:
    if level.name == "learning":
        return {"steps": number(options, "steps", LEARNING_STEPS[0], *LEARNING_STEPS)}
    if level.name == "parallelism" and number(options, "gpus", GPUS) < 2:
        return {"skip": "one GPU has nothing to be parallel with: name more with --set options.gpus=N"}
    if level.name == "architecture":
        return {"skip": architecture.why_not(options)}
    return {}


def limitations(level: Level, context: Context) -> tuple[str, ...]:
    """What this configuration leaves out."""
    made = []
    if not context.options.get("reward_model"):
        made.append("rewards came from a rule: no reward model was served")
    if context.options.get("model_config"):
        made.append("a dummy model with random weights: pretrained weights were not loaded")
    if models.is_kind(context, "vlm") and level.name != "architecture":
        made.append("text-only data for a vision model: pictures and the vision encoder were not exercised")
    if models.is_kind(context, "moe") and level.name not in ("parallelism", "architecture"):
        made.append("expert parallel size 1 for a model with experts: routing across ranks was not exercised")
    if any("enforce_eager=True" in word for word in context.arguments):
        made.append("enforce_eager was set: the capture of CUDA graphs was not exercised")
    return tuple(made)
