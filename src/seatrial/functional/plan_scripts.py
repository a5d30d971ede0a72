"""Plans a functional run: each script's command, the metrics it must leave, its time limit and cost; and the records of such a run."""

from __future__ import annotations

import importlib
import itertools
import re
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from types import ModuleType
from typing import Literal

from seatrial.core.errors import UserError
from seatrial.core.files import read_text
from seatrial.core.guarded import open_file
from seatrial.core.records import CheckResult, Diagnosis, Record
from seatrial.core.text import one_line
from seatrial.core.verdict import Boundary, Verdict
from seatrial.loops import HERE
from seatrial.loops.nightly_scripts import Asserted, Functional, describe_functional
from seatrial.metrics.checks import parse


def read_asserted(script: Path, cwd: Path) -> tuple[tuple[Asserted, ...], tuple[str, ...]]:
    """The metrics files that a script hands to a checker, with the expressions, and what mentions a checker and could not be read. A
    relative place is one below `cwd`."""
    checks: dict[str, list[str]] = {}
    unread = [one for module in _modules("script_reader.py") for one in _read(script, module, checks)]
    asserted = tuple(
        Asserted(metrics=None if "$" in written or "`" in written else cwd / written, written=written, checks=tuple(dict.fromkeys(found)))
        for written, found in checks.items()
    )
    return asserted, tuple(unread)


def _read(script: Path, module: ModuleType, checks: dict[str, list[str]]) -> list[str]:
    def seen(words: tuple[str, ...]) -> None:
        call = module.called(words)
        if call is not None and call.expressions:
            checks.setdefault(call.metrics, []).extend(call.expressions)

    unread: list[str] = module.read_calls(read_text(script), seen)
    return unread


def placed(own: tuple[Asserted, ...], place: Path) -> tuple[Asserted, ...]:
    """With the user's place for a file whose own cannot be told, or which is written relative to a directory that the script goes to. Only
    where one file fits: assertions about another one would be held against the wrong metrics."""
    fits = [one for one in own if one.metrics is None or _ends_with(place, one.written)]
    if len(fits) != 1:
        return own
    return tuple(Asserted(metrics=place, written=one.written, checks=one.checks, steps=one.steps) if one is fits[0] else one for one in own)


def _ends_with(place: Path, written: str) -> bool:
    parts = PurePosixPath(written).parts
    return place.parts[-len(parts) :] == parts


def with_floors(checks: tuple[str, ...]) -> tuple[str, ...]:
    """The checks, and the floors of the metrics that they are about."""
    floors = [
        module.FLOOR
        for module in _modules("nightly.py")
        if any(module.COMPARED in expr.replace("'", '"') for expr in checks)  # both quotes are names of the same metric
    ]
    return tuple(dict.fromkeys((*checks, *floors)))


def _modules(name: str) -> list[ModuleType]:
    """The file of this name of every loop that has one."""
    dotted = name.removesuffix(".py").replace("/", ".")
    loops = sorted(place.relative_to(HERE).parts[0] for place in HERE.glob(f"*/{name}"))
    return [importlib.import_module(f"seatrial.loops.{loop}.{dotted}") for loop in loops]


DEADLINE_MINUTES = 60.0
"""For a script that says nothing of its time."""
REPORTS = ("functional.json", "summary.md", "junit.xml", ".gitignore")
"""What stands beside the scripts' directories."""
SHOWN = 3
SHELLS = ("sh", "bash", "dash")
SUFFIXES = (".sh", ".bash")
WRAP = "give a shell script that calls it"
STEP_TAGS = ("train/loss", "loss")
"""Metrics that have a point at every step, of scripts that no loop knows."""
SKIPS = (re.compile(r"^\s*(?:\[[^\]]*\]\s*)?SKIP(?:PED)?\b\s*[:-]", re.IGNORECASE),)
"""How scripts say that they did nothing and exit with 0: `[failover] SKIP: needs 3 GPUs`."""

_GPUS = r"GPUs?\b(?!\s+memory)"
SAYS_SKIP = re.compile(
    r"(?<!\b0 )\bskip(?:s|ped|ping)?\b(?!\s*[:=]\s*0\b)"
    rf"|\b(?:not\s+enough|insufficient|too\s+few)\s+(?:\S+\s+){{0,3}}{_GPUS}"
    rf"|\bno\s+(?:\S+\s+)?{_GPUS}\s+(?:\S+\s+)?(?:found|available|detected|visible)\b"
    rf"|\b(?:requires?|needs?)\s+(?:\S+\s+){{0,5}}{_GPUS}"
    rf"|\b(?:required|needed)\s+{_GPUS}"
    rf"|\b{_GPUS}\s+(?:(?:is|are|were)\s+)?(?:not\s+enough|insufficient|required|needed)\b",
    re.IGNORECASE,
)
"""In the last line of a script whose exit code is all there is to judge by: it did nothing, though it does not say so in the form above."""
SAYS_PASSED = re.compile(r"\b[1-9]\d*\s+passed\b", re.IGNORECASE)
"""A summary such as `5 passed, 1 skipped`: something ran."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionalRequest:
    """The options of one call."""

    scripts: tuple[Path, ...]
    arguments: tuple[str, ...] = ()
    checks: tuple[str, ...] = ()
    metrics: Path | None = None
    steps: int | None = None
    steps_by: str | None = None
    deadline: float | None = None
    """Minutes, as the next one."""
    stall: float | None = None
    gpus: int | None = None
    gpu_hours: float | None = None
    exit_code_only: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedScript:
    name: str
    script: Path
    argv: tuple[str, ...]
    cwd: Path
    asserted: tuple[Asserted, ...]
    unread: tuple[str, ...] = ()
    """What may assert more and could not be read."""
    known: Functional | None
    minutes: float
    stall: float
    gpus: int | None
    step_tags: tuple[str, ...]
    exit_code_only: bool = False
    skips: tuple[re.Pattern[str], ...] = field(default=SKIPS)

    @property
    def gpu_hours(self) -> float | None:
        """What it may cost at most; None when nobody said how many GPUs it uses."""
        return None if self.gpus is None else self.gpus * self.minutes / 60

    @property
    def something_to_check(self) -> bool:
        """Whether an exit code of 0 can be held against anything. That a file exists is not enough."""
        return bool(self.unread) or any(one.checks or one.steps for one in self.asserted)

    @property
    def steps(self) -> int | None:
        return max((one.steps for one in self.asserted if one.steps), default=None)


def plan_scripts(asked: FunctionalRequest) -> tuple[PlannedScript, ...]:
    """All scripts; what cannot be run as asked is a UserError, before anything runs."""
    for expr in asked.checks:
        parse(expr)
    if not asked.scripts:
        raise UserError("no script is given", "seatrial functional run SCRIPT…")
    names: set[str] = set()
    made = []
    for script in asked.scripts:
        whole = script.absolute()
        if whole.is_dir():
            # Which of them are tests, and which are helpers, nobody can tell.
            found = sorted(str(file) for file in script.iterdir() if file.suffix in SUFFIXES and file.is_file())
            more = " …" if len(found) > SHOWN else ""
            fix = f"name scripts of it: {' '.join(found[:SHOWN])}{more}" if found else "name scripts; there is none in it that ends in .sh"
            raise UserError(f"{script}: is a directory", fix)
        if not whole.is_file():
            raise UserError(f"{script}: no such script", "check the path")
        _is_shell(whole)
        own = whole.stem if whole.stem.strip(".") else whole.name
        numbered = (own if number == 1 else f"{own}-{number}" for number in itertools.count(1))
        name = next(name for name in numbered if name not in names and name not in REPORTS)
        names.add(name)
        made.append(_plan_one(whole, name, asked))
    _within_budget(made, asked.gpu_hours)
    return tuple(made)


def _is_shell(script: Path) -> None:
    """A file of data or a Python program, given to bash, would fail line by line, or do what nobody meant."""
    try:
        with open_file(script) as stream:
            first = stream.readline(300)
    except OSError as error:
        raise UserError(f"{script}: {error.strerror}", "make it readable") from error
    words = first[2:].decode(errors="replace").split() if first.startswith(b"#!") else []
    if words and not any(word.rsplit("/", 1)[-1] in SHELLS for word in words[:3]):
        raise UserError(f"{script}: is no shell script: it begins with {one_line(first.decode(errors='replace'))}", WRAP)
    if not words and script.suffix not in SUFFIXES:
        raise UserError(f"{script}: is no shell script: its name does not end in .sh, and it does not begin with #!/bin/bash", WRAP)


def _plan_one(script: Path, name: str, asked: FunctionalRequest) -> PlannedScript:
    known = describe_functional(script, asked.arguments)
    minutes = asked.deadline or (known.minutes if known else None) or DEADLINE_MINUTES
    cwd = known.root if known else Path.cwd()
    own, unread = (known.asserted, known.unread) if known else read_asserted(script, cwd)
    if asked.metrics is not None and not known:
        own = placed(own, asked.metrics.absolute())
    tags = known.step_tags if known and known.step_tags else STEP_TAGS
    return PlannedScript(
        name=name,
        script=script,
        argv=("bash", str(script), *asked.arguments),
        cwd=cwd,
        asserted=tuple(replace(one, checks=with_floors(one.checks)) for one in _asserted(script, own, asked)),
        unread=unread,
        known=known,
        minutes=minutes,
        stall=asked.stall or minutes,
        gpus=asked.gpus if asked.gpus is not None else known.gpus if known else None,
        step_tags=(asked.steps_by,) if asked.steps_by else tags,
        exit_code_only=asked.exit_code_only,
        skips=(*SKIPS, *(known.skips if known else ())),
    )


def _asserted(script: Path, own: tuple[Asserted, ...], asked: FunctionalRequest) -> tuple[Asserted, ...]:
    """What the script asserts, with what the user adds."""
    if asked.metrics is not None:
        place = asked.metrics.absolute()
        same = [one for one in own if one.metrics == place]
        rest = tuple(one for one in own if one.metrics != place)
        first = same[0] if same else Asserted(metrics=place, written=str(asked.metrics))
    elif own:
        first, rest = own[0], own[1:]
    elif asked.checks or asked.steps:
        raise UserError(f"{script}: where it leaves its metrics is not known", "say so: --metrics FILE (or a directory)")
    else:
        return ()
    if asked.checks and rest and asked.metrics is None:
        raise UserError(f"{script}: it leaves {1 + len(rest)} metrics files", "name the one that --check is about: --metrics FILE")
    checks = tuple(dict.fromkeys((*first.checks, *asked.checks)))
    first = replace(first, checks=checks, steps=asked.steps or first.steps)
    if asked.steps and asked.metrics is None:
        rest = tuple(replace(one, steps=asked.steps) if one.steps else one for one in rest)
    return (first, *rest)


def _within_budget(made: list[PlannedScript], budget: float | None) -> None:
    if budget is None:
        return
    unknown = [one.script.name for one in made if one.gpu_hours is None]
    if unknown:
        raise UserError(f"--gpu-hours: how many GPUs {', '.join(unknown)} uses is not known", "say so with --gpus N (0 for none)")
    total = sum(one.gpu_hours or 0 for one in made)
    if total > budget:
        largest = sorted(made, key=lambda one: -(one.gpu_hours or 0))[:3]
        shown = ", ".join(f"{one.script.name} {one.gpu_hours:.3g}" for one in largest)
        fix = "raise the budget, shorten --deadline, or name fewer scripts"
        raise UserError(f"the plan may take {total:.4g} GPU hours, and --gpu-hours is {budget:g}; the largest: {shown}", fix)


VERSION = 1
Ended = Literal["exited", "deadline", "stalled", "interrupted", "not started"]


class ScriptResult(Record):
    """One script, judged."""

    name: str
    """Of its directory: the script's own name, with a number where two are alike."""
    script: str
    verdict: Verdict
    boundary: Boundary | None = None
    reason: str
    exit_code: int | None = None
    ended: Ended = "exited"
    seconds: float = 0
    steps: int | None = None
    """The last step that it had to reach; None when nobody said."""
    reached: int | None = None
    checks: tuple[CheckResult, ...] = ()
    gpus: int | None = None
    gpu_hours: float | None = None
    """Measured: seconds times GPUs."""
    notes: tuple[str, ...] = ()
    diagnosis: Diagnosis | None = None


class FunctionalRun(Record):
    """All scripts of one call."""

    version: int = VERSION
    id: str
    created: str
    seatrial: str
    verdict: Verdict
    results: tuple[ScriptResult, ...]
