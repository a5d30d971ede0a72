"""The Loop contract: what the runner needs to know of a loop. Each folder under `loops/` provides one object of this shape.

`gather` runs several preflight checks; an error in one becomes a finding and hides none of the others.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import SubprocessError
from typing import Any, Literal, Protocol

from seatrial.core.errors import BlockedError, UserError
from seatrial.core.records import CheckResult, Finding, LevelResult, RepoState
from seatrial.core.series import Metrics, TokenRow
from seatrial.core.specs import CheckSpec, Concern, Level, Milestone, Signals, Signature, Surface
from seatrial.core.verdict import Boundary


class Fault(Protocol):
    """A known bug that a loop can inject into itself."""

    @property
    def text(self) -> str:
        """What it does."""

    @property
    def levels(self) -> tuple[int, ...]:
        """The levels that are to catch it."""

    @property
    def stage(self) -> str:
        """The stage of the step proof that names it at the first of these levels; empty: another check catches it."""


@dataclass(frozen=True, slots=True)
class Phase:
    """One process of a level, run to its end before the next."""

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables set on top of the caller's environment."""
    steps: int | None = None
    """Training steps this phase is to reach."""
    processes: tuple[str, ...] = ("driver",)
    """Process kinds that must each prove their imports."""
    cwd: Path | None = None
    """Working directory; None is a directory with nothing but the instruments in it."""
    beside: bool = False
    """Runs beside the change: nothing of it is on the import path."""


@dataclass(frozen=True, slots=True)
class Context:
    """What is fixed for a whole trial."""

    run_dir: Path
    python: Path
    """Interpreter of the loop's environment."""
    model: str
    """A path, or the name of a model the loop makes itself."""
    levels: tuple[str, ...] = ()
    """Names of the levels that will run."""
    changes: tuple[RepoState, ...] = ()
    arguments: tuple[str, ...] = ()
    """Loop arguments passed on verbatim."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The loop's options, and the fault to inject if there is one."""
    environments: Mapping[str, Path] = field(default_factory=dict)
    """Interpreters of generation engines whose environment is built, by the environment's name."""

    @property
    def has_python(self) -> bool:
        """Whether the interpreter exists; `doctor` also runs before it was built, and says so in a finding of its own."""
        return shutil.which(self.python) is not None

    def import_path(self) -> tuple[str, ...]:
        """Checkouts under test, in the order in which they shadow installed packages."""
        return tuple(r.import_root for r in self.changes if r.import_root and not r.companion and not r.synced)


@dataclass(frozen=True, slots=True)
class Vacuity:
    """Why a run could not have shown anything."""

    reason: str
    boundary: Boundary = Boundary.REWARD
    run: str = ""
    """The run of the level that it is about, by the prefix of its metrics; what another run missed is not excused by it."""


@dataclass(frozen=True, slots=True)
class SideTests:
    """Tests of one repository that go before the levels, as a deliverable of their own: by pytest, or a probe of ours."""

    key: str
    """Short, for a directory: `bridge`."""
    name: str
    """Of the deliverable: `Bridge-side checks`."""
    argv: tuple[str, ...] = ()
    """The command, up to and including its own options; files and `--junitxml`, or `--out` of a probe, are appended."""
    cwd: Path = Path()
    env: Mapping[str, str] = field(default_factory=dict)
    files: tuple[str, ...] = ()
    """Test files that exist, relative to `cwd`."""
    notes: tuple[str, ...] = ()
    """Test files that are missing, and what runs instead of one that was renamed."""
    skip: str | None = None
    """Why nothing can be run."""
    blocked: str | None = None
    """What this machine lacks to run it, and what helps: unlike what is skipped, it is to be run."""
    minutes: float = 30
    kind: Literal["pytest", "probe"] = "pytest"
    gate: bool = False
    """Whether its Fail ends the trial: nothing else runs then."""
    bases: tuple[tuple[RepoState, str], ...] = ()
    """The changes that a probe names as `NAME=PATH`, each with the commit before it: what fails there, too, ends no trial."""


@dataclass(frozen=True, slots=True)
class Isolation:
    """One rerun that separates a suspect of a failure from the rest."""

    name: str
    arguments: tuple[str, ...]
    """Loop arguments on top of the trial's own."""
    suspect: str
    """What a Pass of the rerun points to."""
    reduced: bool = False
    """The rerun switches an optimisation off: its Pass is a reduced-optimization pass, and no Pass of the level."""
    options: Mapping[str, str] = field(default_factory=dict)
    """Options of the loop on top of the trial's own."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """What a trial of a loop takes beside its run directory, as measured or as the loop's own documentation says."""

    tmp_mb: int = 100
    tmp_inodes: int = 1_000
    shm_mb: int = 0
    """Wanted in /dev/shm."""
    ray: bool = False
    """It starts a Ray of its own."""


class Loop(Protocol):
    """An RL training framework that Seatrial drives from outside, with its options in force."""

    name: str
    title: str
    default_model: str
    chosen: Mapping[str, str]
    """The options in force, as they are stored: paths are absolute."""
    footprint: Footprint
    environment: str | None
    """Which of its environments it runs in; None when it runs in the user's own."""

    def options(self) -> Mapping[str, str]:
        """The options it takes, each with its meaning."""

    def configured(self, options: Mapping[str, str]) -> Loop:
        """This loop with these options in force; an unknown one or a wrong value is a UserError."""

    def checkouts(self) -> Mapping[str, Path]:
        """Checkouts that it drives without testing them, by name."""

    def environments(self) -> Mapping[str, Path]:
        """The locks of all environments that `seatrial env build` makes for it, by name."""

    def interpreter(self) -> Path:
        """The Python of a loop that runs in the user's own environment; BlockedError when there is none."""

    def launcher(self) -> Path | None:
        """The loop's own Slurm script that starts Ray over several nodes, if it has one."""

    def placed(self, changes: tuple[RepoState, ...]) -> tuple[RepoState, ...]:
        """The changes with where each is imported from, when not from its own checkout."""

    def import_path(self, context: Context) -> tuple[str, ...]:
        """Directories that stand behind the checkouts under test on the import path."""

    def levels(self) -> tuple[Level, ...]:
        """The coverage ladder, by number."""

    def concerns(self) -> tuple[Concern, ...]:
        """The table from a diff to levels, beside what the levels themselves say."""

    def surfaces(self) -> tuple[Surface, ...]:
        """What it imports from checkouts that may be under test."""

    def milestones(self) -> tuple[Milestone, ...]:
        """In the order in which a healthy run reaches them."""

    def signatures(self) -> tuple[Signature, ...]:
        """Known failures of this loop; the general ones are added by triage."""

    def phases(self, level: Level, context: Context, directory: Path) -> tuple[Phase, ...]:
        """The processes of one level, writing below `directory`."""

    def shown(self, level: Level, context: Context, directory: Path) -> tuple[str, ...]:
        """What the scripts behind the processes of a level really start, assert and write, as far as it can be known beforehand."""

    def findings(self, context: Context) -> tuple[Finding, ...]:
        """Preflight findings that only this loop can make."""

    def limitations(self, level: Level, context: Context) -> tuple[str, ...]:
        """What a Pass in this configuration must not be read as, beside what the level itself says."""

    def shortfalls(self, level: Level, directory: Path) -> tuple[str, ...]:
        """What the run of a level did not exercise, computed from what it left: recorded as limitations."""

    def metric_files(self, directory: Path) -> Mapping[str, tuple[Path, ...]]:
        """Metric files of a level directory, by tag prefix ("" for none)."""

    def proofs(self, level: Level, directory: Path, metrics: Metrics) -> tuple[CheckResult, ...]:
        """What the probes proved: checks over facts that are not metrics (weights, imports, resumes)."""

    def own_checks(self, level: Level, directory: Path) -> tuple[CheckSpec, ...]:
        """Assertions that the loop's own scripts make about the run of a level, in the check language."""

    def side_tests(self, context: Context) -> tuple[SideTests, ...]:
        """Tests of the change and of the loop that go before the levels."""

    def isolations(self, result: LevelResult) -> tuple[Isolation, ...]:
        """Reruns that separate the suspects of a failed level; none when there is nothing to separate."""

    def next_steps(self, result: LevelResult, context: Context) -> tuple[str, ...]:
        """What to do about a level that is no Pass, beyond what its diagnosis advises: with paths of this machine."""

    def is_clock(self, metric: str) -> bool:
        """Whether a metric measures the machine (time, throughput, memory), and so differs between equal runs."""

    def tokens(self, directory: Path) -> Iterator[TokenRow]:
        """The sequences of a level with the log-probabilities of generator and trainer, if the loop wrote them."""

    def read_console(self, log: Path) -> Metrics:
        """Metrics that the loop prints on its console: the source of last resort when a log is all there is."""

    def other_run(self, level: Level, log: Path) -> str | None:
        """Why this log is of another run than the level asks for, or None; for logs of runs that Seatrial did not start."""

    def steps_reached(self, metrics: Metrics) -> int | None:
        """The step that every training run in these metrics reached."""

    def steps_planned(self, paths: tuple[Path, ...]) -> int | None:
        """How many steps the run was to take, if its own files say so."""

    def signals(self) -> Signals:
        """Which metrics mean what: the data that the checks of any training run need."""

    def log_interval(self, paths: tuple[Path, ...]) -> int | None:
        """Steps between two logged rows, if the run's own files say so."""

    def not_exercised(self, log: Path) -> tuple[str, ...]:
        """What the run of this log never used: limitations of a verdict on files."""

    def vacuous(self, metrics: Metrics) -> Vacuity | None:
        """Why this run could not have shown anything, or None."""

    def unseen(self, metrics: Metrics) -> str | None:
        """What a Pass would claim of any training run and these metrics do not show, or None."""

    def faults(self) -> Mapping[str, Fault]:
        """Known bugs that can be injected: what each does, the levels that are to catch it, and the stage that names it."""

    def instruments(self) -> tuple[Path, ...]:
        """Packages of this loop that run inside its interpreter and are staged into the run directory."""


Check = Callable[[], Finding | Iterable[Finding]]


def gather(*checks: Check) -> tuple[Finding, ...]:
    """The findings of all checks, in their order, each once."""
    made: list[Finding] = []
    for check in checks:
        try:
            found = check()
            made += [found] if isinstance(found, Finding) else found
        except (BlockedError, UserError, OSError, SubprocessError) as error:
            made.append(as_finding(error))
    return tuple(dict.fromkeys(made))


def as_finding(error: BlockedError | UserError | OSError | SubprocessError, name: str = "check failed") -> Finding:
    """An error as the finding that blocks."""
    if isinstance(error, OSError | SubprocessError):
        return Finding(name=name, ok=False, message=f"a check could not be made: {error}", fix="see the message, then run it again")
    boundary = error.boundary if isinstance(error, BlockedError) else Boundary.CONFIG
    return Finding(name=name, ok=False, boundary=boundary, message=error.message, fix=error.fix)
