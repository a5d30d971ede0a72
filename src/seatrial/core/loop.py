"""The Loop contract: the parts that a loop may have, each with a default, its options, and readers of its TOML tables.

`gather` runs several preflight checks; an error in one becomes a finding and hides none of the others.
"""

from __future__ import annotations

import copy
import difflib
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from subprocess import SubprocessError
from types import MappingProxyType
from typing import Any, Literal, Protocol, Self, TypeVar

from pydantic import ValidationError

from seatrial.core.errors import BlockedError, UserError
from seatrial.core.guarded import parse_step, parse_toml, read_file
from seatrial.core.records import CheckResult, Finding, LevelResult, Plan, Record, RepoState
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

    @classmethod
    def of(
        cls,
        plan: Plan,
        run_dir: Path,
        python: Path,
        environments: Mapping[str, Path] = MappingProxyType({}),
        arguments: tuple[str, ...] | None = None,
        options: Mapping[str, Any] = MappingProxyType({}),
    ) -> Context:
        """Of the levels that a plan runs. `arguments` are those as given, where the plan's are redacted; `options` go on top."""
        return cls(
            run_dir=run_dir,
            python=python,
            model=plan.model,
            levels=tuple(level.name for level in plan.levels if not level.skip),
            changes=plan.changes,
            arguments=plan.arguments if arguments is None else arguments,
            options={**plan.options, **options},
            environments=environments,
        )

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


OptionKind = Literal["text", "path", "number", "choice"]


@dataclass(frozen=True, slots=True)
class Option:
    """An option of a loop, as data: `--opt NAME=VALUE`, or `options.NAME` in seatrial.toml."""

    name: str
    help: str
    kind: OptionKind = "text"
    default: str = ""
    """What holds where it is not given; empty where that depends on the level, or where there is none."""
    choices: tuple[str, ...] = ()
    """Of a choice."""
    least: int = 1
    most: int | None = None
    """Limits of a number."""

    def read(self, text: str) -> str:
        """The value as it is stored: a path is absolute. A wrong one is a UserError that says what fits."""
        if self.kind == "path":
            return str(Path(text).absolute())
        if self.kind == "choice" and text not in self.choices:
            near = difflib.get_close_matches(text, self.choices, n=1) or self.choices
            raise UserError(f"options.{self.name} = {text!r}: not one of {', '.join(self.choices)}", f"use {' or '.join(near)}")
        if self.kind == "number":
            value = parse_step(text)
            if value is None or value < self.least or (self.most is not None and value > self.most):
                limits = f"from {self.least} to {self.most}" if self.most is not None else f"of at least {self.least}"
                raise UserError(f"options.{self.name} = {text!r}: not a whole number {limits}", f"use {self.default or self.least}")
        return text

    def describe(self) -> str:
        """One line for people."""
        values = {"choice": "|".join(self.choices), "number": f"{self.least}..{self.most or ''}"}.get(self.kind, self.kind.upper())
        return f"{self.name}={values}" + (f" (default: {self.default})" if self.default else "") + f"  {self.help}"


def read_options(title: str, known: Iterable[Option], given: Mapping[str, str]) -> dict[str, str]:
    """The options as they are stored; an unknown one is an error that lists the known ones."""
    by_name = {option.name: option for option in known}
    for name in given:
        if name not in by_name:
            close = difflib.get_close_matches(name, by_name, n=1)
            listed = f"known: {', '.join(by_name)}" if by_name else "it takes none"
            raise UserError(f"options.{name}: {title} has no such option; {listed}", f"use {close[0]}" if close else "leave it out")
    return {name: by_name[name].read(text) for name, text in given.items()}


CLOCKS = ("time", "timing", "second", "_per_s", "perf/", "throughput", "memory", "mfu")
"""Parts of names of metrics that measure the machine, where a loop does not say it better."""


def phase_metrics(directory: Path) -> dict[str, tuple[Path, ...]]:
    """One metrics.jsonl per phase; a level with several phases tells them apart by prefix."""
    found = sorted(directory.glob("*/metrics.jsonl"))
    return {("" if path.parent.name == "run" else f"{path.parent.name}/"): (path,) for path in found}


NO_SIGNALS = Signals(loss=(), grad_norm=(), rate=())


@dataclass(frozen=True, slots=True, kw_only=True)
class Measures:
    """What the metrics and logs of a loop mean. Each function has a default; most loops set `signals`, `vacuous` and `unseen`."""

    signals: Signals = NO_SIGNALS
    """Which metrics mean what: the data that the checks of any training run need."""
    metric_files: Callable[[Path], Mapping[str, tuple[Path, ...]]] = phase_metrics
    """Metric files of a level directory, by tag prefix ("" for none)."""
    read_console: Callable[[Path], Metrics] = lambda _: Metrics()
    """Metrics that the loop prints: the source of last resort when a log is all there is."""
    steps_reached: Callable[[Metrics], int | None] = Metrics.last_step
    """The step that every training run in these metrics reached."""
    steps_planned: Callable[[tuple[Path, ...]], int | None] = lambda _: None
    """How many steps the run was to take, if its own files say so."""
    log_interval: Callable[[tuple[Path, ...]], int | None] = lambda _: None
    """Steps between two logged rows, if the run's own files say so."""
    vacuous: Callable[[Metrics], Vacuity | None] = lambda _: None
    """Why this run could not have shown anything."""
    unseen: Callable[[Metrics], str | None] = lambda _: None
    """What a Pass would claim of any training run and these metrics do not show."""
    is_clock: Callable[[str], bool] = lambda metric: any(word in metric for word in CLOCKS)
    """Whether a metric measures the machine (time, throughput, memory), and so differs between equal runs."""
    tokens: Callable[[Path], Iterator[TokenRow]] = lambda _: iter(())
    """The sequences of a level with the log-probabilities of generator and trainer."""
    other_run: Callable[[Path], str | None] = lambda _: None
    """Why a log is of another run than the levels ask for; for logs of runs that Seatrial did not start."""
    not_exercised: Callable[[Path], tuple[str, ...]] = lambda _: ()
    """What the run of this log never used: limitations of a verdict on files."""


class Ladder:
    """Levels, milestones and signatures: by default those of the TOML files in `folder`."""

    folder: Path
    ladder: str = "levels.toml"

    def levels(self) -> tuple[Level, ...]:
        """The coverage ladder, by number."""
        return _table(self.folder / self.ladder, "level", Level)

    def concerns(self) -> tuple[Concern, ...]:
        """The table from a diff to levels, beside what the levels themselves say."""
        return _table(self.folder / "levels.toml", "concern", Concern)

    def surfaces(self) -> tuple[Surface, ...]:
        """What it imports from checkouts that may be under test."""
        return _table(self.folder / "levels.toml", "surface", Surface)

    def milestones(self) -> tuple[Milestone, ...]:
        """In the order in which a healthy run reaches them."""
        return _table(self.folder / "milestones.toml", "milestone", Milestone)

    def signatures(self) -> tuple[Signature, ...]:
        """Known failures of this loop; triage adds the general ones."""
        return _table(self.folder / "signatures.toml", "signature", Signature)


class Sources:
    """Where the loop's code comes from: by default the environment that `environment.lock` in its folder describes."""

    folder: Path
    environment: str | None = None
    """Which of its environments it runs in; None when it runs in the user's own."""

    def environments(self) -> Mapping[str, Path]:
        """The locks of all environments that `seatrial env build` makes for it, by name."""
        return {self.environment: self.folder / "environment.lock"} if self.environment else {}

    def interpreter(self) -> Path:
        """The Python of a loop that runs in the user's own environment; BlockedError when there is none."""
        raise BlockedError(Boundary.ENVIRONMENT, "the loop has no environment of its own", "name its Python with --python")

    def launcher(self) -> Path | None:
        """The loop's own Slurm script that starts Ray over several nodes, if it has one."""
        return None

    def checkouts(self) -> Mapping[str, Path]:
        """Checkouts that it drives without testing them, by name."""
        return {}

    def placed(self, changes: tuple[RepoState, ...]) -> tuple[RepoState, ...]:
        """The changes with where each is imported from, when not from its own checkout."""
        return changes

    def import_path(self, context: Context) -> tuple[str, ...]:
        """Directories that stand behind the checkouts under test on the import path."""
        return ()


class Checking:
    """What is checked before the levels, what their files prove, and what helps after a failure. Everything is empty by default."""

    # ruff: noqa: ARG002 - the contract

    def findings(self, context: Context) -> tuple[Finding, ...]:
        """Preflight findings that only this loop can make."""
        return ()

    def side_tests(self, context: Context) -> tuple[SideTests, ...]:
        """Tests of the change and of the loop that go before the levels."""
        return ()

    def proofs(self, level: Level, directory: Path, metrics: Metrics) -> tuple[CheckResult, ...]:
        """Checks over facts that are not metrics (weights, imports, resumes)."""
        return ()

    def own_checks(self, level: Level, directory: Path) -> tuple[CheckSpec, ...]:
        """Assertions that the loop's own scripts make about the run of a level, in the check language."""
        return ()

    def limitations(self, level: Level, context: Context) -> tuple[str, ...]:
        """What a Pass in this configuration must not be read as, beside what the level itself says."""
        return ()

    def shortfalls(self, level: Level, directory: Path) -> tuple[str, ...]:
        """What the run of a level did not exercise, computed from what it left: recorded as limitations."""
        return ()

    def isolations(self, result: LevelResult) -> tuple[Isolation, ...]:
        """Reruns that separate the suspects of a failed level; none when there is nothing to separate."""
        return ()

    def next_steps(self, result: LevelResult, context: Context) -> tuple[str, ...]:
        """What to do about a level that is no Pass, beyond what its diagnosis advises: with paths of this machine."""
        return ()


class Loop(Ladder, Sources, Checking, ABC):
    """An RL training framework that Seatrial drives from outside, with its options in force.

    A loop needs `name`, `title`, `default_model`, `folder` and `phases`. Every other part has a default, and a loop implements those
    that it has: `measures`, and the methods of `Ladder`, `Sources` and `Checking`.
    """

    name: str
    title: str
    default_model: str
    options: tuple[Option, ...] = ()
    chosen: Mapping[str, str] = MappingProxyType({})
    """The options in force, as they are stored."""
    footprint: Footprint = Footprint()
    measures: Measures = Measures()

    def configured(self, options: Mapping[str, str]) -> Self:
        """This loop with these options in force; an unknown one or a wrong value is a UserError."""
        made = copy.copy(self)
        made.chosen = read_options(self.title, self.options, options)
        made.adjust()
        return made

    def adjust(self) -> None:
        """Set what depends on the options in force."""

    def option(self, name: str) -> str:
        """The value in force: as given, or the default."""
        return self.chosen.get(name) or next(option.default for option in self.options if option.name == name)

    def takes(self, name: str) -> bool:
        """Whether it has an option of this name."""
        return any(option.name == name for option in self.options)

    @abstractmethod
    def phases(self, level: Level, context: Context, directory: Path) -> tuple[Phase, ...]:
        """The processes of one level, writing below `directory`."""

    def shown(self, level: Level, context: Context, directory: Path) -> tuple[str, ...]:
        """What the scripts behind the processes really start, assert and write, as far as it can be known beforehand."""
        return ()

    def faults(self) -> Mapping[str, Fault]:
        """Known bugs that can be injected: what each does, the levels that are to catch it, and the stage that names it."""
        return {}


R = TypeVar("R", bound=Record)


def read_tables(path: Path, table: str, kind: type[R], beside: tuple[str, ...] = ()) -> tuple[R, ...]:
    """All `[[table]]` entries of a file; an error names the file, the entry and the key. Tables `beside` it are for other readers."""
    try:
        data = parse_toml(read_file(path).decode("utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: {error}", "correct the file") from error
    unknown = sorted(set(data) - {table, *beside})
    found = data.get(table, [])
    if unknown or not isinstance(found, list) or not all(isinstance(entry, dict) for entry in found):
        raise UserError(f"{path}: unknown key {(unknown or [table])[0]!r}; only [[{table}]] entries are read", f"use [[{table}]]")
    entries = []
    for index, entry in enumerate(found, 1):
        try:
            entries.append(kind.model_validate(entry))
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(str(part) for part in first["loc"])
            name = entry.get("id", entry.get("name", "?"))
            raise UserError(f"{path}: {table} {index} ({name}): {key}: {first['msg']}", "correct the entry") from error
    return tuple(entries)


@cache
def _table(path: Path, table: str, kind: type[Any]) -> tuple[Any, ...]:
    beside = ("level", "concern", "surface") if path.name.startswith("levels") else ()
    return read_tables(path, table, kind, beside)


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


def finding(name: str, ok: bool, message: str, fix: str = "", boundary: Boundary = Boundary.ENVIRONMENT) -> Finding:
    """One preflight finding; the fix is said where it is not ok."""
    return Finding(name=name, ok=ok, boundary=boundary, message=message, fix="" if ok else fix)


def as_finding(error: BlockedError | UserError | OSError | SubprocessError, name: str = "check failed") -> Finding:
    """An error as the finding that blocks."""
    if isinstance(error, OSError | SubprocessError):
        return Finding(name=name, ok=False, message=f"a check could not be made: {error}", fix="see the message, then run it again")
    boundary = error.boundary if isinstance(error, BlockedError) else Boundary.CONFIG
    return Finding(name=name, ok=False, boundary=boundary, message=error.message, fix=error.fix)
