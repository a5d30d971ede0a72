"""The embedded loop: TRL's GRPO trainer, on CPU or CUDA, with tiny models made locally or a user's own."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Self

from seatrial.loops.knowledge import read_tables
from seatrial.loops.plain import Plain
from seatrial.loops.trl import arguments, console, model_check, proofs, vacuity, vllm_python
from seatrial.loops.trl.arguments import max_steps
from seatrial.loops.trl.drive.fault_names import FAULTS
from seatrial.model.knowledge import Level, Milestone, Signature
from seatrial.model.loop import Context, Phase, Vacuity
from seatrial.model.record import CheckResult, Finding
from seatrial.model.series import Metrics
from seatrial.model.verdict import Boundary

HERE = Path(__file__).parent
SEED = "42"
SEEDS = 5
COMMON = (
    *("--per_device_train_batch_size", "64", "--num_generations", "8", "--max_completion_length", "8"),
    *("--learning_rate", "1e-3", "--lr_scheduler_type", "constant", "--logging_steps", "1", "--save_strategy", "no"),
    *("--report_to", "none", "--bf16", "false", "--gradient_checkpointing", "false", "--disable_tqdm", "true"),
    *("--dataloader_pin_memory", "false", "--seed", SEED, "--logging_nan_inf_filter", "false"),
)
REFERENCE = ("--beta", "0.04")
SEPARATE = ("generator", "vllm")
"""Processes that generate for the trainer; each is also a value of --rollouts."""
MADE = ("tiny-dense", "tiny-untied", "tiny-moe", "tiny-vlm")
UNTIED = "tiny-untied"
"""Of level 3, unless a model is given: vLLM's CPU build cannot refit tied embeddings."""


@cache
def _levels() -> tuple[Level, ...]:
    return read_tables(HERE / "levels.toml", "level", Level)


class Trl(Plain):
    """See `seatrial.model.loop.Loop` for the contract."""

    name = "trl"
    title = "TRL"
    default_model = "tiny-dense"
    environment: str | None = "trl"

    def options(self) -> Mapping[str, str]:
        """One, a path."""
        return {vllm_python.OPTION: vllm_python.MEANING}

    def configured(self, options: Mapping[str, str]) -> Self:
        """The same loop with them."""
        made = copy.copy(super().configured(options))
        made.chosen = {name: str(Path(text).absolute()) for name, text in options.items()}
        return made

    def environments(self) -> Mapping[str, Path]:
        """The pinned environment."""
        return {"trl": HERE / "environment.lock"}

    def levels(self) -> tuple[Level, ...]:
        """The ladder of levels.toml."""
        return _levels()

    def milestones(self) -> tuple[Milestone, ...]:
        """Those of milestones.toml."""
        return read_tables(HERE / "milestones.toml", "milestone", Milestone)

    def signatures(self) -> tuple[Signature, ...]:
        """Those of signatures.toml."""
        return read_tables(HERE / "signatures.toml", "signature", Signature)

    def faults(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Those of drive/faults.py."""
        return dict(FAULTS)

    def instruments(self) -> tuple[Path, ...]:
        """Packages that run inside the loop's interpreter."""
        return (HERE / "drive",)

    def phases(self, level: Level, context: Context, directory: Path) -> tuple[Phase, ...]:
        """The processes of one level."""
        make = _Maker(level, context, directory)
        match level.name:
            case "smoke":
                return (make.train("run", (), REFERENCE),)
            case "lora-resume":
                schedule = ("--learning_rate", "1e-2", "--lr_scheduler_type", "linear")
                middle = str(max(1, (make.steps() or 2) // 2))
                saving = (*REFERENCE, *schedule, "--save_strategy", "steps", "--save_steps", middle)
                checkpoint = directory / "full" / f"checkpoint-{middle}"
                return (
                    make.train("full", ("--lora",), saving),
                    make.train("resumed", ("--lora", "--resume-from", str(checkpoint)), saving),
                )
            case "refit":
                return (make.train("run", ("--rollouts", "generator"), ()),)
            case "vllm":
                server = ("--rollouts", "vllm", "--vllm-python", str(vllm_python.interpreter(context) or "PYTHON-WITH-VLLM"))
                return (make.train("run", server, (), model=UNTIED if context.model == self.default_model else None),)
            case "ranks":
                # Without --use_cpu, accelerate starts two independent runs on a machine without GPUs.
                cpu = ("--use_cpu", "true")
                half = (*cpu, "--ddp_backend", "gloo", "--per_device_train_batch_size", "32")
                return (make.train("one", ("--rollouts", "seeded"), cpu), make.train("two", ("--rollouts", "seeded"), half, ranks=2))
            case "architectures":
                return (
                    make.train("moe", (), (), model="tiny-moe"),
                    make.train("vlm", ("--images", "--prompts", "16"), (), model="tiny-vlm"),
                )
            case "learning":
                return (make.train("run", ("--seeds", str(SEEDS)), (), module="learning"),)
        raise AssertionError(f"level {level.number} has no phases")

    def findings(self, context: Context) -> tuple[Finding, ...]:
        """A given model must be a local directory with weights and a tokenizer, and its tokenizer must load offline; level 3 needs vLLM."""
        wrong = arguments.findings(context.levels, context.arguments)
        if wrong:
            return wrong
        server = vllm_python.findings(context)
        if context.model.startswith("tiny-"):
            ok = context.model in MADE
            message = f"{context.model} is made locally" if ok else f"no such model: {context.model}; known: {', '.join(MADE)}"
            return (Finding(name="model", ok=ok, boundary=Boundary.DATA, message=message, fix="" if ok else f"--model {MADE[0]}"), *server)
        return (*model_check.model_findings(Path(context.model), context.python), *server)

    def limitations(self, level: Level, context: Context) -> tuple[str, ...]:
        """A model that was made here has no pretrained weights, and level 3's is another than that of the other levels."""
        if context.model != self.default_model:
            return ()
        made = "a tiny model with random weights, made locally: no pretrained weights were tested"
        other = f"an untied Llama ({UNTIED}) stood in for {self.default_model}, whose embeddings are tied: none such were refitted"
        return (made, other) if level.name == vllm_python.LEVEL else (made,)

    def metric_files(self, directory: Path) -> Mapping[str, tuple[Path, ...]]:
        """One metrics.jsonl per phase; a level with several phases tells them apart by prefix."""
        found = sorted(directory.glob("*/metrics.jsonl"))
        return {("" if path.parent.name == "run" else f"{path.parent.name}/"): (path,) for path in found}

    def read_console(self, log: Path) -> Metrics:
        """Metrics from the rows that the trainer prints."""
        return console.read_console(log)

    def proofs(self, level: Level, directory: Path, metrics: Metrics) -> tuple[CheckResult, ...]:
        """What the facts prove."""
        return proofs.prove(level, directory, metrics)

    def steps_reached(self, metrics: Metrics) -> int | None:
        """The least last step of all training runs: a level with several is done when each of them is.

        The row that closes a run counts as a loss does: losses may be logged less often than at every step.
        """
        runs: dict[str, int] = {}
        for tag, series in metrics.series.items():
            run, _, name = tag.rpartition("/")
            if name in ("loss", "train_runtime") and not vacuity.is_evaluation(run) and series.steps:
                runs[run] = max(runs.get(run, 0), series.steps[-1])
        return min(runs.values(), default=metrics.last_step())

    def steps_planned(self, paths: tuple[Path, ...]) -> int | None:
        """max_steps of the trainer_state.json files, or what the log says."""
        return console.steps_planned(paths)

    def vacuous(self, metrics: Metrics) -> Vacuity | None:
        """No reward variance, or a learning rate of zero."""
        reason = vacuity.vacuous(metrics)
        return Vacuity(reason) if reason else None

    def unseen(self, metrics: Metrics) -> str | None:
        """No gradient norm, or no spread of rewards."""
        return vacuity.unseen(metrics)


class _Maker:
    """Builds the phases of one level."""

    def __init__(self, level: Level, context: Context, directory: Path) -> None:
        self.level, self.context, self.directory = level, context, directory

    def steps(self) -> int | None:
        """Steps to reach: the user's own --max_steps counts, since it is what the loop will do."""
        return max_steps(self.context.arguments) or self.level.steps

    def train(
        self,
        name: str,
        options: tuple[str, ...],
        arguments: tuple[str, ...],
        model: str | None = None,
        module: str = "train",
        ranks: int = 1,
    ) -> Phase:
        """One call of the driver."""
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
            argv=(*start, f"seatrial.loops.trl.drive.{module}", *fixed, *options, "--", *passed),
            env={"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
            | {"TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "PYTHONHASHSEED": "0", "PYTHONUNBUFFERED": "1"},
            steps=self.steps(),
            processes=("driver", *(f"rank{rank}" for rank in range(1, ranks)), *(kind for kind in SEPARATE if kind in options)),
        )


LOOP = Trl()
