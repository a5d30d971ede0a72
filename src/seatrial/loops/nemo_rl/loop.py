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
from seatrial.loops.nemo_rl.after.signals import SIGNALS
from seatrial.loops.nemo_rl.ahead import preflight, shown
from seatrial.loops.nemo_rl.runs import architecture, assertions, calls, checkout, isolations, ladder, limits, side_tests, variants
from seatrial.loops.nemo_rl.runs.variant import DEFAULT_MODEL, GPUS
from seatrial.loops.options import choice, number, require_known
from seatrial.loops.plain import Basic
from seatrial.model.errors import UserError
from seatrial.model.guarded import real_path
from seatrial.model.knowledge import CheckSpec, Concern, Level, Milestone, Signature, Surface
from seatrial.model.loop import Context, Fault, Footprint, Isolation, Phase, SideTests, Vacuity
from seatrial.model.record import CheckResult, Finding, LevelResult, RepoState
from seatrial.model.series import Metrics
from seatrial.model.signals import Signals
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
PACKAGES = {"bridge": "megatron.bridge", "megatron": "megatron.core", "nemo-rl": "nemo_rl", "nemo_rl": "nemo_rl"}
"""What a change of this name must provide."""


@cache
def _levels() -> tuple[Level, ...]:
    return read_tables(HERE / "levels.toml", "level", Level, beside=("concern", "surface"))


@cache
def _concerns() -> tuple[Concern, ...]:
    return read_tables(HERE / "levels.toml", "concern", Concern, beside=("level", "surface"))


@cache
def _surfaces() -> tuple[Surface, ...]:
    return read_tables(HERE / "levels.toml", "surface", Surface, beside=("level", "concern"))


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
    footprint = Footprint(tmp_mb=1_000, tmp_inodes=5_000, shm_mb=8_000, ray=True)

    def __init__(self, options: Mapping[str, str] | None = None) -> None:
        given = options or {}
        require_known(self.title, OPTIONS, given)
        self.chosen: Mapping[str, str] = {name: str(real_path(Path(text))) if name == "nemo_rl" else text for name, text in given.items()}
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
        """The ladder with these options."""
        return ladder.ladder(_levels(), self.chosen)

    def concerns(self) -> tuple[Concern, ...]:
        """Those of levels.toml."""
        return _concerns()

    def surfaces(self) -> tuple[Surface, ...]:
        """What NeMo-RL imports from Megatron-Bridge."""
        return _surfaces()

    def milestones(self) -> tuple[Milestone, ...]:
        """Those of milestones.toml."""
        return _milestones()

    def signatures(self) -> tuple[Signature, ...]:
        """Those of signatures.toml."""
        return _signatures()

    def faults(self) -> Mapping[str, Fault]:
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
        return limits.limitations(level, context)

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

    def signals(self) -> Signals:
        """Of NeMo-RL."""
        return SIGNALS

    def vacuous(self, metrics: Metrics) -> Vacuity | None:
        """Nothing to learn from, or a transfer that was not made."""
        return vacuity.vacuous(metrics)

    def unseen(self, metrics: Metrics) -> str | None:
        """No gradient norm, or no rewards."""
        return vacuity.unseen(metrics)


def _require_transports(options: Mapping[str, str]) -> None:
    for name in options.get("transports", "full").split(","):
        if name not in variants.TRANSPORTS:
            known = ", ".join(variants.TRANSPORTS)
            raise UserError(f"options.transports = {options['transports']!r}: {name!r} is none of {known}", "use full,delta")


LOOP = NemoRl()
