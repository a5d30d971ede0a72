"""What each NeMo-RL level runs: a maintained script of the checkout, its overrides, and what it claims of the configuration in force.

Claims are compared twice: with the composed configuration before the run, and with the one that the run prints.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from seatrial.core.guarded import parse_step
from seatrial.core.loop import Context, Phase
from seatrial.core.records import OPTION
from seatrial.core.specs import Level
from seatrial.loops.hydra import KEYS, Sizes, last_count, override_key
from seatrial.loops.nemo_rl import nemo_checkout, script_reader
from seatrial.loops.nemo_rl.nemo_checkout import Generation, checkout_of, generation, read_source

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
class ScriptCall:
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
    return int(context.options.get("gpus", GPUS))


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
    named = {override_key(word) for word in context.arguments}
    made = {key: value for key, value in UNWEAKENED.items() if any(name == key or name.startswith(f"{key}.") for name in named)}
    return made | ({"policy.model_name": context.model} if "policy.model_name" in named or context.model != DEFAULT_MODEL else {})


def size_claims(sizes: Sizes) -> dict[str, Any]:
    return {f"policy.megatron_cfg.{KEYS[name]}": getattr(sizes, name) for name in KEYS}


def size_overrides(sizes: Sizes) -> tuple[str, ...]:
    return tuple(f"{key}={value}" for key, value in size_claims(sizes).items())


ARCHITECTURES = ("moe", "vlm", "audio", "eagle", "mtp", "fp8", "qat")
SCRIPTS = {
    "moe": GRPO,
    "vlm": "tests/functional/vlm_grpo.sh",
    "audio": "tests/functional/audio_grpo_megatron.sh",
    "eagle": "tests/functional/grpo_megatron_eagle3_online.sh",
    "fp8": GRPO,
    "qat": "tests/functional/modelopt_quant_rollout.sh",
}
ARCHITECTURE_STEPS = {"vlm": 5, "qat": 1}
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


def why_no_architecture(options: Mapping[str, str]) -> str | None:
    if "recipe" in options and "architecture" not in options:
        return None
    if "architecture" not in options:
        return f"say which architecture is meant: --set options.architecture={'|'.join(ARCHITECTURES)}"
    kind = options["architecture"]
    if "recipe" in options:
        return None
    if kind == "moe" and int(options.get("ep", MOE_EP)) < 2:
        return "without expert parallelism nothing shows that the model has experts: --set options.ep=2, or name a recipe"
    if kind == "mtp":
        return (
            "no functional of NeMo-RL turns MTP on: name a recipe that does, with --set options.recipe=llm/NAME (eagle is for draft models)"
        )
    place = options.get("nemo_rl")
    missing = [name for name in (SCRIPTS[kind], CONFIGS.get(kind)) if place and name and not Path(place, name).is_file()]
    return f"the checkout has no {missing[0]}, which is what runs {kind}" if missing else None


def architecture_call(context: Context) -> ScriptCall:
    kind = str(context.options.get("architecture", ""))
    if "recipe" in context.options:
        made = recipe_call(str(context.options["recipe"]), context)
        return replace(made, claims={**made.claims, **OF_RECIPES.get(kind, CLAIMS.get(kind, {}))})
    steps, sizes = ARCHITECTURE_STEPS.get(kind, 2), Sizes()
    words, claims = list(model_overrides(context)), {**common_claims(context, steps), **CLAIMS.get(kind, {})}
    if kind in CONFIGS:
        words = ["--config", str((checkout_of(context) or Path()) / CONFIGS[kind]), *words]
    if kind in ("moe", "fp8"):
        default = MOE_EP if kind == "moe" else 1
        sizes = Sizes(ep=int(context.options.get("ep", default)), etp=int(context.options.get("etp", 1)))
        words += [*size_overrides(sizes), "policy.generation.vllm_cfg.tensor_parallel_size=1"]
        claims |= size_claims(sizes)
    return ScriptCall("run", SCRIPTS[kind], steps, tuple(words), claims, sizes=sizes, trainers=gpus(context))


def recipe_call(name: str, context: Context) -> ScriptCall:
    """The test-suite script of a maintained recipe, for two steps: its thresholds are for its own number of steps."""
    stem = name.removeprefix(f"{RECIPES}/").removesuffix(".yaml").removesuffix(".sh")
    steps = 2
    words = (*model_overrides(context), f"grpo.max_num_steps={steps}", "logger.wandb_enabled=false", "checkpointing.enabled=false")
    return ScriptCall("run", f"{SUITES}/{stem}.sh", steps, words, common_claims(context, steps), trainers=gpus(context), assertions=False)


LORA = "tests/functional/grpo_megatron_lora.sh"
DIAMOND = "tests/functional/sft_resume_diamond.sh"
RESHARD = "tests/functional/grpo_nccl_reshard_refit.sh"
MEGATRON_GENERATION = "tests/functional/grpo_megatron_generation.sh"
LEARNING_STEPS = (20, 100)
TRANSPORTS = ("full", "packed", "reshard", "delta")
REFIT_STEPS = 3
"""The first refit carries the weights that both sides began with: two more carry trained ones."""
DELTA_SEED = {
    "enabled": "true",
    "dtype": "bfloat16",
    "transport": "sparse_indices",
    "full_sync_interval": "20",
    "sparse_bucket_size_bytes": "5368709120",
    "delta_load_batch_size_bytes": "536870912",
}


def variants(level: str, context: Context) -> tuple[ScriptCall, ...]:
    """The calls of one level, in order; a rerun of `seatrial isolate` does not claim what it changes on purpose."""
    return tuple(replace(call, claims=relaxed(call.claims, context.options)) for call in _calls(level, context))


def relaxed(claims: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """The claims of a call without those on keys that an isolation changes on purpose (see `OPTION`)."""
    changed = {word.partition("=")[0].lstrip("+~") for word in str(options.get(OPTION, "")).split()}
    return {key: value for key, value in claims.items() if key not in changed}


def _calls(level: str, context: Context) -> tuple[ScriptCall, ...]:
    match level:
        case "smoke":
            return (_grpo("run", context, 2),)
        case "lora-checkpoint":
            return _lora_and_checkpoint(context)
        case "refit":
            return tuple(_refit(name, context) for name in transports(context))
        case "megatron-generation":
            return (_megatron_generation(context),)
        case "parallelism":
            return (_parallelism(context),)
        case "architecture":
            return (architecture_call(context),)
        case "learning":
            return (_learning(context),)
    raise AssertionError(f"level {level} has no variants")


def _grpo(name: str, context: Context, steps: int, *overrides: str, claims: Mapping[str, Any] | None = None, **fields: Any) -> ScriptCall:
    count = (f"cluster.gpus_per_node={gpus(context)}",) if "gpus" in context.options else ()
    return ScriptCall(
        name=name,
        script=GRPO,
        steps=steps,
        overrides=(*model_overrides(context), *count, *((f"grpo.max_num_steps={steps}",) if steps != 2 else ()), *overrides),
        claims={**common_claims(context, steps), "policy.generation.backend": "vllm", **(claims or {})},
        trainers=fields.pop("trainers", gpus(context)),
        **fields,
    )


def _lora_and_checkpoint(context: Context) -> tuple[ScriptCall, ...]:
    """The LoRA functional, which saves; then the resume comparison, which trains with DTensor and with Megatron."""
    made = []
    if not no_peft(context.options, offered(context)):
        claims = {**common_claims(context, 3), "policy.megatron_cfg.peft.enabled": True, "checkpointing.enabled": True}
        made.append(ScriptCall("lora", LORA, 3, model_overrides(context), claims, trainers=gpus(context)))
    # Four of its five runs save or resume, two of them with Megatron: what each of them ran with is a proof of its own.
    claims = {"sft.max_num_steps": 2, "logger.tensorboard_enabled": True, **argument_claims(context)}
    return (*made, ScriptCall("resume", DIAMOND, 2, model_overrides(context), claims))


def no_peft(options: Mapping[str, Any], offers: Generation) -> str | None:
    if options.get("peft") == "broken":
        return "PEFT is broken in this NeMo-RL checkout (options.peft = broken): LoRA was not run; cover it with the Bridge's own tests"
    if not offers.peft or Path(LORA).name not in offers.scripts:
        return "this NeMo-RL checkout has no LoRA with Megatron: LoRA was not run; cover it with the Bridge's own tests"
    return None


def offered(context: Context) -> Generation:
    place = checkout_of(context)
    return generation(place) if place is not None else generation(Path())


def transports(context: Context) -> tuple[str, ...]:
    """Those asked for; else those that the checkout has."""
    asked = context.options.get("transports")
    return tuple(str(asked).split(",")) if asked else available(offered(context))


def available(offers: Generation) -> tuple[str, ...]:
    made = ["full"]
    made += ["packed"] if "packed" in offers.transports else []
    made += ["reshard"] if "nccl_reshard" in offers.transports and Path(RESHARD).name in offers.scripts else []
    made += ["delta"] if offers.refit == "delta_compression" or "vllm_zmq_sparse" in offers.transports else []
    return tuple(made)


def _refit(name: str, context: Context) -> ScriptCall:
    """Trainer and generator on GPUs of their own, with one transport."""
    trainers = gpus(context) // 2
    apart = {
        "policy.generation.colocated.enabled": False,
        "policy.generation.colocated.resources.gpus_per_node": gpus(context) - trainers,
        "policy.generation.vllm_cfg.async_engine": True,
    }
    words = [f"{key}={str(value).lower()}" for key, value in apart.items()]
    words += ["policy.generation.colocated.resources.num_nodes=1"]
    claims: dict[str, Any] = {**common_claims(context, REFIT_STEPS), "policy.generation.backend": "vllm", **apart}
    if name == "reshard":
        words = [*model_overrides(context), f"grpo.max_num_steps={REFIT_STEPS}"]
        claims["policy.generation.refit_transport"] = "nccl_reshard"
        return ScriptCall(name, RESHARD, REFIT_STEPS, tuple(words), claims, trainers=trainers)
    # Buckets a fortieth of the usual size: a small model would otherwise fit into one, and nothing would be packed.
    variables = {"NRL_REFIT_BUFFER_MEMORY_RATIO": "0.0005", "NRL_REFIT_NUM_BUFFERS": "2"} if name == "packed" else {}
    if name == "delta":
        extra = delta_settings(offered(context))
        words += extra
        claims |= {key.lstrip("+"): _value(text) for key, _, text in (word.partition("=") for word in extra)}
    elif offered(context).refit == "refit_transport":
        claims["policy.generation.refit_transport"] = None
    return _grpo(name, context, REFIT_STEPS, *words, claims=claims, variables=variables, trainers=trainers)


def delta_settings(offers: Generation) -> list[str]:
    """How this generation of NeMo-RL is told to send only what changed."""
    place = "policy.generation"
    if offers.refit == "delta_compression":
        return [f"{place}.delta_compression.{key}={value}" for key, value in DELTA_SEED.items()]
    return [
        f"{place}.refit_transport=vllm_zmq_sparse",
        f"++{place}.refit_cfg.sparse.delta_compression.encoding=xor",
        f"++{place}.refit_cfg.sparse.verify_samples_per_payload=16",
    ]


def _value(text: str) -> Any:
    value = parse_step(text)
    return {"true": True, "false": False}.get(text, text if value is None else value)


def _megatron_generation(context: Context) -> ScriptCall:
    claims = {**common_claims(context, 2), "policy.generation.backend": "megatron"}
    return ScriptCall("run", MEGATRON_GENERATION, 2, model_overrides(context), claims, trainers=gpus(context))


def stress_sizes(context: Context) -> Sizes:
    """As asked for; else tensor parallel over two GPUs."""
    given = context.options
    return Sizes(*(int(given.get(name, 2 if name == "tp" else 1)) for name in ("tp", "pp", "cp", "ep", "etp")))


def _parallelism(context: Context) -> ScriptCall:
    if recipe := context.options.get("recipe"):
        call = recipe_call(str(recipe), context)
        asked = {key: size for key, size in size_claims(stress_sizes(context)).items() if _asked(key, context)}
        return replace(call, claims={**call.claims, **asked})
    sizes = stress_sizes(context)
    sequence = context.options.get("sequence_parallel", "false") == "true"
    claims = {**size_claims(sizes), "policy.megatron_cfg.sequence_parallel": sequence}
    words = [*size_overrides(sizes), f"policy.megatron_cfg.sequence_parallel={str(sequence).lower()}"]
    return _grpo("run", context, 2, *words, claims=claims, sizes=sizes)


def _asked(key: str, context: Context) -> bool:
    return any(key.endswith(f".{KEYS[name]}") for name in KEYS if name in context.options)


def _learning(context: Context) -> ScriptCall:
    steps = int(context.options.get("steps", LEARNING_STEPS[0]))
    words = (*model_overrides(context), f"grpo.max_num_steps={steps}", "data.shuffle=false", "checkpointing.enabled=false")
    peft = no_peft(context.options, offered(context)) is None
    claims = {**common_claims(context, steps), "data.shuffle": False, **({"policy.megatron_cfg.peft.enabled": True} if peft else {})}
    return ScriptCall("run", LORA if peft else GRPO, steps, words, claims, trainers=gpus(context))


CONVERTED_VARIABLE = "NRL_MEGATRON_CHECKPOINT_DIR"
CONVERTED_FOLDER = "converted"


def converted_models(directory: Path, run: str) -> Path:
    """Of a level directory of the run with this name: below the user's own place, where there is one."""
    given = os.environ.get(CONVERTED_VARIABLE, "").strip()
    return Path(given, f"seatrial-{run}", directory.name, CONVERTED_FOLDER) if given else directory / CONVERTED_FOLDER


CHECKED = ("nemo_rl", "megatron.core", "megatron.bridge")
STEP_OVERRIDES = ("grpo.max_num_steps=", "sft.max_num_steps=")
SAVING, CHECKPOINTS = "checkpointing.enabled", "checkpoints"
FUNCTIONAL = "seatrial.instruments.nemo_rl.run_functional"


def phases(level: Level, context: Context, directory: Path) -> tuple[Phase, ...]:
    """The import check, then each call of a script."""
    calls = variants(level.name, context)
    return (_imports(calls, context, directory), *(training(call, context, directory) for call in calls))


def _imports(calls: Sequence[ScriptCall], context: Context, directory: Path) -> Phase:
    place = nemo_checkout.checkout_of(context) or Path()
    said = {
        call.name: {"script": call.script, "expressions": script_reader.assertions_in(place / call.script)}
        for call in calls
        if call.assertions
    }
    return Phase(
        name="imports",
        argv=(
            *(str(context.python), "-m", "seatrial.instruments.nemo_rl.nemo_process"),
            *("--out", str(directory), "--phase-dir", str(directory / "imports"), "--checkout", str(place)),
            *("--packages", ",".join(CHECKED), "--claims", json.dumps({call.name: call.claims for call in calls})),
            *("--assertions", json.dumps(said)),
        ),
        env=nemo_checkout.witness_variables(context, directory),
        processes=("imports-driver", "imports-worker"),
        cwd=place,
    )


def training(call: ScriptCall, context: Context, directory: Path) -> Phase:
    place = nemo_checkout.checkout_of(context) or Path()
    return Phase(
        name=call.name,
        argv=(
            *(str(context.python), "-m", FUNCTIONAL, "--checkout", str(place), "--script", call.script),
            *("--out", str(directory / call.name), *_sources(context), "--", *words(call, context, directory)),
        ),
        env={**call.variables, **nemo_checkout.witness_variables(context, directory), **_unbuffered(), **_converted(context, directory)},
        steps=last_count(context.arguments, STEP_OVERRIDES, call.steps),
        processes=("driver", "worker"),
        cwd=place,
    )


def words(call: ScriptCall, context: Context, directory: Path | None = None) -> tuple[str, ...]:
    """What the script is called with, in a level directory. Checkpoints go to a place of their own there: a script's own may
    hold those of a run that was killed, from which NeMo-RL would go on."""
    saves = call.claims.get(SAVING) is True
    place = (f"checkpointing.checkpoint_dir={directory / call.name / CHECKPOINTS}",) if directory and saves else ()
    return (*call.overrides, *place, *context.arguments)


def _unbuffered() -> dict[str, str]:
    """Lines must arrive when they are written: a stall would be seen where there is none."""
    return {"PYTHONUNBUFFERED": "1", "RAY_DEDUP_LOGS": "0", "HYDRA_FULL_ERROR": "1"}


def _converted(context: Context, directory: Path) -> dict[str, str]:
    """The Bridge under test must convert the model itself, not take what an earlier run left in the user's cache."""
    return {CONVERTED_VARIABLE: str(converted_models(directory, context.run_dir.name))}


def _sources(context: Context) -> tuple[str, ...]:
    """Where the Bridge under test is put, and where its helpers are built."""
    made: list[str] = []
    for repo in context.changes:
        if repo.synced:
            made += ["--sync", f"{repo.path}={repo.synced}"]
    if context.options.get("helpers") == "local":
        made += [word for core in nemo_checkout.bundled_core(context)[:1] for word in ("--helpers", str(core))]
    return tuple(made)
