"""The embedded loop: TRL's GRPO trainer, on CPU or CUDA, with tiny models made locally or a user's own."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

from seatrial.checks.step import level_limitations
from seatrial.core.guarded import parse_step
from seatrial.core.loop import Context, Fault, Loop, Measures, Option, Phase, finding, gather
from seatrial.core.records import CheckResult, Finding
from seatrial.core.series import Metrics
from seatrial.core.specs import Level
from seatrial.core.verdict import Boundary
from seatrial.instruments.trl.fault_names import FAULTS
from seatrial.loops import VLLM_CPU
from seatrial.loops.host_findings import ModelUse, model_findings
from seatrial.loops.trl import trl_metrics, trl_proofs
from seatrial.runtime.command import NoAnswerError, run_command

DRIVE = "seatrial.instruments.trl"
SEED = "42"
SEEDS = 5
COMMON = (
    *("--per_device_train_batch_size", "64", "--num_generations", "8", "--max_completion_length", "8"),
    *("--learning_rate", "1e-3", "--lr_scheduler_type", "constant", "--logging_steps", "1", "--save_strategy", "no"),
    *("--report_to", "none", "--bf16", "false", "--gradient_checkpointing", "false", "--disable_tqdm", "true"),
    *("--dataloader_pin_memory", "false", "--seed", SEED, "--logging_nan_inf_filter", "false"),
)
REUSED = 2
"""Optimizer steps that one generation serves: a checkpoint lies between two generations."""
PROVING = (
    *("--per_device_train_batch_size", "12", "--gradient_accumulation_steps", "3", "--num_generations", "4"),
    *("--num_iterations", str(REUSED)),
    *("--temperature", "0.8", "--top_k", "40", "--top_p", "0.95", "--min_p", "0.05", "--repetition_penalty", "1.1"),
    *("--reward_weights", "1.0", "0.5", "--beta", "0.1", "--epsilon", "0.05", "--epsilon_high", "0.08"),
    *("--learning_rate", "2e-3", "--lr_scheduler_type", "cosine", "--warmup_steps", "2", "--weight_decay", "0.1"),
    *("--adam_beta1", "0.8", "--adam_beta2", "0.95", "--adam_epsilon", "1e-6", "--max_grad_norm", "1.5"),
)
"""Settings under which faults show: none of them is the value that makes its formula have no effect."""
PLAIN = ("--temperature", "1.0", "--top_k", "0", "--top_p", "1.0", "--min_p", "0.0", "--repetition_penalty", "1.0")
"""For samplers of ours, which draw from the model's own probabilities."""
EACH = ("--num_iterations", "1", "--warmup_steps", "0")
"""One refit per step, each with new weights: warm-up begins with a learning rate of zero."""
CORRECTED = ("--use_vllm", "true", "--vllm_importance_sampling_clip_max", "1.25", "--vllm_importance_sampling_clip_min", "0.8")
"""TRL's own generation: the correction for the server's log-probabilities bites on either side."""
COLDER = ("--temperature", "0.8")
"""With top-k and its like, the generator's probabilities are so much larger than the policy's that whole sequences are left out."""
BY_TOKEN = ("--vllm_importance_sampling_mode", "token_truncate")
SYNCED = ("--sync_ref_model", "true", "--ref_model_sync_steps", "3", "--ref_model_mixup_alpha", "0.5")
RECORDED = ("--record", "--prompts", "30", "--rewards", "patchy_share,digit_share")
"""Prompts for three generations and a rest that is left out: a fourth generation begins the second epoch."""
PICTURED = ("--record", "--prompts", "30", "--images")
SEPARATE = {"generator": "generator", "vllm": "vllm", "synced": "vllm"}
"""Processes that generate for the trainer, by the value of --rollouts."""
MADE = ("tiny-dense", "tiny-untied", "tiny-moe", "tiny-vlm")
UNTIED = "tiny-untied"
"""Of level 3, unless a model is given: vLLM's CPU build cannot refit tied embeddings."""


EVERY = "every level"
REUSE = "refits and rewards are counted per step, and a resume begins with a generation"
OWNED: dict[str, tuple[str, str]] = {
    "output_dir": (EVERY, "the run directory is where the evidence is"),
    "logging_steps": (EVERY, "every step must be logged"),
    "logging_strategy": (EVERY, "every step must be logged"),
    "logging_nan_inf_filter": (EVERY, "NaN must be seen"),
    "resume_from_checkpoint": (EVERY, "level 1 resumes by itself"),
    "save_strategy": ("lora-resume", "the checkpoint in the middle is what is resumed from"),
    "save_only_model": ("lora-resume", "optimizer and random state are part of the claim"),
    "ignore_data_skip": ("lora-resume", "the resumed run must go on with the data where the first stopped"),
    "save_steps": ("lora-resume", "the checkpoint in the middle is what is resumed from"),
    "beta": ("smoke lora-resume", "the reference model is part of the claim"),
    "num_iterations": ("lora-resume refit vllm learning", REUSE),
    "steps_per_generation": ("lora-resume refit vllm learning", REUSE),
    "reward_weights": ("architectures learning", "pictures and learning have one reward"),
    "per_device_train_batch_size": ("ranks", "two ranks must take the rows of one"),
    "neftune_noise_alpha": (EVERY, "noise in the policy's embeddings hides whether its reference starts as the policy"),
}
LEAST_STEPS = {"smoke": 2, "lora-resume": 3, "refit": 3, "vllm": 3, "ranks": 2, "architectures": 2, "learning": 8}
_bad = partial(finding, "arguments", False, boundary=Boundary.CONFIG)


def given_argument(arguments: Sequence[str]) -> dict[str, str]:
    """Names and values of `--name value` and `--name=value`; TRL's parser takes dashes for underscores, and `--no_name`."""
    found = {}
    for word, following in zip(arguments, (*arguments[1:], ""), strict=False):
        name, separator, value = word.partition("=")
        if name.startswith("--"):
            found[name[2:].replace("-", "_").removeprefix("no_")] = value if separator else following
    return found


def max_steps(arguments: Sequence[str]) -> int | None:
    return parse_step(given_argument(arguments).get("max_steps", ""))


def float_of(text: str) -> float:
    """A number; what is none is TRL's to refuse, and counts as one that is not zero."""
    try:
        return float(text)
    except ValueError:
        return 1.0


def argument_findings(levels: Sequence[str], arguments: Sequence[str]) -> tuple[Finding, ...]:
    made = []
    for name in given_argument(arguments):
        owner, why = OWNED.get(name, ("", ""))
        if owner == EVERY or set(owner.split()) & set(levels):
            made.append(_bad(f"--{name} is set by the level: {why}", f"leave --{name} out"))
    if given_argument(arguments).get("loss_type") == "bnpo" and "ranks" in levels:
        made.append(_bad("--loss_type bnpo averages over each rank's own tokens: two ranks do not follow one", "leave level 4 out"))
    if "ranks" in levels and float_of(given_argument(arguments).get("entropy_coef", "0")) != 0:
        made.append(_bad("--entropy_coef averages over each rank's own tokens: two ranks do not follow one", "leave level 4 out"))
    steps = max_steps(arguments)
    least = max((LEAST_STEPS.get(level, 1) for level in levels), default=1)
    if "max_steps" in given_argument(arguments) and (steps is None or steps < least):
        made.append(_bad(f"--max_steps must be a number of at least {least} for these levels", f"--max_steps {least}"))
    return tuple(made)


VLLM_OPTION = "vllm_python"
VLLM_MEANING = "interpreter with vLLM for level 3, where it is not the one of the trainer or of the environment vllm-cpu"
VLLM_LEVEL = "vllm"
SECONDS = 60
_ASK = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"


def vllm_interpreter(context: Context) -> Path | None:
    given = context.options.get(VLLM_OPTION)
    if given:
        return Path(str(given))
    return context.python if has_vllm(context.python) else context.environments.get(VLLM_CPU)


@cache
def has_vllm(python: Path) -> bool:
    """Whether an interpreter can import vLLM, without importing it."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    try:
        return run_command([python, "-c", _ASK], SECONDS, env={**kept, "PYTHONSAFEPATH": "1"}).code == 0
    except NoAnswerError:
        return False


def vllm_findings(context: Context) -> tuple[Finding, ...]:
    if VLLM_LEVEL not in context.levels:
        return ()
    python = vllm_interpreter(context)
    if python is None:
        message = f"level 3 needs vLLM: {context.python} has none, and the environment {VLLM_CPU} is not built"
        return (finding("vllm", False, message, f"seatrial env build {VLLM_CPU}"),)
    if not has_vllm(python):
        fix = f"name an interpreter that has vLLM with --set options.{VLLM_OPTION}=PATH, or leave the option out"
        return (finding("vllm", False, f"level 3 needs vLLM, and {python} cannot import it", fix),)
    return (finding("vllm", True, f"level 3 runs vLLM in {python}"),)


class Trl(Loop):
    name = "trl"
    title = "TRL"
    folder = Path(__file__).parent
    default_model = "tiny-dense"
    environment = "trl"
    options = (Option(VLLM_OPTION, VLLM_MEANING, "path"),)
    measures = Measures(
        signals=trl_metrics.SIGNALS,
        read_console=trl_metrics.read_console,
        steps_reached=trl_metrics.steps_reached,
        steps_planned=trl_metrics.steps_planned,
        log_interval=trl_metrics.log_interval,
        vacuous=trl_metrics.vacuous,
        unseen=trl_metrics.unseen,
        is_clock=trl_metrics.is_clock,
    )

    def faults(self) -> Mapping[str, Fault]:
        return dict(FAULTS)

    def phases(self, level: Level, context: Context, directory: Path) -> tuple[Phase, ...]:
        make = _PhaseBuilder(level, context, directory)
        match level.name:
            case "smoke":
                # Variants overwrite settings, and so they go without a user's own; a user's model would take its time seven times.
                more = ("--variants",) if not context.arguments and context.model in MADE else ()
                return make.proven("run", (*RECORDED, *more), (*PROVING, *SYNCED))
            case "lora-resume":
                schedule = ("--learning_rate", "1e-2", "--lr_scheduler_type", "linear", "--loss_type", "grpo", "--scale_rewards", "batch")
                # Within the reuse of one generation TRL cannot resume: the generation is not part of its checkpoint.
                middle = str(max(REUSED, (make.steps() or 2 * REUSED) // 2 // REUSED * REUSED))
                saving = (*PROVING, *schedule, "--save_strategy", "steps", "--save_steps", middle)
                checkpoint = directory / "full" / f"checkpoint-{middle}"
                # At the end of an epoch TRL resumes with other random numbers: an epoch of the user's own batches must not end there.
                options = (*RECORDED, "--lora", *(("--prompts", "300") if context.arguments else ()))
                full, shadow = make.proven("full", options, saving)
                return (full, make.train("resumed", (*options, "--resume-from", str(checkpoint)), saving), shadow)
            case "refit":
                return make.proven("run", (*RECORDED, "--rollouts", "generator"), (*PROVING, *PLAIN, *EACH))
            case "vllm":
                server = ("--vllm-python", str(vllm_interpreter(context) or "PYTHON-WITH-VLLM"))
                untied = UNTIED if context.model == self.default_model else None
                run, shadow = make.proven("run", (*RECORDED, "--rollouts", "vllm", *server), (*PROVING, *PLAIN, *EACH), model=untied)
                own, corrected = (*RECORDED, "--rollouts", "synced", *server), (*PROVING, *EACH, *CORRECTED)
                sync, shadow_sync = make.proven("sync", own, (*corrected, *BY_TOKEN), model=untied)
                lora, shadow_lora = make.proven("lora", (*own, "--lora"), (*corrected, *PLAIN, *COLDER), model=untied)
                return run, sync, lora, shadow, shadow_sync, shadow_lora
            case "ranks":
                # Without --use_cpu, accelerate starts two independent runs on a machine without GPUs.
                cpu = ("--use_cpu", "true")
                words, seeded = (*PROVING, *PLAIN, *cpu), (*RECORDED, "--rollouts", "seeded")
                one = (*words, "--per_device_train_batch_size", "16")
                half = (*words, "--per_device_train_batch_size", "8", "--ddp_backend", "gloo")
                return (*make.proven("one", seeded, one), *make.proven("two", seeded, half, ranks=2))
            case "architectures":
                return (
                    *make.proven("moe", RECORDED, (*PROVING, *SYNCED), model="tiny-moe"),
                    *make.proven("vlm", PICTURED, (*PROVING, *SYNCED, "--reward_weights", "1.0"), model="tiny-vlm"),
                )
            case "learning":
                # The first learning arm is recorded.
                run = make.train("run", ("--seeds", str(SEEDS), "--record"), (), module="extra_runs")
                return (run, make.shadow(run, "extra_runs", directory / "run" / "learn" / "1", ("--seed", "1")))
        raise AssertionError(f"level {level.number} has no phases")

    def findings(self, context: Context) -> tuple[Finding, ...]:
        """A given model must be a local directory with weights and a tokenizer, and its tokenizer must load offline; level 3 needs vLLM."""
        return gather(
            lambda: argument_findings(context.levels, context.arguments), lambda: self._model(context), lambda: vllm_findings(context)
        )

    def _model(self, context: Context) -> tuple[Finding, ...]:
        if not context.model.startswith("tiny-"):
            return model_findings(Path(context.model), context, ModelUse(build=f"seatrial env build {self.environment}", own=True))
        ok = context.model in MADE
        message = f"{context.model} is made locally" if ok else f"no such model: {context.model}; known: {', '.join(MADE)}"
        return (finding("model", ok, message, f"--model {MADE[0]}", Boundary.DATA),)

    def limitations(self, level: Level, context: Context) -> tuple[str, ...]:
        """A model that was made here has no pretrained weights, and level 3's is another than that of the other levels."""
        if context.model != self.default_model:
            return ()
        made = "a tiny model with random weights, made locally: no pretrained weights were tested"
        other = f"an untied Llama ({UNTIED}) stood in for {self.default_model}, whose embeddings are tied: none such were refitted"
        return (made, other) if level.name == VLLM_LEVEL else (made,)

    def shortfalls(self, level: Level, directory: Path) -> tuple[str, ...]:  # noqa: ARG002 - the contract
        return level_limitations(directory)

    def proofs(self, level: Level, directory: Path, metrics: Metrics) -> tuple[CheckResult, ...]:
        return trl_proofs.prove(level, directory, metrics)


def world_size(phase: Phase) -> int:
    """Processes that a phase starts by torchrun."""
    return len([name for name in phase.processes if name == "driver" or name.startswith("rank")])


class _PhaseBuilder:
    def __init__(self, level: Level, context: Context, directory: Path) -> None:
        self.level, self.context, self.directory = level, context, directory

    def steps(self) -> int | None:
        """Steps to reach: the user's own --max_steps counts, since it is what the loop will do."""
        return max_steps(self.context.arguments) or self.level.steps

    def proven(self, name: str, options: tuple[str, ...], arguments: tuple[str, ...], **how: Any) -> tuple[Phase, Phase]:
        """A recorded run, and the shadow that recomputes it: with the same words, and without the change."""
        run = self.train(name, options, arguments, **how)
        return run, self.shadow(run, "train", self.directory / name)

    def shadow(self, run: Phase, module: str, record: Path, more: tuple[str, ...] = ()) -> Phase:
        """The shadow of a recorded run, given its words and `more` of them."""
        words = run.argv[run.argv.index(f"{DRIVE}.{module}") + 1 :]
        own = ("--record-dir", str(record), "--world", str(world_size(run)))
        name = "shadow" if run.name == "run" else f"shadow-{run.name}"
        argv = (str(self.context.python), "-m", f"{DRIVE}.shadow", *own, *words, *more)
        return Phase(name=name, argv=argv, env=run.env, processes=(), beside=True)

    def train(
        self,
        name: str,
        options: tuple[str, ...],
        arguments: tuple[str, ...],
        model: str | None = None,
        module: str = "train",
        ranks: int = 1,
    ) -> Phase:
        context = self.context
        start = [str(context.python), "-m"]
        if ranks > 1:
            start += ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m"]
        fixed = ["--out", str(self.directory / name), "--imports", str(self.directory)]
        fixed += ["--model", model or context.model, "--models", str(context.run_dir / "models")]
        fixed += [word for repo in context.changes for pkg in repo.packages for word in ("--under-test", f"{pkg}={repo.import_root}")]
        fixed += ["--fault", str(context.options["fault"])] if context.options.get("fault") else []
        passed = [*COMMON, "--max_steps", str(self.level.steps), *arguments, *context.arguments]
        return Phase(
            name=name,
            argv=(*start, f"{DRIVE}.{module}", *fixed, *options, "--", *passed),
            env={"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
            | {"TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "PYTHONHASHSEED": "0", "PYTHONUNBUFFERED": "1"},
            steps=self.steps(),
            processes=("driver", *(f"rank{rank}" for rank in range(1, ranks)), *(SEPARATE[word] for word in SEPARATE if word in options)),
        )


LOOP = Trl()
