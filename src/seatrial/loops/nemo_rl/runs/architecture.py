"""Level 5: the functional that turns an architecture's own path on, or why there is none; and maintained recipes.

- moe: the GRPO functional with expert parallelism; the model must have experts.
- vlm, audio, eagle, qat: functionals of their own. The one for vision models trains with DTensor unless it is given the
  Megatron configuration, so that is given.
- fp8: the GRPO functional with the configuration that trains in FP8.
- mtp: no functional turns it on; a recipe may.
- A recipe goes before the functional, and must turn on the architecture that is named with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from seatrial.loops.nemo_rl.runs.checkout import checkout_of
from seatrial.loops.nemo_rl.runs.variant import GRPO, Call, common_claims, gpus, model_overrides, size_claims, size_overrides
from seatrial.loops.options import choice, number
from seatrial.loops.sizes import Sizes
from seatrial.model.loop import Context

ARCHITECTURES = ("moe", "vlm", "audio", "eagle", "mtp", "fp8", "qat")
SCRIPTS = {
    "moe": GRPO,
    "vlm": "tests/functional/vlm_grpo.sh",
    "audio": "tests/functional/audio_grpo_megatron.sh",
    "eagle": "tests/functional/grpo_megatron_eagle3_online.sh",
    "fp8": GRPO,
    "qat": "tests/functional/modelopt_quant_rollout.sh",
}
STEPS = {"vlm": 5, "qat": 1}
CONFIGS = {"vlm": "examples/configs/vlm_grpo_3B_megatron.yaml", "fp8": "examples/configs/grpo_math_8B_megatron_fp8.yaml"}
CLAIMS: dict[str, dict[str, Any]] = {
    "eagle": {"policy.draft.enabled": True},
    "fp8": {"policy.megatron_cfg.fp8_cfg.enabled": True},
    "qat": {"policy.quant_calib_size": "> 0"},
}
OF_RECIPES: dict[str, dict[str, Any]] = {
    "moe": {"policy.megatron_cfg.expert_model_parallel_size": "> 1"},
    "mtp": {"policy.megatron_cfg.mtp_num_layers": "> 0"},
}
"""What is claimed of a recipe for an architecture, where it is not what is claimed of the functional."""
MOE_EP = 2
SUITES = "tests/test_suites"
RECIPES = "examples/configs/recipes"


def why_not(options: Mapping[str, str]) -> str | None:
    """Why level 5 cannot be run with these options, or None."""
    if "recipe" in options and "architecture" not in options:
        return None
    if "architecture" not in options:
        return f"say which architecture is meant: --set options.architecture={'|'.join(ARCHITECTURES)}"
    kind = choice(options, "architecture", ARCHITECTURES)
    if "recipe" in options:
        return None
    if kind == "moe" and number(options, "ep", MOE_EP) < 2:
        return "without expert parallelism nothing shows that the model has experts: --set options.ep=2, or name a recipe"
    if kind == "mtp":
        return (
            "no functional of NeMo-RL turns MTP on: name a recipe that does, with --set options.recipe=llm/NAME (eagle is for draft models)"
        )
    place = options.get("nemo_rl")
    missing = [name for name in (SCRIPTS[kind], CONFIGS.get(kind)) if place and name and not Path(place, name).is_file()]
    return f"the checkout has no {missing[0]}, which is what runs {kind}" if missing else None


def call(context: Context) -> Call:
    """The functional of the architecture."""
    kind = str(context.options.get("architecture", ""))
    if "recipe" in context.options:
        made = recipe(str(context.options["recipe"]), context)
        return replace(made, claims={**made.claims, **OF_RECIPES.get(kind, CLAIMS.get(kind, {}))})
    steps, sizes = STEPS.get(kind, 2), Sizes()
    words, claims = list(model_overrides(context)), {**common_claims(context, steps), **CLAIMS.get(kind, {})}
    if kind in CONFIGS:
        words = ["--config", str((checkout_of(context) or Path()) / CONFIGS[kind]), *words]
    if kind in ("moe", "fp8"):
        default = MOE_EP if kind == "moe" else 1
        sizes = Sizes(ep=number(context.options, "ep", default), etp=number(context.options, "etp", 1))
        words += [*size_overrides(sizes), "policy.generation.vllm_cfg.tensor_parallel_size=1"]
        claims |= size_claims(sizes)
    return Call("run", SCRIPTS[kind], steps, tuple(words), claims, sizes=sizes, trainers=gpus(context))


def recipe(name: str, context: Context) -> Call:
    """The test-suite script of a maintained recipe, for two steps: its thresholds are for its own number of steps."""
    stem = name.removeprefix(f"{RECIPES}/").removesuffix(".yaml").removesuffix(".sh")
    steps = 2
    words = (*model_overrides(context), f"grpo.max_num_steps={steps}", "logger.wandb_enabled=false", "checkpointing.enabled=false")
    return Call("run", f"{SUITES}/{stem}.sh", steps, words, common_claims(context, steps), trainers=gpus(context), assertions=False)
