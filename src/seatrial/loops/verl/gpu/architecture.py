"""Level 4 on GPUs: the script of the checkout that comes closest to an architecture, or why there is none.

- moe: the wrapper itself, with expert parallelism.
- vlm, mtp: an example script of verl, made small, on data with pictures, or with the MTP loss on. Such scripts take fewer
  variables than the wrapper, so the rest is overridden. They have no critic.
- qat: no script of the repository turns it on.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from seatrial.loops.model_kinds import KINDS
from seatrial.loops.options import choice, number
from seatrial.loops.sizes import Sizes
from seatrial.loops.verl.gpu import models
from seatrial.loops.verl.gpu.checkout import engine
from seatrial.loops.verl.gpu.variant import GPUS, ROLES, Variant, common_claims, common_variables, gpus
from seatrial.model.loop import Context
from seatrial.model.record import Finding
from seatrial.model.verdict import Boundary

ARCHITECTURES = ("moe", "vlm", "mtp", "qat")
VLM_SCRIPT = "examples/grpo_trainer/run_qwen3_vl_8b_megatron.sh"
MTP_SCRIPT = "examples/mtp_trainer/run_mimo_7b_mtp_megatron.sh"
ENGINES = {VLM_SCRIPT: "vllm", MTP_SCRIPT: "sglang"}
"""What each script asks uv for."""


def why_not(options: Mapping[str, str]) -> str | None:
    """Why level 4 cannot be run with these options, or None."""
    if "architecture" not in options:
        return f"say which architecture is meant: --set options.architecture={'|'.join(ARCHITECTURES)}"
    kind = choice(options, "architecture", ARCHITECTURES)
    if kind == "moe":
        return None if number(options, "gpus", GPUS) > 1 else "expert parallelism needs at least 2 GPUs"
    if kind == "qat":
        return "no script of verl's repository turns QAT on: its recipe lives elsewhere (docs/low_precision/nvfp4_qat.md)"
    script = VLM_SCRIPT if kind == "vlm" else MTP_SCRIPT
    if "model_config" in options:
        return f"{script} takes no dummy model: leave model_config out"
    if "verl" in options and not Path(options["verl"], script).is_file():
        return f"the checkout has no {script}, the closest script for {kind}"
    if options.get("engine", "vllm") != ENGINES[script]:
        return f"{script} runs {ENGINES[script]}: --set options.engine={ENGINES[script]}"
    return None


def findings(context: Context) -> tuple[Finding, ...]:
    """The data, and for level 4 that model and data are what the architecture is about: else it would prove nothing."""
    kind = str(context.options.get("architecture")) if "architecture" in context.levels else ""
    made = models.data_findings(context, "geo3k", "images") if kind == "vlm" else models.data_findings(context, "gsm8k")
    if kind and not models.is_kind(context, kind):
        message = f"architecture = {kind}, and config.json of the model has none of {', '.join(KINDS[kind])}"
        return (*made, Finding(name="model", ok=False, boundary=Boundary.CONFIG, message=message, fix=f"--model with a {kind} model"))
    return made


def example(context: Context) -> Variant:
    """One step of an example script."""
    mtp = context.options.get("architecture") == "mtp"
    script = MTP_SCRIPT if mtp else VLM_SCRIPT
    sizes = Sizes(tp=number(context.options, "tp", 2), pp=number(context.options, "pp", 1))
    train, val = models.data_files(context, "gsm8k" if mtp else "geo3k")
    path = models.model_path(context)
    variables = {
        **common_variables(context),
        **{"MODEL_PATH": path, "NNODES": "1", "NGPUS_PER_NODE": str(gpus(context)), "TRAIN_BATCH_SIZE": "16", "PPO_MINI_BATCH_SIZE": "8"},
        **{"MAX_PROMPT_LENGTH": "1024", "MAX_RESPONSE_LENGTH": "512", "PPO_MAX_TOKEN_LEN_PER_GPU": "4096", "ROLLOUT_N": "4"},
        **{"ACTOR_TP": str(sizes.tp), "ACTOR_PP": str(sizes.pp), "ACTOR_CP": "1", "ROLLOUT_TP": str(sizes.tp)},
        **{"SAVE_FREQ": "-1", "TEST_FREQ": "-1"},
    }
    overrides = (
        *(f"data.train_files={train}", f"data.val_files={val}", f"actor_rollout_ref.rollout.name={engine(context)}"),
        *("trainer.total_training_steps=1", "trainer.val_before_train=False", "trainer.resume_mode=disable"),
        *("actor_rollout_ref.actor.megatron.vanilla_mbridge=False", "actor_rollout_ref.ref.megatron.vanilla_mbridge=False"),
    )
    feature = (
        {"actor_rollout_ref.model.mtp.enable": True, "actor_rollout_ref.model.mtp.enable_train": True}
        if mtp
        else {"data.image_key": "images"}
    )
    claims = {
        **common_claims(context, ROLES[:1], sizes, experts=False),
        **{"actor_rollout_ref.model.path": path, "data.train_files": train, "data.val_files": val, "trainer.resume_mode": "disable"},
        **{"trainer.total_training_steps": ">= 1", **feature},
    }
    return Variant("run", 1, variables, (ENGINES[script], "megatron"), overrides, claims, sizes, script)
