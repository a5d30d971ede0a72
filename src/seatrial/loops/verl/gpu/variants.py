"""What each level runs on GPUs: the wrapper with the variables of level 0, and what differs from it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from seatrial.loops.options import number
from seatrial.loops.sizes import Sizes
from seatrial.loops.verl.gpu import architecture, models
from seatrial.loops.verl.gpu.checkout import engine, extras
from seatrial.loops.verl.gpu.variant import ROLES, Variant, common_claims, common_variables, gpus
from seatrial.model.loop import Context

LORA_RANK = 4
LEARNING_STEPS = (20, 100)
FUSION = tuple(f"{role}.megatron.override_transformer_config.gradient_accumulation_fusion" for role in ROLES)
"""Must be off with Megatron-FSDP."""


def variants(level: str, context: Context, directory: Path) -> tuple[Variant, ...]:
    """The calls of one level, in order."""
    match level:
        case "smoke":
            return (_wrapped("run", context, directory),)
        case "save-resume":
            return _save_and_resume(context, directory)
        case "parallelism":
            return (_wrapped("run", context, directory, sizes=stress_sizes(context)),)
        case "megatron-fsdp":
            plain = _wrapped("run", context, directory, fsdp=True)
            return (replace(plain, overrides=tuple(f"++{key}=False" for key in FUSION)),)
        case "architecture":
            if context.options.get("architecture") != "moe":
                return (architecture.example(context),)
            sizes = Sizes(ep=number(context.options, "ep", 2), etp=number(context.options, "etp", 1))
            return (_wrapped("run", context, directory, sizes=sizes),)
        case "learning":
            return (_learning(context, directory),)
    raise AssertionError(f"level {level} has no variants")


def stress_sizes(context: Context) -> Sizes:
    """As asked for; else two of each, as far as the GPUs reach."""
    count, given = gpus(context), context.options
    tp = number(given, "tp", 2)
    pp = number(given, "pp", 2 if count % (2 * tp) == 0 else 1)
    cp = number(given, "cp", 2 if count % (2 * tp * pp) == 0 else 1)
    ep = number(given, "ep", 2 if models.is_kind(context, "moe") and count % (2 * pp) == 0 else 1)
    return Sizes(tp, pp, cp, ep, number(given, "etp", 1))


def _save_and_resume(context: Context, directory: Path) -> tuple[Variant, ...]:
    """Two processes that share one directory of checkpoints: below the level, so no other run's can be in it."""
    place = directory / "save" / "checkpoints"
    made = (
        _wrapped("save", context, directory, save=1),
        _wrapped("resume", context, directory, save=1, steps=2, resume="auto"),
    )
    exact = {"trainer.default_local_dir": str(place)}
    return tuple(
        replace(item, checkpoints=place, claims={**item.claims, **exact, "trainer.total_training_steps": item.steps}) for item in made
    )


def _learning(context: Context, directory: Path) -> Variant:
    """More steps, in a fixed order of the data, validated at the start and at the end."""
    steps = number(context.options, "steps", LEARNING_STEPS[0], *LEARNING_STEPS)
    made = _wrapped("run", context, directory, steps=steps)
    validation = directory / "run" / "validation"
    return replace(
        made,
        variables={**made.variables, "VAL_BEFORE_TRAIN": "True", "TEST_FREQ": str(steps // 2)},
        # The wrapper's 1e-6 is meant for full weights: so small an adapter would not move within so few steps. Its two epochs
        # would end a run on little data before its steps, and with exit code 0.
        overrides=(
            *("data.shuffle=False", "actor_rollout_ref.actor.optim.lr=3e-5", f"trainer.total_epochs={steps}"),
            f"trainer.validation_data_dir={validation}",
        ),
        claims={**made.claims, "data.shuffle": False, "trainer.val_before_train": True, "trainer.validation_data_dir": str(validation)},
    )


def _wrapped(
    name: str,
    context: Context,
    directory: Path,
    *,
    fsdp: bool = False,
    steps: int = 1,
    save: int = -1,
    resume: str = "disable",
    sizes: Sizes | None = None,
) -> Variant:
    """One call of the PPO wrapper. LoRA is on but for Megatron-FSDP, which verl's own tests run with full weights."""
    size, lora = sizes or Sizes(), 0 if fsdp else LORA_RANK
    train, val = models.data_files(context)
    path, dummy = _model(context, directory)
    variables = {
        **common_variables(context),
        **{"MODEL_ID": _name(context), "MODEL_PATH": models.model_path(context), "TRAIN_FILES": train, "VAL_FILES": val},
        **{"NUM_GPUS": str(gpus(context)), "ENGINE": engine(context), "LORA_RANK": str(lora), "ALL_OFFLOAD": "False"},
        **{"USE_MBRIDGE": "True", "VANILLA_MBRIDGE": "False", "VALUE_VANILLA_MBRIDGE": "False", "USE_MEGATRON_FSDP": str(fsdp)},
        **{"COMMON_TP": str(size.tp), "COMMON_PP": str(size.pp), "COMMON_VPP": "null", "COMMON_CP": str(size.cp)},
        **{"COMMON_EP": str(size.ep), "COMMON_ETP": str(size.etp), "INFER_TP": str(size.tp), "ROUTING_REPLAY_MODE": "disabled"},
        **{"TOTAL_TRAIN_STEPS": str(steps), "SAVE_FREQ": str(save), "RESUME_MODE": resume, "ADV_ESTIMATOR": "gae"},
        **{"VAL_BEFORE_TRAIN": "False", "TEST_FREQ": "-1", "USE_DIST_CKPT": "False", **dummy},
    }
    claims: dict[str, Any] = {
        **common_claims(context, ROLES, size, fsdp),
        **{"actor_rollout_ref.model.path": path, "critic.model.path": path, "data.train_files": train, "data.val_files": val},
        **{"trainer.resume_mode": resume, "trainer.save_freq": save, "trainer.total_training_steps": f">= {steps}"},
        **{f"{part}.model.lora.rank": "> 0" for part in ("actor_rollout_ref", "critic") if lora},
        **{key: False for key in FUSION if fsdp},
    }
    return Variant(name, steps, variables, extras(engine(context)), claims=claims, sizes=size)


def _model(context: Context, directory: Path) -> tuple[str, dict[str, str]]:
    """The path of the model that is trained, and the variables of a dummy and of a reward model."""
    path = models.model_path(context)
    reward = context.options.get("reward_model")
    made = {"RM_MODEL_PATH": str(Path(str(reward)).absolute())} if reward else {}
    config = context.options.get("model_config")
    if not config:
        return path, {"USE_DUMMY_MODEL": "False", **made}
    # Below the level directory: the wrapper takes one that exists for the right one, whatever it was made from.
    path = str(directory / "dummy_model")
    dummy = {"USE_DUMMY_MODEL": "True", "DUMMY_MODEL_CONFIG_PATH": str(Path(str(config)).absolute()), "DUMMY_MODEL_PATH": path}
    return path, {**dummy, **made}


def _name(context: Context) -> str:
    """The name for the experiment: as given, or the last part of a path."""
    return Path(context.model).absolute().name if Path(context.model).exists() else context.model
