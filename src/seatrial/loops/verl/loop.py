"""verl: its own Megatron wrapper on GPUs, and real training of a tiny model on a CPU."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from seatrial.checks.step import level_limitations
from seatrial.core.loop import Context, Fault, Footprint, Loop, Measures, Option, Phase, SideTests
from seatrial.core.records import CheckResult, Finding
from seatrial.core.series import Metrics
from seatrial.core.specs import Concern, Level, Surface
from seatrial.instruments.verl.verl_process import FAULTS
from seatrial.loops.bridge_tests import conformance
from seatrial.loops.host_findings import wrong_names
from seatrial.loops.hydra import size_options
from seatrial.loops.verl import gpu_side, verl_checkout, verl_log
from seatrial.loops.verl.cpu_proofs import is_clock
from seatrial.loops.verl.cpu_runs import Cpu
from seatrial.loops.verl.cpu_settings import STRATEGIES
from seatrial.loops.verl.gpu_runs import ARCHITECTURES, GPUS, LEARNING_STEPS

ENVIRONMENT = "verl-cpu"
PACKAGES = {"bridge": "megatron.bridge", "megatron": "megatron.core", "verl": "verl"}
"""What a change of this name must provide."""
FOOTPRINTS = {"cpu": Footprint(tmp_mb=100, tmp_inodes=1_000, shm_mb=100, ray=True), "gpu": Footprint(1_000, 5_000, 8_000, ray=True)}
"""Ray's logs and object store. Measured on a CPU: 2 MB and 110 files below /tmp, 2 MB in /dev/shm. On GPUs an estimate: weights and
batches of the small models of the levels pass through the store."""


class Side(Protocol):
    """What each of the two modules provides; the contracts are those of the loop's methods of the same name."""

    DEFAULT_MODEL: str

    def levels(self, ladder: tuple[Level, ...], options: Mapping[str, str]) -> tuple[Level, ...]: ...

    def phases(self, level: Level, context: Context, directory: Path) -> tuple[Phase, ...]: ...

    def findings(self, context: Context) -> tuple[Finding, ...]: ...

    def limitations(self, level: Level, context: Context) -> tuple[str, ...]: ...

    def proofs(self, level: Level, directory: Path, metrics: Metrics) -> tuple[CheckResult, ...]: ...


class Verl(Loop):
    name = "verl"
    title = "verl"
    folder = Path(__file__).parent
    measures = Measures(
        signals=verl_log.SIGNALS,
        read_console=verl_log.read_console,
        steps_reached=verl_log.steps_reached,
        steps_planned=verl_log.steps_planned,
        vacuous=verl_log.vacuous,
        unseen=verl_log.unseen,
        is_clock=lambda metric: is_clock(metric) or "/timing_" in metric,
        other_run=verl_log.other_run,
        not_exercised=verl_log.not_exercised,
    )
    options = (
        Option("device", "gpu (verl's own wrapper) or cpu (a tiny model, here)", "choice", "gpu", ("gpu", "cpu")),
        Option("verl", "the verl checkout whose wrapper is driven; on a CPU it shadows the installed verl", "path"),
        Option("gpus", "GPUs of the host", "number", str(GPUS)),
        Option("strategy", "cpu: engine of actor and critic", "choice", STRATEGIES[0], STRATEGIES),
        Option("engine", "rollout engine: vllm or sglang", default="vllm"),
        Option("launcher", "how the wrapper starts Python: uv or python"),
        Option("train_files", "training data, a parquet file", "path"),
        Option("val_files", "validation data, a parquet file", "path"),
        Option("reward_model", "a local reward model; without one the rule reward is used", "path"),
        Option("model_config", "config.json of a dummy model with random weights", "path"),
        *size_options("level 2"),
        Option("architecture", "what level 4 is for", "choice", choices=ARCHITECTURES),
        Option("steps", "steps of level 5", "number", str(LEARNING_STEPS[0]), (), *LEARNING_STEPS),
        Option("tests", "the conformance of the Bridge under test, before the levels", "choice", "on", ("on", "off")),
    )

    def adjust(self) -> None:
        """The side of the chosen device."""
        self.device, strategy = self.option("device"), self.option("strategy")
        cpu = self.device == "cpu"
        self.side: Side = Cpu(strategy) if cpu else gpu_side
        self.ladder = f"levels_{strategy}.toml" if cpu else "levels.toml"
        self.megatron = not cpu or strategy == "megatron"
        self.default_model = self.side.DEFAULT_MODEL
        self.footprint = FOOTPRINTS[self.device]
        self.environment = ENVIRONMENT if cpu else None

    def checkouts(self) -> Mapping[str, Path]:
        return {"verl": Path(self.chosen["verl"])} if "verl" in self.chosen else {}

    def environments(self) -> Mapping[str, Path]:
        return {ENVIRONMENT: self.folder / "verl-cpu.lock"}

    def interpreter(self) -> Path:
        return verl_checkout.interpreter(self.chosen)

    def import_path(self, context: Context) -> tuple[str, ...]:
        return verl_checkout.import_path(context)

    def levels(self) -> tuple[Level, ...]:
        return self.side.levels(super().levels(), self.chosen)

    def concerns(self) -> tuple[Concern, ...]:
        """They are about Megatron: FSDP2 uses none of it."""
        return super().concerns() if self.megatron else ()

    def surfaces(self) -> tuple[Surface, ...]:
        return super().surfaces() if self.megatron else ()

    def faults(self) -> Mapping[str, Fault]:
        """They act on the CPU side only."""
        return dict(FAULTS) if self.device == "cpu" else {}

    def phases(self, level: Level, context: Context, directory: Path) -> tuple[Phase, ...]:
        return self.side.phases(level, context, directory)

    def findings(self, context: Context) -> tuple[Finding, ...]:
        return (*wrong_names(context, PACKAGES), *self.side.findings(context))

    def side_tests(self, context: Context) -> tuple[SideTests, ...]:
        return conformance(context) if self.megatron else ()

    def limitations(self, level: Level, context: Context) -> tuple[str, ...]:
        return self.side.limitations(level, context)

    def shortfalls(self, level: Level, directory: Path) -> tuple[str, ...]:  # noqa: ARG002 - the contract
        return level_limitations(directory)

    def proofs(self, level: Level, directory: Path, metrics: Metrics) -> tuple[CheckResult, ...]:
        return self.side.proofs(level, directory, metrics)


LOOP = Verl().configured({})
