"""What each level runs on GPUs: verl's wrapper with its variables and overrides, model and data, an architecture's script."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from seatrial.core.errors import FindingCode, code_of
from seatrial.core.guarded import parse_json, parse_step
from seatrial.core.loop import Context, Phase, finding
from seatrial.core.records import Finding
from seatrial.core.specs import Level
from seatrial.core.verdict import Boundary
from seatrial.loops.host_findings import KINDS, ModelUse, cache_room, config_is_kind, hub_snapshot
from seatrial.loops.host_findings import model_findings as file_findings
from seatrial.loops.hydra import KEYS, Sizes, last_count
from seatrial.loops.verl import verl_checkout
from seatrial.loops.verl.verl_checkout import WRAPPER, checkout_of, engine, extras, launcher
from seatrial.runtime.command import NoAnswerError, run_command

GPUS = 8
ROLES = ("actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic")


@dataclass(frozen=True, slots=True)
class Variant:
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
    return int(context.options.get("gpus", GPUS))


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


MAGIC = b"PAR1"
BATCH = "data.train_batch_size"
BATCH_ROWS = 16
"""Rows of a training batch, in the wrapper and in the scripts of level 4."""
COUNT_ROWS = "import sys, pyarrow.parquet as p; print(p.read_metadata(sys.argv[1]).num_rows)"
COUNT_SECONDS = 60
BUILD = "make the environment of the verl checkout (uv sync), or --python PATH"


def _places(model: str) -> list[Path]:
    """Where a model may be, in order. A path is no name: it is looked up nowhere else."""
    if model.startswith(("/", ".", "~")):
        return [Path(model).expanduser()]
    return [Path(model).expanduser(), Path.home() / "models" / model, hub_snapshot(model)]


def model_directory(model: str) -> Path | None:
    return next((place.absolute() for place in _places(model) if (place / "config.json").is_file()), None)


def model_path(context: Context) -> str:
    """What is passed on as the model: its directory, or the name as given when there is none."""
    return str(model_directory(context.model) or context.model)


def model_settings(context: Context) -> dict[str, Any]:
    """config.json of the model that is trained; empty when it cannot be read."""
    named = context.options.get("model_config")
    directory = model_directory(context.model)
    path = Path(named) if named else directory / "config.json" if directory else None
    try:
        read = parse_json(path.read_text(encoding="utf-8")) if path else {}
    except (OSError, ValueError):
        return {}
    return read if isinstance(read, dict) else {}


def is_kind(context: Context, kind: str) -> bool:
    """Whether the model is of an architecture, by its own config.json."""
    return config_is_kind(model_settings(context), kind)


def data_files(context: Context, dataset: str = "gsm8k") -> tuple[str, str]:
    """Training and validation files: as named, or where verl's own scripts put them."""
    home = Path.home() / "data" / dataset
    given = context.options
    train, val = (given.get("train_files") or home / "train.parquet"), (given.get("val_files") or home / "test.parquet")
    return str(Path(train).expanduser().absolute()), str(Path(val).expanduser().absolute())


def gpu_model_findings(context: Context) -> tuple[Finding, ...]:
    made = list(_model_findings_of(context))
    if context.options.get("model_config"):
        made.append(_dummy(Path(str(context.options["model_config"]))))
    if context.options.get("reward_model"):
        there = (Path(str(context.options["reward_model"])) / "config.json").is_file()
        message = f"{context.options['reward_model']}: {'found' if there else 'no reward model: config.json is missing'}"
        fix = "name a local directory, or leave reward_model out for the rule reward"
        made.append(finding("reward model", there, message, fix, Boundary.REWARD))
    made.append(cache_room())
    return tuple(made)


def _model_findings_of(context: Context) -> tuple[Finding, ...]:
    directory = model_directory(context.model)
    if directory is None:
        given = Path(context.model).expanduser()
        if given.is_absolute() or given.is_dir():
            why = "no config.json" if given.is_dir() else "no such directory"
            fix = "--model with a directory that holds config.json, tokenizer and weights"
            return (_data("model", False, f"{given}: {why}", fix, FindingCode.MODEL_MISSING),)
        looked = ", ".join(str(place) for place in _places(context.model))
        fix = (
            f"hf download {context.model} --local-dir ~/models/{context.model}" if "/" in context.model.strip("/") else "--model DIRECTORY"
        )
        return (_data("model", False, f"{context.model}: no config.json at {looked}", fix, FindingCode.MODEL_MISSING),)
    # A dummy model has the tokenizer of this directory, and nothing else.
    written = any("custom_chat_template" in word for word in context.arguments)
    use = ModelUse(build=BUILD, weights="model_config" not in context.options, template=not written)
    return file_findings(directory, context, use)


def _dummy(config: Path) -> Finding:
    if not config.is_file():
        return _data("dummy model", False, f"{config}: no such config.json", "--set options.model_config=FILE of the same architecture")
    return _data("dummy model", True, f"random weights after {config}, made anew for each level")


def data_findings(context: Context, dataset: str, column: str = "") -> tuple[Finding, ...]:
    """Both files are parquet, with this column if one is named, and there is a whole batch to train on."""
    script = f"examples/data_preprocess/{dataset}.py"
    made = []
    train, val = data_files(context, dataset)
    for file in (train, val):
        wrong = _wrong_parquet(Path(file), column)
        few = _too_few(file, context) if file == train and wrong is None else None
        make = (
            "--set options.train_files=FILE with a whole batch"
            if few
            else f"cd {checkout_of(context) or 'VERL-CHECKOUT'} && python3 {script} --local_save_dir {Path(file).parent}"
        )
        made.append(_data("data", not (wrong or few), f"{file}: {wrong or few or 'parquet'}", make if wrong or few else ""))
    return tuple(made)


def _wrong_parquet(path: Path, column: str) -> str | None:
    """What is wrong with a file. It names its columns in its footer, whose length stands before the last magic word."""
    if not path.is_file():
        return "no such file"
    try:
        size = path.stat().st_size
        with path.open("rb") as stream:
            start = stream.read(len(MAGIC))
            stream.seek(max(0, size - 8))
            length, end = int.from_bytes(stream.read(4), "little"), stream.read(len(MAGIC))
            stream.seek(max(0, size - 8 - length))
            footer = stream.read(length)
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    if not start == end == MAGIC or size < 12:
        return "not a whole parquet file (PAR1 at both ends)"
    return None if column.encode() in footer else f"has no column {column!r}"


def _too_few(file: str, context: Context) -> str | None:
    """Fewer rows than a batch, with which verl's loader is empty; None also where the loop's interpreter cannot count them."""
    least = last_count(context.arguments, (f"{BATCH}=",), BATCH_ROWS)
    try:
        done = run_command([context.python, "-I", "-c", COUNT_ROWS, file], COUNT_SECONDS, cwd=Path(file).parent, own_session=True)
    except NoAnswerError:
        return None
    rows = least if done.code else parse_step(done.out.strip())
    if rows is None:
        return None
    return f"has {rows} rows, fewer than one batch of {least}" if rows < least else None


def _data(name: str, ok: bool, message: str, fix: str = "", code: FindingCode | None = None) -> Finding:
    return Finding(name=name, ok=ok, boundary=Boundary.DATA, message=message, fix=fix, code=code or code_of(name))


ARCHITECTURES = ("moe", "vlm", "mtp", "qat")
VLM_SCRIPT = "examples/grpo_trainer/run_qwen3_vl_8b_megatron.sh"
MTP_SCRIPT = "examples/mtp_trainer/run_mimo_7b_mtp_megatron.sh"
ENGINES = {VLM_SCRIPT: "vllm", MTP_SCRIPT: "sglang"}
"""What each script asks uv for."""


def why_no_architecture(options: Mapping[str, str]) -> str | None:
    if "architecture" not in options:
        return f"say which architecture is meant: --set options.architecture={'|'.join(ARCHITECTURES)}"
    kind = options["architecture"]
    if kind == "moe":
        return None if int(options.get("gpus", GPUS)) > 1 else "expert parallelism needs at least 2 GPUs"
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


def architecture_findings(context: Context) -> tuple[Finding, ...]:
    """The data, and for level 4 that model and data are what the architecture is about: else it would prove nothing."""
    kind = str(context.options.get("architecture")) if "architecture" in context.levels else ""
    made = data_findings(context, "geo3k", "images") if kind == "vlm" else data_findings(context, "gsm8k")
    if kind and not is_kind(context, kind):
        message = f"architecture = {kind}, and config.json of the model has none of {', '.join(KINDS[kind])}"
        return (*made, Finding(name="model", ok=False, boundary=Boundary.CONFIG, message=message, fix=f"--model with a {kind} model"))
    return made


def example_script(context: Context) -> Variant:
    mtp = context.options.get("architecture") == "mtp"
    script = MTP_SCRIPT if mtp else VLM_SCRIPT
    sizes = Sizes(tp=int(context.options.get("tp", 2)), pp=int(context.options.get("pp", 1)))
    train, val = data_files(context, "gsm8k" if mtp else "geo3k")
    path = model_path(context)
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


LORA_RANK = 4
LEARNING_STEPS = (20, 100)
FUSION = tuple(f"{role}.megatron.override_transformer_config.gradient_accumulation_fusion" for role in ROLES)
"""Must be off with Megatron-FSDP."""


def variants(level: str, context: Context, directory: Path) -> tuple[Variant, ...]:
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
                return (example_script(context),)
            sizes = Sizes(ep=int(context.options.get("ep", 2)), etp=int(context.options.get("etp", 1)))
            return (_wrapped("run", context, directory, sizes=sizes),)
        case "learning":
            return (_learning(context, directory),)
    raise AssertionError(f"level {level} has no variants")


def stress_sizes(context: Context) -> Sizes:
    """As asked for; else two of each, as far as the GPUs reach."""
    count, given = gpus(context), context.options
    tp = int(given.get("tp", 2))
    pp = int(given.get("pp", 2 if count % (2 * tp) == 0 else 1))
    cp = int(given.get("cp", 2 if count % (2 * tp * pp) == 0 else 1))
    ep = int(given.get("ep", 2 if is_kind(context, "moe") and count % (2 * pp) == 0 else 1))
    return Sizes(tp, pp, cp, ep, int(given.get("etp", 1)))


def _save_and_resume(context: Context, directory: Path) -> tuple[Variant, ...]:
    """Two processes that share one directory of checkpoints: below the level, so no other run's can be in it."""
    place = directory / "save" / "checkpoints"
    made = (_wrapped("save", context, directory, save=1), _wrapped("resume", context, directory, save=1, steps=2, resume="auto"))
    exact = {"trainer.default_local_dir": str(place)}
    return tuple(
        replace(item, checkpoints=place, claims={**item.claims, **exact, "trainer.total_training_steps": item.steps}) for item in made
    )


def _learning(context: Context, directory: Path) -> Variant:
    """More steps, in a fixed order of the data, validated at the start and at the end."""
    steps = int(context.options.get("steps", LEARNING_STEPS[0]))
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
    train, val = data_files(context)
    path, dummy = _model(context, directory)
    variables = {
        **common_variables(context),
        **{"MODEL_ID": _name(context), "MODEL_PATH": model_path(context), "TRAIN_FILES": train, "VAL_FILES": val},
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
    path = model_path(context)
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


PROCESSES = ("driver", "worker")
CHECKED = ("verl", "megatron.core", "megatron.bridge")
"""Packages that driver and workers must find at the same place."""
RAY_ENV = "++ray_kwargs.ray_init.runtime_env.env_vars."


def phases(level: Level, context: Context, directory: Path) -> tuple[Phase, ...]:
    calls = variants(level.name, context, directory)
    return (_imports(calls, context, directory), *(training(call, context, directory) for call in calls))


def _imports(calls: Sequence[Variant], context: Context, directory: Path) -> Phase:
    said = json.dumps({call.name: call.claims for call in calls})
    worker = verl_checkout.worker_command(context, calls[0].extras)
    variables = verl_checkout.witness_variables(context, directory)
    del variables["VERL_USE_EXTERNAL_MODULES"]  # the witness speaks for training only
    return Phase(
        name="imports",
        argv=(
            *(*verl_checkout.start_words(context, calls[0].extras), "-m", "seatrial.instruments.ray_imports"),
            *("--out", str(directory), "--phase-dir", str(directory / "imports"), "--packages", ",".join(CHECKED), "--claims", said),
            *(("--py-executable", worker) if worker else ()),
        ),
        env=variables,
        processes=("imports-driver", "imports-worker"),
        cwd=verl_checkout.checkout_of(context),
    )


def training(call: Variant, context: Context, directory: Path) -> Phase:
    own = _inside(call, context, directory)
    return Phase(
        name=call.name,
        argv=("bash", call.script, *_overrides(call, context, directory, own), *context.arguments),
        env={**call.variables, **own},
        steps=last_count(context.arguments, ("trainer.total_training_steps=",), call.steps),
        processes=PROCESSES,
        cwd=verl_checkout.checkout_of(context),
    )


def _inside(call: Variant, context: Context, directory: Path) -> dict[str, str]:
    """Variables that every process of the run must see, on whichever node it is."""
    plugins = tuple(name for name in os.environ.get("VERL_USE_EXTERNAL_MODULES", "").split(",") if name)
    made = verl_checkout.witness_variables(context, directory, plugins)
    made["VERL_FILE_LOGGER_PATH"] = str(directory / call.name / "metrics.jsonl")
    return {key: value for key, value in made.items() if value}


def _overrides(call: Variant, context: Context, directory: Path, inside: Mapping[str, str]) -> tuple[str, ...]:
    """What is appended to the script's own settings; Hydra takes the last one. The wrapper splits them at white space."""
    place = directory / call.name
    everywhere = {"PYTHONPATH": verl_checkout.python_path(context), **inside}
    return (
        *("trainer.logger=[console,file]", f"hydra.run.dir={place / 'hydra'}", "global_profiler.steps=null"),
        *(f"trainer.default_local_dir={call.checkpoints or place / 'checkpoints'}", f"trainer.rollout_data_dir={place / 'rollouts'}"),
        *(f"{RAY_ENV}{key}='{value}'" for key, value in everywhere.items()),
        *(() if context.options.get("reward_model") else ("reward.reward_model.enable=False",)),
        *call.overrides,
    )
