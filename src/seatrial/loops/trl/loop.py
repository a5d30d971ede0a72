"""The embedded loop: TRL's GRPO trainer, on CPU or CUDA, with tiny models made locally or a user's own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from seatrial.checks.step import level_limitations
from seatrial.core.loop import Context, Fault, Loop, Measures, Option, Phase, gather
from seatrial.core.records import CheckResult, Finding
from seatrial.core.series import Metrics
from seatrial.core.specs import Level
from seatrial.core.verdict import Boundary
from seatrial.instruments.trl.fault_names import FAULTS
from seatrial.loops.model_files import ModelUse, model_findings
from seatrial.loops.trl import trl_metrics, trl_preflight, trl_proofs
from seatrial.loops.trl.trl_preflight import max_steps

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
    *(
        "--per_device_train_batch_size",
        "12",
        "--gradient_accumulation_steps",
        "3",
        "--num_generations",
        "4",
        "--num_iterations",
        str(REUSED),
    ),
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


class Trl(Loop):
    name = "trl"
    title = "TRL"
    folder = Path(__file__).parent
    default_model = "tiny-dense"
    environment = "trl"
    options = (Option(trl_preflight.VLLM_OPTION, trl_preflight.VLLM_MEANING, "path"),)
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
                server = ("--vllm-python", str(trl_preflight.vllm_interpreter(context) or "PYTHON-WITH-VLLM"))
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
            lambda: trl_preflight.argument_findings(context.levels, context.arguments),
            lambda: self._model(context),
            lambda: trl_preflight.vllm_findings(context),
        )

    def _model(self, context: Context) -> tuple[Finding, ...]:
        if not context.model.startswith("tiny-"):
            return model_findings(Path(context.model), context, ModelUse(build=f"seatrial env build {self.environment}", own=True))
        ok = context.model in MADE
        message = f"{context.model} is made locally" if ok else f"no such model: {context.model}; known: {', '.join(MADE)}"
        return (Finding(name="model", ok=ok, boundary=Boundary.DATA, message=message, fix="" if ok else f"--model {MADE[0]}"),)

    def limitations(self, level: Level, context: Context) -> tuple[str, ...]:
        """A model that was made here has no pretrained weights, and level 3's is another than that of the other levels."""
        if context.model != self.default_model:
            return ()
        made = "a tiny model with random weights, made locally: no pretrained weights were tested"
        other = f"an untied Llama ({UNTIED}) stood in for {self.default_model}, whose embeddings are tied: none such were refitted"
        return (made, other) if level.name == trl_preflight.VLLM_LEVEL else (made,)

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
