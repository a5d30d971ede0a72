"""One run of one point: where its files are, what exactly is run, and what is known when it has ended.

- A step has a directory of its own, with a fresh place for its output and one for its checkpoints; nothing is shared with another run.
- Placeholders are filled in here and nowhere else. The command runs in the tree, without a shell.
- Nothing of the caller's environment may point the command at another checkout than its tree (PYTHONPATH, GIT_DIR and the like).
- `command.sh` repeats the run as it was. It holds no secret; what was left out for that is named, and a person exports it.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from seatrial.bisect.bisect_records import PLACEHOLDERS, BisectPlan, Point, Stage
from seatrial.core.errors import UserError
from seatrial.core.files import write_text
from seatrial.evidence.git import printable
from seatrial.evidence.redact import Redactor
from seatrial.runtime.process import Ended
from seatrial.trial.preflight import IGNORED, LAUNCHER

if TYPE_CHECKING:
    from seatrial.bisect.environment_cache import ReadyEnvironment

COMMAND, READY = "command.sh", "ready.json"
_PLACEHOLDER = re.compile(r"\{(" + "|".join(PLACEHOLDERS) + r")\}")
_OTHER_REPOSITORY = re.compile(r"GIT_(?!CONFIG|EXEC_PATH|SSH|ASKPASS|TERMINAL_PROMPT|AUTHOR|COMMITTER)")
"""Of git's variables, all that may name another repository, index or work tree than the one that a command runs in."""
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class BisectStep:
    """One run that is to be made."""

    number: int
    """Unique in a bisect, also over interruptions."""
    point: Point
    stage: Stage
    round: int
    directory: Path
    """`steps/<number>-<commit>` of the bisect directory; absolute."""

    @property
    def tree(self) -> Path:
        return self.directory / "tree"

    @property
    def output(self) -> Path:
        """For what the command leaves behind."""
        return self.directory / "output"

    @property
    def checkpoints(self) -> Path:
        """For what is large, and for nobody else."""
        return self.directory / "checkpoints"

    @property
    def trial(self) -> Path:
        """The run directory, in trial mode."""
        return self.directory / "trial"

    @property
    def log(self) -> Path:
        """Standard output and error of the command."""
        return self.directory / "run.log"

    @property
    def command_file(self) -> Path:
        return self.directory / COMMAND

    @property
    def ready_file(self) -> Path:
        return self.directory / READY


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedStep:
    """A step that can be run: its tree and its environment are there."""

    step: BisectStep
    argv: tuple[str, ...]
    env: Mapping[str, str]
    """The whole environment."""
    cwd: Path
    log: Path
    trial: bool = False
    stamp: float
    """When command.sh was written, on the clock of the file system: before the command began."""
    withheld: tuple[str, ...] = ()
    """What command.sh lacks because it is secret: names of variables, and `the command`."""

    def facts(self, exit_code: int | None, ended: Ended, scheduler: str = "") -> RunFacts:
        return RunFacts(
            exit_code=exit_code,
            ended=ended,
            log=self.log,
            started=self.stamp,
            tree=self.step.tree,
            output=self.step.output,
            trial=self.step.trial if self.trial else None,
            scheduler=scheduler,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What is known of a run that has ended, before anybody judges it."""

    exit_code: int | None
    """128 + signal when a signal ended the command; None when it did not end by itself."""
    ended: Ended
    """`interrupted`: Seatrial ended it, because it was stopped or the run no longer matters. It says nothing about its point."""
    log: Path
    started: float
    """On the clock of the file system: a file of the tree that is older was not written by this run."""
    tree: Path
    output: Path
    trial: Path | None = None
    scheduler: str = ""
    """Why the cluster ended it, when it did: nothing that the command did or left counts then."""


def step_command(plan: BisectPlan, step: BisectStep, ready: ReadyEnvironment) -> tuple[str, ...]:
    asked = [_fill(word, step, ready) for word in (*plan.command, *plan.extra)]
    if not plan.trial:
        return tuple(asked)
    # The tree is what is under test, unless the user says as what it is: `--change name={tree}/part`, or an option of a loop.
    named = any("{tree}" in word for word in (*plan.command, *plan.extra))
    change = () if named else ("--change", str(step.tree))
    # Each point is judged by itself: which commit made the difference is what the bisect finds out.
    return (sys.executable, "-P", "-m", "seatrial.cli.main", "run", "--no-base", "--out", str(step.trial), *change, *asked)


def step_variables(plan: BisectPlan, step: BisectStep, ready: ReadyEnvironment, base: Mapping[str, str]) -> dict[str, str]:
    """The whole environment of a step; `base` is the caller's."""
    return {**{name: value for name, value in base.items() if not _misleads(name)}, **_added(plan, step, ready)}


def tree_variable(repo: str) -> str:
    """The variable that names the place of a further repository."""
    return "SEATRIAL_TREE_" + re.sub(r"[^A-Z0-9_]", "_", repo.upper())


def write_step(plan: BisectPlan, step: BisectStep, ready: ReadyEnvironment, base: Mapping[str, str]) -> PreparedStep:
    """Make the directories of a step and write command.sh. Its tree is there already, with everything that is changed in it."""
    for place in (step.output, step.checkpoints):
        place.mkdir(parents=True, exist_ok=True)
    argv, added = step_command(plan, step, ready), _added(plan, step, ready)
    dropped = sorted(name for name in base if _misleads(name) and name not in added)
    text, withheld = _script(step, argv, added, dropped, Redactor({**base, **added}))
    write_text(step.command_file, text)
    # A value that the caller has exported reaches the command in any case.
    lacking = tuple(name for name in withheld if base.get(name) != added.get(name) or name not in added)
    return replace(begun(plan, step, ready, base, step.command_file.stat().st_mtime), withheld=lacking)


def begun(plan: BisectPlan, step: BisectStep, ready: ReadyEnvironment, base: Mapping[str, str], stamp: float) -> PreparedStep:
    """A step whose command.sh was written at `stamp`; nothing is written."""
    argv, env = step_command(plan, step, ready), step_variables(plan, step, ready, base)
    return PreparedStep(step=step, argv=argv, env=env, cwd=step.tree, log=step.log, trial=plan.trial, stamp=stamp)


def _added(plan: BisectPlan, step: BisectStep, ready: ReadyEnvironment) -> dict[str, str]:
    """What a step's environment has beside the caller's. What the user set wins over what the environment of the commit sets."""
    made = dict(ready.variables)
    if plan.trial:
        made.pop("PYTHONPATH", None)  # it is Seatrial that runs, and the tree may hold another one
    for name, value in plan.variables.items():
        if not _NAME.fullmatch(name):
            raise UserError(f"{name!r} is not the name of a variable", "name variables with letters, digits and underscores")
        made[name] = _fill(value, step, ready)
    places = {"TREE": step.tree, "OUTPUT": step.output, "CHECKPOINTS": step.checkpoints, "COMMIT": step.point.commit}
    return {**made, **{f"SEATRIAL_{name}": str(value) for name, value in places.items()}}


def _misleads(name: str) -> bool:
    return name in IGNORED or name in LAUNCHER or _OTHER_REPOSITORY.match(name) is not None


def _fill(text: str, step: BisectStep, ready: ReadyEnvironment) -> str:
    values = {
        "tree": str(step.tree),
        "output": str(step.output),
        "checkpoints": str(step.checkpoints),
        "commit": step.point.commit,
        "python": str(ready.python or sys.executable),
    }
    return _PLACEHOLDER.sub(lambda match: values[match[1]], text)


def _script(
    step: BisectStep, argv: Sequence[str], added: Mapping[str, str], dropped: Sequence[str], redactor: Redactor
) -> tuple[str, tuple[str, ...]]:
    """The run as a script, and the names of what it lacks."""
    secret = [name for name, value in added.items() if redactor.text(f"{name}={value}") != f"{name}={value}"]
    command = shlex.join(argv)
    shown = redactor.text(command)
    lines = ["#!/bin/bash", f"# Run {step.number} of {step.point.commit}: {redactor.text(printable(step.point.subject))}"]
    lines += [f"# {name} is a secret and not written here: export it first." for name in secret]
    lines += ["# The command holds a secret, which is not written here: put it in."] if shown != command else []
    gone = f"{step.tree} is not there: it was removed after the run. Put a checkout of {step.point.commit} there."
    lines.append(f"cd -- {shlex.quote(str(step.tree))} || {{ echo {shlex.quote(gone)} >&2; exit 125; }}")
    lines += [f"unset {' '.join(dropped)}"] if dropped else []
    lines += [f"export {name}={shlex.quote(value)}" for name, value in sorted(added.items()) if name not in secret]
    withheld = (*secret, *(("the command",) if shown != command else ()))
    return "\n".join([*lines, f"exec {shown}", ""]), withheld
