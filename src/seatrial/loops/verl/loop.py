"""verl: its own Megatron wrapper on GPUs, and real training of a tiny model on a CPU.

The two sides share what verl writes (log, metrics, configuration dump) and the numbers of the levels; what runs, what
is checked before it and what it proves is said by `wrapper` for GPUs and by `cpu` for a CPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Protocol, Self

from seatrial.checks.step import FILE, limitations
from seatrial.core.loop import Context, Fault, Footprint, Phase, SideTests, Vacuity
from seatrial.core.records import CheckResult, Finding
from seatrial.core.series import Metrics
from seatrial.core.specs import Concern, Level, Milestone, Signals, Signature, Surface
from seatrial.instruments.verl.verl_process import FAULTS
from seatrial.loops.base_loop import BaseLoop, choice_option, read_tables, require_known_options
from seatrial.loops.bridge_tests import conformance
from seatrial.loops.host_findings import wrong_names
from seatrial.loops.verl import gpu_side as wrapper
from seatrial.loops.verl import verl_log
from seatrial.loops.verl.cpu_proofs import is_clock
from seatrial.loops.verl.cpu_runs import Cpu
from seatrial.loops.verl.cpu_settings import STRATEGIES
from seatrial.loops.verl.verl_log import SIGNALS

HERE = Path(__file__).parent
ENVIRONMENT = "verl-cpu"
DEVICES = ("gpu", "cpu")
OPTIONS = {
    "device": "gpu (verl's own wrapper) or cpu (a tiny model, here)",
    "verl": "the verl checkout whose wrapper is driven; on a CPU it shadows the installed verl",
    "gpus": "GPUs of the host",
    "strategy": "cpu: engine of actor and critic: megatron or fsdp2",
    "engine": "rollout engine: vllm or sglang",
    "launcher": "how the wrapper starts Python: uv or python",
    "train_files": "training data, a parquet file",
    "val_files": "validation data, a parquet file",
    "reward_model": "a local reward model; without one the rule reward is used",
    "model_config": "config.json of a dummy model with random weights",
    "tp": "tensor parallel size of level 2",
    "pp": "pipeline parallel size of level 2",
    "cp": "context parallel size of level 2",
    "ep": "expert parallel size of level 2",
    "etp": "expert tensor parallel size of level 2",
    "architecture": "what level 4 is for: moe, vlm, mtp or qat",
    "steps": "steps of level 5, 20 to 100",
    "tests": "on or off: the conformance of the Bridge under test, before the levels",
}

PACKAGES = {"bridge": "megatron.bridge", "megatron": "megatron.core", "verl": "verl"}
"""What a change of this name must provide."""
FOOTPRINTS = {"cpu": Footprint(tmp_mb=100, tmp_inodes=1_000, shm_mb=100, ray=True), "gpu": Footprint(1_000, 5_000, 8_000, ray=True)}
"""Ray's logs and object store. Measured on a CPU: 2 MB and 110 files below /tmp, 2 MB in /dev/shm. On GPUs an estimate: weights and
batches of the small models of the levels pass through the store."""
PATHS = ("verl", "train_files", "val_files", "reward_model", "model_config")


@cache
def _levels(file: str) -> tuple[Level, ...]:
    return read_tables(HERE / file, "level", Level, beside=("concern", "surface"))


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


class Side(Protocol):
    """What each of the two modules provides; the contracts are those of the loop's methods of the same name."""

    DEFAULT_MODEL: str

    def levels(self, ladder: tuple[Level, ...], options: Mapping[str, str]) -> tuple[Level, ...]:
        """The ladder with these options."""

    def phases(self, level: Level, context: Context, directory: Path) -> tuple[Phase, ...]: ...

    def findings(self, context: Context) -> tuple[Finding, ...]: ...

    def limitations(self, level: Level, context: Context) -> tuple[str, ...]: ...

    def proofs(self, level: Level, directory: Path, metrics: Metrics) -> tuple[CheckResult, ...]: ...


class Verl(BaseLoop):
    """See `seatrial.core.loop.Loop` for the contract."""

    name = "verl"
    title = "verl"

    def __init__(self, options: Mapping[str, str] | None = None) -> None:
        given = options or {}
        require_known_options(self.title, OPTIONS, given)
        self.chosen: Mapping[str, str] = {name: str(Path(text).absolute()) if name in PATHS else text for name, text in given.items()}
        self.device = choice_option(self.chosen, "device", DEVICES)
        choice_option(self.chosen, "tests", ("on", "off"))
        strategy = choice_option(self.chosen, "strategy", STRATEGIES)
        self.side: Side = Cpu(strategy) if self.device == "cpu" else wrapper
        self.ladder = f"levels_{strategy}.toml" if self.device == "cpu" else "levels.toml"
        self.megatron = self.device == "gpu" or strategy == "megatron"
        self.default_model = self.side.DEFAULT_MODEL
        self.footprint = FOOTPRINTS[self.device]
        self.environment = ENVIRONMENT if self.device == "cpu" else None

    def options(self) -> Mapping[str, str]:
        """Those of both sides."""
        return OPTIONS

    def configured(self, options: Mapping[str, str]) -> Self:
        """The loop of the chosen device."""
        return type(self)(options)

    def checkouts(self) -> Mapping[str, Path]:
        """The verl checkout that is driven."""
        return {"verl": Path(self.chosen["verl"])} if "verl" in self.chosen else {}

    def environments(self) -> Mapping[str, Path]:
        """The pinned environment of the CPU side."""
        return {ENVIRONMENT: HERE / "verl-cpu.lock"}

    def interpreter(self) -> Path:
        """The Python that the wrapper will use."""
        return wrapper.interpreter(self.chosen)

    def import_path(self, context: Context) -> tuple[str, ...]:
        """The Megatron-LM of a Bridge under test, and the verl checkout."""
        return wrapper.import_path(context)

    def levels(self) -> tuple[Level, ...]:
        """The ladder of the device."""
        return self.side.levels(_levels(self.ladder), self.chosen)

    def concerns(self) -> tuple[Concern, ...]:
        """Those of levels.toml, which are about Megatron: FSDP2 uses none of it."""
        return _concerns() if self.megatron else ()

    def surfaces(self) -> tuple[Surface, ...]:
        """What verl imports from Megatron-Bridge."""
        return _surfaces() if self.megatron else ()

    def milestones(self) -> tuple[Milestone, ...]:
        """Those of milestones.toml."""
        return _milestones()

    def signatures(self) -> tuple[Signature, ...]:
        """Those of signatures.toml."""
        return _signatures()

    def faults(self) -> Mapping[str, Fault]:
        """Those of instruments/verl/verl_process.py, which act on the CPU side only."""
        return dict(FAULTS) if self.device == "cpu" else {}

    def instruments(self) -> tuple[Path, ...]:
        """Packages that run inside verl's processes."""
        return (HERE.parents[1] / "instruments" / "verl",)

    def phases(self, level: Level, context: Context, directory: Path) -> tuple[Phase, ...]:
        """The processes of one level."""
        return self.side.phases(level, context, directory)

    def findings(self, context: Context) -> tuple[Finding, ...]:
        """Changes that are what their names say, and what the device needs."""
        return (*wrong_names(context, PACKAGES), *self.side.findings(context))

    def side_tests(self, context: Context) -> tuple[SideTests, ...]:
        """The conformance of the Bridge or Megatron-LM under test; FSDP2 uses neither."""
        return conformance(context) if self.megatron else ()

    def limitations(self, level: Level, context: Context) -> tuple[str, ...]:
        """What this configuration leaves out."""
        return self.side.limitations(level, context)

    def shortfalls(self, level: Level, directory: Path) -> tuple[str, ...]:  # noqa: ARG002 - the contract
        """What the tables of knobs of its recorded runs say."""
        return limitations(sorted(path.parent for path in directory.rglob(FILE) if "attempts" not in path.parts))

    def metric_files(self, directory: Path) -> Mapping[str, tuple[Path, ...]]:
        """One metrics.jsonl per phase; a level with several phases tells them apart by prefix."""
        found = sorted(directory.glob("*/metrics.jsonl"))
        return {("" if path.parent.name == "run" else f"{path.parent.name}/"): (path,) for path in found}

    def read_console(self, log: Path) -> Metrics:
        """Metrics from the rows that verl prints."""
        return verl_log.read_console(log)

    def proofs(self, level: Level, directory: Path, metrics: Metrics) -> tuple[CheckResult, ...]:
        """What facts and the configuration in force prove."""
        return self.side.proofs(level, directory, metrics)

    def other_run(self, level: Level, log: Path) -> str | None:  # noqa: ARG002 - the contract
        """The configuration that the log shows must be that of the levels: Megatron through Megatron-Bridge, with LoRA."""
        return verl_log.other_run(log)

    def steps_reached(self, metrics: Metrics) -> int | None:
        """The least last step of all training runs."""
        return verl_log.steps_reached(metrics)

    def steps_planned(self, paths: tuple[Path, ...]) -> int | None:
        """What the configuration dump or the progress bar says."""
        return verl_log.steps_planned(paths)

    def signals(self) -> Signals:
        """Of verl."""
        return SIGNALS

    def not_exercised(self, log: Path) -> tuple[str, ...]:
        """Megatron and Megatron-Bridge, where another engine trained."""
        return verl_log.not_exercised(log)

    def vacuous(self, metrics: Metrics) -> Vacuity | None:
        """No spread of rewards, or no learning rate."""
        return verl_log.vacuous(metrics)

    def is_clock(self, metric: str) -> bool:
        """verl's own groups for times and throughput."""
        return is_clock(metric) or "/timing_" in metric

    def unseen(self, metrics: Metrics) -> str | None:
        """No gradient norm, or no rewards."""
        return verl_log.unseen(metrics)


LOOP = Verl()
