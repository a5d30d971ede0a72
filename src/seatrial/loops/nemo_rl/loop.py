"""NeMo-RL: its own functionals with Megatron, driven from outside, in the environment that uv made for its checkout.

It needs GPUs. What can be known without one is known before: the commands, the configuration that NeMo-RL's own loader
composes, and what a finished run left.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Self

from seatrial.loops.change_names import wrong_names
from seatrial.loops.knowledge import read_tables
from seatrial.loops.nemo_rl.after import claims, console, next_steps, proofs, results, tokens, vacuity
from seatrial.loops.nemo_rl.ahead import preflight, shown
from seatrial.loops.nemo_rl.runs import architecture, assertions, calls, checkout, isolations, side_tests, variants
from seatrial.loops.nemo_rl.runs.variant import DEFAULT_MODEL, GPUS
from seatrial.loops.options import choice, number, require_known
from seatrial.loops.plain import Basic
from seatrial.loops.sizes import KEYS
from seatrial.model.errors import UserError
from seatrial.model.knowledge import CheckSpec, Level, Milestone, Signature
from seatrial.model.loop import Context, Isolation, Phase, SideTests, Vacuity
from seatrial.model.record import CheckResult, Finding, LevelResult, RepoState
from seatrial.model.series import Metrics
from seatrial.model.tokens import TokenRow

HERE = Path(__file__).parent
OPTIONS = {
    "nemo_rl": "the NeMo-RL checkout whose functionals are driven",
    "gpus": "GPUs of the host, 2 unless said",
    "bridge": "how the Bridge under test is used: path (first on PYTHONPATH) or sync (copied into the vendored tree, and restored)",
    "tests": "on or off: the Bridge's and NeMo-RL's own unit tests before the levels",
    "peft": "broken: this checkout's LoRA is known to be broken, leave it out of levels 1 and 6",
    "transports": "transports of level 2, such as full,delta; all that the checkout has unless said",
    "tp": "tensor parallel size of level 4",
    "pp": "pipeline parallel size of level 4",
    "cp": "context parallel size of level 4",
    "ep": "expert parallel size of levels 4 and 5",
    "etp": "expert tensor parallel size of levels 4 and 5",
    "sequence_parallel": "true or false, in level 4",
    "recipe": "a maintained recipe for levels 4 and 5, such as llm/grpo-llama3.2-1b-instruct-1n8g-megatron",
    "architecture": f"what level 5 is for: {', '.join(architecture.ARCHITECTURES)}",
    "steps": "steps of level 6, 20 to 100",
    "helpers": "local: build Megatron's dataset helpers in a node-local copy (home is full or read-only)",
}
CHOICES = {
    "bridge": ("path", "sync"),
    "tests": ("on", "off"),
    "peft": ("on", "broken"),
    "sequence_parallel": ("false", "true"),
    "helpers": ("off", "local"),
}
NUMBERS = ("gpus", "tp", "pp", "cp", "ep", "etp")
NO_LORA = (
    "a Megatron run of two steps that was cut after the first and resumed is the run that was not cut, within the tolerances of "
    "NeMo-RL's own comparison; LoRA was not run"
)
PACKAGES = {"bridge": "megatron.bridge", "megatron": "megatron.core", "nemo-rl": "nemo_rl", "nemo_rl": "nemo_rl"}
"""What a change of this name must provide."""


@cache
def _levels() -> tuple[Level, ...]:
    return read_tables(HERE / "levels.toml", "level", Level)


@cache
def _milestones() -> tuple[Milestone, ...]:
    return read_tables(HERE / "milestones.toml", "milestone", Milestone)


@cache
def _signatures() -> tuple[Signature, ...]:
    return read_tables(HERE / "signatures.toml", "signature", Signature)


class NemoRl(Basic):
    """See `seatrial.model.loop.Loop` for the contract."""

    name = "nemo-rl"
    title = "NeMo-RL"
    default_model = DEFAULT_MODEL
    environment: str | None = None

    def __init__(self, options: Mapping[str, str] | None = None) -> None:
        given = options or {}
        require_known(self.title, OPTIONS, given)
        self.chosen: Mapping[str, str] = {name: str(Path(text).resolve()) if name == "nemo_rl" else text for name, text in given.items()}
        for name, known in CHOICES.items():
            choice(self.chosen, name, known)
        for name in NUMBERS:
            number(self.chosen, name, GPUS)
        number(self.chosen, "steps", variants.LEARNING_STEPS[0], *variants.LEARNING_STEPS)
        _require_transports(self.chosen)

    def options(self) -> Mapping[str, str]:
        """Each with its meaning."""
        return OPTIONS

    def configured(self, options: Mapping[str, str]) -> Self:
        """The loop with these options."""
        return type(self)(options)

    def checkouts(self) -> Mapping[str, Path]:
        """The NeMo-RL checkout that is driven."""
        return {"nemo-rl": Path(self.chosen["nemo_rl"])} if "nemo_rl" in self.chosen else {}

    def environments(self) -> Mapping[str, Path]:
        """None: uv makes them, in the checkout."""
        return {}

    def interpreter(self) -> Path:
        """The Python of uv's environment."""
        return checkout.interpreter(self.chosen)

    def launcher(self) -> Path | None:
        """NeMo-RL's own ray.sub: it is submitted from the root of the checkout."""
        found = Path(self.chosen.get("nemo_rl", "."), "ray.sub")
        return found if "nemo_rl" in self.chosen and found.is_file() else None

    def placed(self, changes: tuple[RepoState, ...]) -> tuple[RepoState, ...]:
        """With `bridge = sync` the Bridge under test is imported from the vendored tree, which then holds a copy of it."""
        place = next((repo.path for repo in changes if "nemo_rl" in repo.packages), self.chosen.get("nemo_rl"))
        if self.chosen.get("bridge") != "sync" or place is None:
            return changes
        target = str(Path(place) / checkout.VENDORED)
        return tuple(
            repo.model_copy(update={"synced": target}) if "megatron.bridge" in repo.packages and not repo.companion else repo
            for repo in changes
        )

    def import_path(self, context: Context) -> tuple[str, ...]:
        """The Megatron-LM of the Bridge, and the NeMo-RL checkout."""
        return checkout.import_path(context)

    def levels(self) -> tuple[Level, ...]:
        """The ladder with these options: what cannot be run says why, and a cluster is asked for the GPUs that are used."""
        count = number(self.chosen, "gpus", GPUS)
        return tuple(
            level.model_copy(update={"cost": level.cost.model_copy(update={"gpus": count}), **self._changed(level)}) for level in _levels()
        )

    def _changed(self, level: Level) -> dict[str, object]:
        options = self.chosen
        if level.name == "refit" and "transports" in options:
            return {"title": f"{level.title} ({options['transports'].replace(',', ', ')})", **self._too_few(level)}
        if level.name == "parallelism":
            sizes = ", ".join(f"{name.upper()} {number(options, name, 2 if name == 'tp' else 1)}" for name in KEYS)
            return {"title": f"{level.title} ({options.get('recipe', sizes)})", **self._too_few(level)}
        if level.name == "learning":
            return {"steps": number(options, "steps", variants.LEARNING_STEPS[0], *variants.LEARNING_STEPS)}
        if (
            level.name == "lora-checkpoint"
            and "nemo_rl" in options
            and variants.no_peft(options, checkout.generation(Path(options["nemo_rl"])))
        ):
            return {"title": "Checkpoint (LoRA blocked by NeMo-RL)", "proves": NO_LORA}
        if level.name == "architecture":
            named = options.get("architecture", options.get("recipe"))
            return {"skip": architecture.why_not(options), **({"title": f"{level.title} ({named})"} if named else {})}
        if level.name == "refit":
            return self._too_few(level)
        if level.name == "megatron-generation" and "nemo_rl" in options:
            offers = checkout.generation(Path(options["nemo_rl"]))
            supported = offers.megatron_generation and Path(variants.MEGATRON_GENERATION).name in offers.scripts
            return {} if supported else {"skip": "this NeMo-RL checkout does not support policy.generation.backend=megatron"}
        return {}

    def _too_few(self, level: Level) -> dict[str, object]:
        """One GPU has nothing to transfer to, and nothing to be parallel with."""
        few = number(self.chosen, "gpus", GPUS) < 2
        return {"skip": level.skip or "one GPU is not enough for it: name more with --set options.gpus=N"} if few else {}

    def milestones(self) -> tuple[Milestone, ...]:
        """Those of milestones.toml."""
        return _milestones()

    def signatures(self) -> tuple[Signature, ...]:
        """Those of signatures.toml."""
        return _signatures()

    def faults(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """None: there is no NeMo-RL without a GPU to inject them into."""
        return {}

    def instruments(self) -> tuple[Path, ...]:
        """Packages that run inside NeMo-RL's processes."""
        return (HERE / "drive",)

    def phases(self, level: Level, context: Context, directory: Path) -> tuple[Phase, ...]:
        """The processes of one level."""
        return calls.phases(level, context, directory)

    def shown(self, level: Level, context: Context, directory: Path) -> tuple[str, ...]:
        """What the scripts start, assert and write."""
        return shown.shown(level, context, directory)

    def findings(self, context: Context) -> tuple[Finding, ...]:
        """Changes that are what their names say, and what NeMo-RL needs."""
        return (*wrong_names(context, PACKAGES), *preflight.findings(context))

    def side_tests(self, context: Context) -> tuple[SideTests, ...]:
        """The Bridge's tests for the diff, and NeMo-RL's for the surface."""
        return side_tests.side_tests(context)

    def isolations(self, result: LevelResult) -> tuple[Isolation, ...]:
        """Reruns that separate the suspects of a failure."""
        return isolations.isolations(result)

    def next_steps(self, result: LevelResult, context: Context) -> tuple[str, ...]:
        """Where a local snapshot of the model is, when the hub did not answer."""
        return next_steps.next_steps(result, context)

    def tokens(self, directory: Path) -> Iterator[TokenRow]:
        """The sequences that NeMo-RL wrote at each step."""
        return tokens.tokens(directory)

    def limitations(self, level: Level, context: Context) -> tuple[str, ...]:
        """What this configuration leaves out."""
        made = []
        if level.name in ("lora-checkpoint", "learning") and (why := variants.no_peft(context.options, variants.offered(context))):
            made.append(why)
        if level.name != "parallelism" and "policy.megatron_cfg" not in " ".join(context.arguments):
            made.append("all parallel sizes were 1, but for experts where they are named: use level 4")
        if level.name == "parallelism" and "recipe" not in context.options and number(context.options, "ep", 1) == 1:
            made.append("expert parallel size 1: routing across ranks was not exercised")
        made += _foreign_core(context)
        if level.name == "refit":
            made.append("full and packed leave the same trace: that tensors were packed rests on the size of the buckets that was set")
            run, here = variants.transports(context), variants.available(variants.offered(context))
            left = [name for name in variants.TRANSPORTS if name not in run]
            made += [f"transport not run: {name}{'' if name in here else ', which this checkout does not have'}" for name in left]
        if any("enforce_eager=true" in word.lower() or "num_cuda_graphs=null" in word for word in context.arguments):
            made.append("CUDA graphs were off: this is a reduced-optimization run")
        return tuple(made)

    def metric_files(self, directory: Path) -> Mapping[str, tuple[Path, ...]]:
        """The event files of each run; metrics.json where there are none."""
        return results.metric_files(directory)

    def read_console(self, log: Path) -> Metrics:
        """Metrics from the lines that NeMo-RL prints."""
        return console.read_console(log)

    def own_checks(self, level: Level, directory: Path) -> tuple[CheckSpec, ...]:
        """The assertions of the functional."""
        return assertions.own_checks(level, directory)

    def proofs(self, level: Level, directory: Path, metrics: Metrics) -> tuple[CheckResult, ...]:
        """What facts and the configuration in force prove."""
        return proofs.proofs(level, directory, metrics)

    def other_run(self, level: Level, log: Path) -> str | None:  # noqa: ARG002 - the contract
        """The configuration that the log shows must be that of the levels: Megatron, not DTensor."""
        return claims.other_run(log)

    def steps_reached(self, metrics: Metrics) -> int | None:
        """The least last step of all training runs."""
        return console.steps_reached(metrics)

    def steps_planned(self, paths: tuple[Path, ...]) -> int | None:
        """What the log says."""
        return console.steps_planned(paths)

    def vacuous(self, metrics: Metrics) -> Vacuity | None:
        """Nothing to learn from, or a transfer that was not made."""
        return vacuity.vacuous(metrics)

    def unseen(self, metrics: Metrics) -> str | None:
        """No gradient norm, or no rewards."""
        return vacuity.unseen(metrics)


def _foreign_core(context: Context) -> list[str]:
    """Of a Bridge under test without a Megatron-LM of its own."""
    tested = [repo.path for repo in context.changes if "megatron.bridge" in repo.packages and not repo.companion]
    cores = checkout.bundled_core(context)
    if not tested or not cores or any(core.is_relative_to(path) for core in cores for path in tested):
        return []
    return [f"the Bridge under test has no Megatron-LM (an empty submodule?): Megatron-Core came from {cores[0]}"]


def _require_transports(options: Mapping[str, str]) -> None:
    for name in options.get("transports", "full").split(","):
        if name not in variants.TRANSPORTS:
            known = ", ".join(variants.TRANSPORTS)
            raise UserError(f"options.transports = {options['transports']!r}: {name!r} is none of {known}", "use full,delta")


LOOP = NemoRl()
