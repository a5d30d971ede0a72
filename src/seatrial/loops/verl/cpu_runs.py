"""verl on this machine's CPU: the phases of a level, and whether the changes can be imported in its environment."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from seatrial.checks.step import FILE
from seatrial.core.guarded import BadValue, parse_json
from seatrial.core.loop import Context, Phase, finding, gather
from seatrial.core.records import CheckResult, Finding
from seatrial.core.records import replace as replace_record
from seatrial.core.series import Metrics
from seatrial.core.specs import Level
from seatrial.core.verdict import Boundary
from seatrial.instruments.verl.verl_process import MARK, PARTS, RECORD_VARIABLE
from seatrial.loops.host_findings import ModelUse, model_findings
from seatrial.loops.hydra import is_override
from seatrial.loops.verl.cpu_proofs import CONTROL_STEPS, prove
from seatrial.loops.verl.cpu_settings import GRPO, GRPO_LOSS, LEARN, MEGATRON, NO_KL, NO_SAVE, NO_TEST, PPO, RECORDED, SETTINGS
from seatrial.loops.verl.verl_checkout import import_path, witness_variables
from seatrial.runtime.command import NoAnswerError, run_command

INSTRUMENTS = Path(__file__).parents[2] / "instruments"
IMPORT_CHECK = "seatrial.instruments.verl.verl_process"
SECONDS = 90
"""A cold import of Megatron-Bridge takes 10 s on two cores."""
PACKAGES = {MEGATRON: ("megatron.core", "megatron.bridge", "verl")}
"""What is imported with each engine; with FSDP2 Megatron is hidden."""
FITS = {"megatron.bridge": "add --change megatron=PATH of the Megatron-LM it was written for, or use a Bridge that fits (0.5 and 0.6 do)"}


def import_findings(context: Context, strategy: str, shim: str) -> tuple[Finding, ...]:
    """One finding over all packages under test, or none when there is nothing to import."""
    known = PACKAGES.get(strategy, ("verl",))
    packages = [name for name in known if any(name in repo.packages for repo in context.changes)]
    if not packages:
        return ()
    names = ", ".join(packages)
    kept = {key: value for key, value in os.environ.items() if key != "VERL_USE_EXTERNAL_MODULES"}
    own = {"PYTHONSAFEPATH": "1", "PYTHONDONTWRITEBYTECODE": "1", "TORCHDYNAMO_DISABLE": "1"}
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "0"}
    argv = [str(context.python), "-m", IMPORT_CHECK, shim, *packages]
    try:
        with tempfile.TemporaryDirectory(prefix="seatrial-imports-") as folder:
            path = os.pathsep.join((*_roots(context), str(_staged(Path(folder)))))
            done = run_command(argv, SECONDS, cwd=Path(folder), env={**kept, **own, **offline, "PYTHONPATH": path}, own_session=True)
    except NoAnswerError as error:
        return (_import_finding(f"{names}: not tried, the level will show it: {error}"),)
    answers = [line.removeprefix(MARK) for line in done.out.splitlines() if line.startswith(MARK)]
    if done.code or not answers:
        return (_import_finding(f"{names}: the import ends with {done.last_words[:300]}; the level will judge it"),)
    try:
        answer: dict[str, str] = parse_json(answers[-1])
    except BadValue as error:
        return (_import_finding(f"{names}: what the import said cannot be read: {error}; the level will judge it"),)
    return (_judge(answer, context) if answer else _import_finding(f"{names}: can be imported"),)


def _roots(context: Context) -> tuple[str, ...]:
    return (*context.import_path(), *import_path(context))


def _staged(place: Path) -> Path:
    """Our modules alone, as they are staged for a run: `doctor` has no run directory, and a loop must not see Seatrial's packages."""
    within = place / "seatrial" / "instruments"
    within.mkdir(parents=True)
    for package in (within, within.parent):
        (package / "__init__.py").touch()
    for name in ("megatron", "verl", "facts.py"):  # verl's shims for Megatron are Megatron's own
        (within / name).symlink_to(INSTRUMENTS / name)
    return place


def _judge(answer: dict[str, str], context: Context) -> Finding:
    package, missing, said = answer["package"], answer["missing"], answer["said"]
    if not missing or _provided(missing, context):
        return _import_finding(f"{package}: the import ends with {said[:300]}; the level will judge it")
    wanted = missing if said.startswith("No module named") else f"another {missing} ({said[:200]})"
    core = f" (megatron-core {answer['core']})" if missing.startswith("megatron.") and answer["core"] else ""
    message = f"this {package} needs {wanted}, which the environment does not have{core}"
    fix = FITS.get(package, f"use a {package} that fits the pinned environment")
    return _import_finding(message, f"{fix}, or run on GPUs")


def _provided(module: str, context: Context) -> bool:
    """Whether a change is where this module should be: `megatron` itself is shared by several repositories."""
    parts = module.split(".")
    near = Path(*parts[: 2 if parts[0] == "megatron" else 1])
    places = [Path(root) / near for root in _roots(context)]
    return any(place.is_dir() or place.with_suffix(".py").is_file() for place in places)


def _import_finding(message: str, fix: str = "") -> Finding:
    return Finding(name="imports", ok=not fix, message=message, fix=fix)


DRIVE = "seatrial.instruments.verl"
LEARNING_STEPS = (20, 100)
OWNED = (
    *("actor_rollout_ref.model.", "actor_rollout_ref.ref.", "actor_rollout_ref.rollout.", "critic.", "data.", "hydra.", "ray_kwargs."),
    *("reward.", "trainer.", "transfer_queue.", "model_engine", "algorithm.adv_estimator", "actor_rollout_ref.actor.strategy"),
    *(
        f"actor_rollout_ref.actor.{name}"
        for name in ("checkpoint", "fsdp_config", "megatron", "optim", "ppo_epochs", "ppo_mini_batch_size", "use_kl_loss")
    ),
)
"""Beginnings of keys that the proofs rest on; the algorithm's own settings are free."""
ON_GPUS = (
    *("tp", "pp", "cp", "ep", "etp", "engine", "launcher", "gpus"),
    *("train_files", "val_files", "reward_model", "model_config", "architecture"),
)
"""Options that only the GPU side reads."""


class Cpu:
    """One side of the loop, with the engine of its choice. The contracts are those of the loop's methods of the same name."""

    DEFAULT_MODEL = "tiny-dense"

    def __init__(self, strategy: str) -> None:
        self.strategy, self.settings = strategy, SETTINGS[strategy]

    def levels(self, ladder: Sequence[Level], options: Mapping[str, str]) -> tuple[Level, ...]:
        steps = int(options.get("steps", LEARNING_STEPS[0]))
        return tuple(replace_record(level, **{"steps": steps} if level.name == "learning" else {}) for level in ladder)

    def phases(self, level: Level, context: Context, directory: Path) -> tuple[Phase, ...]:
        make, steps = _CpuPhaseBuilder(self, context, directory), level.steps or 0
        if level.name == "smoke":
            return self._smoke(make, steps)
        if level.name == "save-resume":
            return self._save_resume(make, steps)
        if level.name == "learning":
            return self._learning(make, steps)
        raise AssertionError(f"level {level.number} has no phases")

    def _smoke(self, make: _CpuPhaseBuilder, steps: int) -> tuple[Phase, ...]:
        # verl 0.9.1 leaves `no_lora_adapter` in the batch when the actor without its adapters is the reference, and the critic then
        # fails (it has no adapters) or works without its own. So there is no reference beside adapters and a critic here.
        own = self.settings
        full = (*GRPO, *own.rates(own.rate), *NO_SAVE, *NO_TEST)
        lora = (*PPO, *NO_KL, *own.actor_lora, *own.critic_lora, *own.rates(own.lora_rate), *NO_SAVE, *NO_TEST)
        grpo, grpo_shadow = make.proven("grpo", steps, (*full, *GRPO_LOSS))
        ppo, ppo_shadow = make.proven("ppo", steps, lora)
        return (grpo, ppo, *grpo_shadow, *ppo_shadow)

    def _save_resume(self, make: _CpuPhaseBuilder, steps: int) -> tuple[Phase, ...]:
        # Megatron: adapters of the actor, all weights of the critic. Its critic needs untied embeddings, or it loses its head.
        own, middle = self.settings, steps // 2
        megatron = self.strategy == MEGATRON
        kind = (*NO_KL, *own.actor_lora, *own.rates(own.lora_rate)) if megatron else (*GRPO, *own.rates(own.rate))
        words = (*kind, *PPO, *own.schedule, *NO_TEST, f"trainer.save_freq={middle}")
        untied = ("--untied",) if megatron else ()
        place = make.directory / "full" / "checkpoints" / f"global_step_{middle}"
        return (
            make.phase("full", steps, (*words, "trainer.resume_mode=disable"), untied),
            make.phase("resumed", steps, (*words, "trainer.resume_mode=resume_path"), (*untied, "--resume-from", str(place))),
        )

    def _learning(self, make: _CpuPhaseBuilder, steps: int) -> tuple[Phase, ...]:
        own = self.settings
        words = (*GRPO, *LEARN, *NO_SAVE, "trainer.val_before_train=True")
        idle, rates = (*own.rates("0"), f"trainer.test_freq={CONTROL_STEPS}"), (*own.rates(own.learning_rate), f"trainer.test_freq={steps}")
        other = str(make.directory / "control")
        return (
            make.phase("control", CONTROL_STEPS, (*words, *idle), ("--signal",)),
            make.phase("learn", steps, (*words, *rates), ("--signal", "--control", other)),
        )

    def proofs(self, level: Level, directory: Path, metrics: Metrics) -> tuple[CheckResult, ...]:
        return prove(level, directory, metrics, self.strategy)

    def plugins(self) -> tuple[str, ...]:
        """Modules that every process of verl loads, in this order: what makes Megatron run, or hides it, before whatever imports it."""
        return tuple(f"{DRIVE}.{name}" for name in (self._shim(), "cpu_platform"))

    def _shim(self) -> str:
        return "megatron_on_cpu" if self.strategy == MEGATRON else "without_megatron"

    def findings(self, context: Context) -> tuple[Finding, ...]:
        """What is given has an effect and does not touch what the proofs rest on; the model is there; the changes can be imported."""
        idle = [
            finding("options", False, f"options.{name} has no effect on a CPU", "leave it out", Boundary.CONFIG)
            for name in ON_GPUS
            if name in context.options
        ]
        return gather(
            lambda: filter(None, map(_argument, context.arguments)),
            lambda: idle,
            lambda: import_findings(context, self.strategy, self._shim()),
            lambda: self._model(context),
        )

    def _model(self, context: Context) -> tuple[Finding, ...]:
        if context.model == self.DEFAULT_MODEL:
            return (finding("model", True, f"{context.model} is made locally", boundary=Boundary.DATA),)
        use = ModelUse(build="seatrial env build verl-cpu", template=True, own=True)
        return model_findings(Path(context.model), context, use)

    def limitations(self, level: Level, context: Context) -> tuple[str, ...]:
        megatron = (
            "Megatron-Core ran its own local layers and torch's AdamW with one process over gloo on a CPU: "
            "no Transformer Engine, no CUDA kernel, no parallelism"
        )
        fsdp2 = "the engine was FSDP2 with one process on a CPU in full precision: not Megatron, no sharding across ranks"
        made = [
            megatron if self.strategy == MEGATRON else fsdp2,
            "a transformers model in its own process generated: neither vLLM nor SGLang",
            "rewards came from a rule: no reward model was served",
        ]
        if context.model != self.DEFAULT_MODEL and level.name == "smoke":
            made.append("the steps of a given model are not recomputed: only those of the tiny one are")
        if context.model == self.DEFAULT_MODEL:
            made.append("a tiny Qwen2 with random weights: not the model under test")
        elif self.strategy == MEGATRON:
            made.append(
                "unless its tensors are laid out as Qwen2's, what was exported was compared with its files and by probabilities only"
            )
        return tuple(made)


class _CpuPhaseBuilder:
    def __init__(self, side: Cpu, context: Context, directory: Path) -> None:
        self.side, self.context, self.directory = side, context, directory

    def phase(self, name: str, steps: int, overrides: tuple[str, ...], options: tuple[str, ...] = ()) -> Phase:
        context, out = self.context, self.directory / name
        fixed = ("--out", str(out), "--model", context.model, "--models", str(context.run_dir / "models"), *options)
        last = (*self.side.settings.common, *overrides, f"trainer.total_training_steps={steps}", *context.arguments)
        return Phase(
            name=name,
            argv=(str(context.python), "-m", f"{DRIVE}.train", *fixed, "--", *last),
            env=self._environment(out),
            steps=steps,
            processes=("driver", "worker"),
        )

    def proven(self, name: str, steps: int, overrides: tuple[str, ...]) -> tuple[Phase, tuple[Phase, ...]]:
        """A recorded run, and the shadow that recomputes it: with the same words, and without the change. A given model has none."""
        run = self.phase(name, steps, (*overrides, *self.side.settings.proving), RECORDED)
        if self.context.model != self.side.DEFAULT_MODEL:
            return run, ()
        run = replace(run, env={**run.env, RECORD_VARIABLE: str(self.directory / name / PARTS)})
        words = run.argv[run.argv.index(f"{DRIVE}.train") + 1 :]
        argv = (str(self.context.python), "-m", f"{DRIVE}.shadow", "--shadow-out", str(self.directory / name / FILE), *words)
        kept = {key: value for key, value in run.env.items() if key.startswith(("HF_", "TRANSFORMERS", "TOKENIZERS", "OMP", "PYTHON"))}
        return run, (Phase(name=f"shadow-{name}", argv=argv, env=kept, processes=(), beside=True),)

    def _environment(self, out: Path) -> dict[str, str]:
        fault = self.context.options.get("fault")
        return {
            **witness_variables(self.context, self.directory, self.side.plugins()),
            "SEATRIAL_FACTS": str(out / "facts.jsonl"),
            "SEATRIAL_ENGINE": self.side.settings.engine,
            "VERL_FILE_LOGGER_PATH": str(out / "metrics.jsonl"),
            **({"SEATRIAL_FAULT": str(fault)} if fault else {}),
            **{"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "TOKENIZERS_PARALLELISM": "false"},
            **{"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0", "PYTHONUNBUFFERED": "1", "CUDA_VISIBLE_DEVICES": "0"},
            **{"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0"},
            # A virtual machine may announce AMX without allowing it: bf16 would end in an illegal instruction.
            **({"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"} if "ONEDNN_MAX_CPU_ISA" not in os.environ else {}),
            # Megatron compiles small functions, which takes longer here than all they do.
            **({"TORCHDYNAMO_DISABLE": "1"} if self.side.strategy == MEGATRON else {}),
        }


def _argument(word: str) -> Finding | None:
    key = word.lstrip("+~").partition("=")[0]
    if not is_override(word):
        return finding("arguments", False, f"{word!r} is no Hydra override", "write KEY=VALUE", Boundary.CONFIG)
    locked = next((beginning for beginning in OWNED if key.startswith(beginning)), None)
    if locked is None:
        return None
    message = f"{key} cannot be overridden on a CPU: the proofs rest on what begins with {locked}"
    return finding("arguments", False, message, f"leave {key} out", Boundary.CONFIG)
