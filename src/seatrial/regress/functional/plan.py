"""What a functional run is going to do: for each script its command, what it must leave, how long it may take, and what it costs.

- What a loop knows of a script (`loops.nightly`) comes first, else what its text asserts (`asserts`); options of the user add checks, and
  replace steps, metrics and GPUs.
- A script that leaves nothing to check is planned all the same: that its exit code says nothing is the verdict's business.
- GPU hours are GPUs times the deadline, or times the minutes that the script asks for. With a budget, GPUs must be known.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass, field, replace
from pathlib import Path

from seatrial.loops.nightly import Asserted, Functional, describe_functional
from seatrial.metrics.grammar import parse
from seatrial.model.errors import UserError
from seatrial.model.guarded import open_file
from seatrial.regress.functional.asserts import placed, read_asserted, with_floors
from seatrial.report.text import one_line

DEADLINE_MINUTES = 60.0
"""For a script that says nothing of its time."""
REPORTS = ("functional.json", "summary.md", "junit.xml", ".gitignore")
"""What stands beside the scripts' directories."""
SHOWN = 3
"""Scripts of a directory that a message names."""
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
class Asked:
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
class Planned:
    """One script."""

    name: str
    script: Path
    argv: tuple[str, ...]
    cwd: Path
    asserted: tuple[Asserted, ...]
    unread: tuple[str, ...] = ()
    """What may assert more and could not be read."""
    known: Functional | None
    minutes: float
    """The deadline."""
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
        """The last step that it must reach."""
        return max((one.steps for one in self.asserted if one.steps), default=None)


def plan(asked: Asked) -> tuple[Planned, ...]:
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
            raise UserError(f"{script}: is a directory", _scripts_in(script))
        if not whole.is_file():
            raise UserError(f"{script}: no such script", "check the path")
        _is_shell(whole)
        names.add(name := _free_name(whole, names))
        made.append(_plan_one(whole, name, asked))
    _within_budget(made, asked.gpu_hours)
    return tuple(made)


def _scripts_in(directory: Path) -> str:
    """How to name the scripts of a directory: which of them are tests, and which are helpers, nobody can tell."""
    found = sorted(str(file) for file in directory.iterdir() if file.suffix in SUFFIXES and file.is_file())
    more = " …" if len(found) > SHOWN else ""
    return f"name scripts of it: {' '.join(found[:SHOWN])}{more}" if found else "name scripts; there is none in it that ends in .sh"


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


def _free_name(script: Path, taken: set[str]) -> str:
    """The script's own name, with a number where a script or a report has it already."""
    own = script.stem if script.stem.strip(".") else script.name
    named = (own if number == 1 else f"{own}-{number}" for number in itertools.count(1))
    return next(name for name in named if name not in taken and name not in REPORTS)


def _plan_one(script: Path, name: str, asked: Asked) -> Planned:
    known = describe_functional(script, asked.arguments)
    minutes = asked.deadline or (known.minutes if known else None) or DEADLINE_MINUTES
    cwd = known.root if known else Path.cwd()
    read = known or read_asserted(script, cwd)
    own = known.asserted if known else _told(read.asserted, asked)
    tags = known.step_tags if known and known.step_tags else STEP_TAGS
    return Planned(
        name=name,
        script=script,
        argv=("bash", str(script), *asked.arguments),
        cwd=cwd,
        asserted=tuple(replace(one, checks=with_floors(one.checks)) for one in _asserted(script, own, asked)),
        unread=read.unread,
        known=known,
        minutes=minutes,
        stall=asked.stall or minutes,
        gpus=asked.gpus if asked.gpus is not None else known.gpus if known else None,
        step_tags=(asked.steps_by,) if asked.steps_by else tags,
        exit_code_only=asked.exit_code_only,
        skips=(*SKIPS, *(known.skips if known else ())),
    )


def _told(own: tuple[Asserted, ...], asked: Asked) -> tuple[Asserted, ...]:
    return own if asked.metrics is None else placed(own, asked.metrics.absolute())


def _asserted(script: Path, own: tuple[Asserted, ...], asked: Asked) -> tuple[Asserted, ...]:
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


def _within_budget(made: list[Planned], budget: float | None) -> None:
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
