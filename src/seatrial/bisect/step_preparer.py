"""Prepares one run of one point: its directory, tree, patches and edits, environment and command.

- A step has a directory of its own, with a fresh place for its output and one for its checkpoints; nothing is shared with another run.
- What cannot be prepared is a skip with its reason; only a wrong request (a bad sed clause) is an error.
- Placeholders are filled in here and nowhere else. The command runs in the tree, without a shell.
- Nothing of the caller's environment may point the command at another checkout than its tree (PYTHONPATH, GIT_DIR and the like).
- `command.sh` repeats the run as it was. It holds no secret; what was left out for that is named, and a person exports it.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from seatrial.bisect.bisect_records import PLACEHOLDERS, BisectPlan, Failure, Mark, Pin, Point, SetupRecord, SkipKind, Stage, tree_variable
from seatrial.bisect.commit_history import exists
from seatrial.bisect.environment_cache import BisectEnvironments, ReadyEnvironment
from seatrial.bisect.git_stores import Stores, TreeError
from seatrial.bisect.lockfile import BuildFailed
from seatrial.bisect.worktrees import apply_edits, apply_patches, make_tree, remove_tree, unchanged
from seatrial.core.errors import UserError
from seatrial.core.files import read_model, write_json, write_text
from seatrial.core.guarded import real_path
from seatrial.evidence.git import is_ancestor, printable
from seatrial.evidence.redact import Redactor
from seatrial.evidence.repos import provided
from seatrial.runtime.process import Ended
from seatrial.trial.preflight import IGNORED, LAUNCHER
from seatrial.trial.run_dir import now

COMMAND, READY = "command.sh", "ready.json"
_PLACEHOLDER = re.compile(r"\{(" + "|".join(PLACEHOLDERS) + r")\}")
_OTHER_REPOSITORY = re.compile(r"GIT_(?!CONFIG|EXEC_PATH|SSH|ASKPASS|TERMINAL_PROMPT|AUTHOR|COMMITTER)")
"""Of git's variables, all that may name another repository, index or work tree than the one that a command runs in."""
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, slots=True)
class BisectStep:
    """One run of one point, and why it is made."""

    point: Point
    stage: Stage
    round: int
    history: int = 0
    measured: bool = False
    """Whether it must have its metric, as the good end must: without it there is nothing to judge, good or bad."""
    number: int = 0
    """Unique in a bisect, also over interruptions; 0 until the step has a directory."""
    directory: Path = Path()
    """`steps/<number>-<commit>` of the bisect directory; absolute."""

    @property
    def tree(self) -> Path:
        return self.directory / "tree"

    @property
    def output(self) -> Path:
        return self.directory / "output"

    @property
    def checkpoints(self) -> Path:
        """For what is large, and for nobody else."""
        return self.directory / "checkpoints"

    @property
    def trial(self) -> Path:
        return self.directory / "trial"

    @property
    def log(self) -> Path:
        return self.directory / "run.log"

    @property
    def command_file(self) -> Path:
        return self.directory / COMMAND

    @property
    def ready_file(self) -> Path:
        return self.directory / READY


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """The mark of one run, and why."""

    mark: Mark
    skip: SkipKind | None = None
    reason: str = ""
    value: float | str | None = None
    passed: bool | None = None
    failure: Failure | None = None
    exit_code: int | None = None
    transient: bool = False
    """Not the commit's doing: another try may give another result."""
    abort: str = ""
    """Why nothing can go on."""


@dataclass(frozen=True, slots=True)
class PreparedStep:
    """A step whose tree and environment are there, so that it can be run; or why it cannot be."""

    step: BisectStep
    argv: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    trial: bool = False
    stamp: float = 0.0
    """When command.sh was written, on the clock of the file system: before the command began."""
    withheld: tuple[str, ...] = ()
    """What command.sh lacks because it is secret: names of variables, and `the command`."""
    refused: Observation | None = None
    started: str = ""
    """UTC."""
    began: float = 0.0
    """The same in seconds since 1970."""
    environment: str = ""
    built: bool = False
    notes: tuple[str, ...] = ()
    unedited: tuple[str, ...] = ()
    """Files in which an edit changed nothing."""

    def facts(self, exit_code: int | None, ended: Ended, scheduler: str = "") -> RunFacts:
        return RunFacts(
            exit_code=exit_code,
            ended=ended,
            log=self.step.log,
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
    return PreparedStep(step, argv=argv, env=env, trial=plan.trial, stamp=stamp, environment=ready.key, built=ready.built)


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


STARTERS = ("env", "ionice", "nice", "nohup", "setsid", "stdbuf", "taskset", "time", "timeout")
_INTERPRETER = re.compile(r"(python|pypy)[\d.]*t?")
_SHIMS = "shims"
_READ = 4096


def foreign(words: Sequence[str], programs: Path, path: str) -> tuple[str, Path] | None:
    """The program of the command and where it lies, when it is Python's and of another environment than the one with `programs`."""
    for place, word in enumerate(words):
        found = None if "/" in word else shutil.which(word, path=path)
        if found is None and place:
            continue  # an option of a starter, or its value
        if found is None or (programs / word).exists():
            return None
        if word not in STARTERS:
            return (word, Path(found)) if _is_python(Path(found), programs) else None
    return None


def _is_python(program: Path, programs: Path) -> bool:
    if _INTERPRETER.fullmatch(program.name):
        return True
    try:
        with program.open("rb") as file:
            start = file.read(_READ)
    except OSError:
        return False  # it cannot be run, either
    if program.parent.name == _SHIMS:
        return not start.startswith(b"#!") or b"python" in start or b"pyenv" in start
    first, second = [*start.decode("utf-8", "replace").splitlines(), "", ""][:2]
    # The second line counts where pip had to write a shell program, since the path is too long for the kernel.
    words = first.removeprefix("#!").split() if first.startswith("#!") else []
    words += second.split() if second.startswith("'''exec'") else []
    interpreter = next((Path(word.strip("\"'")) for word in words if _INTERPRETER.fullmatch(Path(word.strip("\"'")).name)), None)
    # `env python` finds the interpreter of the environment, if that has one of this name.
    return interpreter is not None and not (str(interpreter) == interpreter.name and (programs / interpreter.name).exists())


Tell = Callable[[str], None]
_HIDE = "if the command does not need it, hide the word in a shell: -- sh -c '…'"


@dataclass(frozen=True, slots=True)
class StepPreparer:
    """Prepares steps, in several threads at once."""

    plan: BisectPlan
    stores: Stores
    environments: BisectEnvironments
    patches: Path
    tell: Tell
    named: Sequence[str] = ()
    """Files of the main repository that the command names."""

    def prepare(self, step: BisectStep) -> PreparedStep:
        """The step, ready to be run, or why it cannot be."""
        blank = PreparedStep(step, started=now(), began=time.time())
        step.directory.mkdir(parents=True, exist_ok=True)
        try:
            return self._prepare(step, blank)
        except TreeError as error:
            reason = f"{error.message}; {error.fix}" if error.fix else error.message
            return replace(blank, refused=skipped(error.kind, reason, transient=error.kind is SkipKind.ENVIRONMENT))
        except BuildFailed as error:
            kind = SkipKind.ENVIRONMENT if error.transient else SkipKind.BUILD_COMMAND if error.by_command else SkipKind.BUILD
            return replace(blank, refused=skipped(kind, error.message, transient=error.transient))

    def again(self, step: BisectStep) -> PreparedStep:
        """A step whose job was handed to a cluster by an earlier session: what it was begun with is read, and nothing is touched."""
        try:
            kept = read_model(step.ready_file, SetupRecord)
        except UserError as error:
            reason = f"its job outlived the Seatrial that began it, and what it was begun with is lost: {error.message}"
            return PreparedStep(step, started=now(), began=time.time(), refused=skipped(SkipKind.ENVIRONMENT, reason, transient=True))
        ready = ReadyEnvironment(Path(kept.python) if kept.python else None, kept.variables, kept.environment, kept.built)
        notes = (*kept.notes, "its job outlived the Seatrial that began it")
        made = begun(self.plan, step, ready, os.environ, kept.stamp)
        return replace(made, started=kept.started, began=kept.began, notes=notes, unedited=kept.unedited)

    def clear(self, step: BisectStep) -> None:
        """Remove what only the run needed."""
        remove_tree(self.stores, step.tree)

    def _prepare(self, step: BisectStep, blank: PreparedStep) -> PreparedStep:
        main = step.point.pins[0]
        absent = [file for file in self.named if not exists(self.stores.git_dir(main.repo), main.commit, file)]
        if absent and not self.plan.patches:
            raise TreeError(SkipKind.ABSENT, f"{absent[0]} does not exist at this commit", _HIDE)
        notes = list(make_tree(self.stores, step.point.pins, step.tree))
        notes += apply_patches(self.stores, step.tree, main.repo, self._patches(main), main.commit)
        for file in absent:  # a patch may bring the test that is asked about
            if not (step.tree / file).exists():
                raise TreeError(SkipKind.ABSENT, f"{file} does not exist at this commit, and no patch brings it", _HIDE)
        unedited = apply_edits(step.tree, self.plan.edits)
        notes += map(unchanged, unedited)
        deadline_s = 60 * self.plan.minutes
        ready = self.environments.ensure(step.tree, self.plan.environment, lambda text: self.tell(f"environment: {text}"), deadline_s)
        ready = self._with_others(step, ready)
        if self.plan.environment.build:
            self.environments.build(step.tree, self.plan.environment, ready, step.directory / "build.log", self.plan.minutes)
        self._refuse_a_foreign_program(ready)
        made = write_step(self.plan, step, ready, os.environ)
        kept = SetupRecord(
            started=blank.started,
            began=blank.began,
            stamp=made.stamp,
            python=str(ready.python) if ready.python else None,
            variables=ready.variables,
            environment=ready.key,
            built=ready.built,
            notes=tuple(notes),
            unedited=unedited,
        )
        write_json(step.ready_file, kept)
        return replace(made, started=blank.started, began=blank.began, notes=kept.notes, unedited=unedited)

    def _refuse_a_foreign_program(self, ready: ReadyEnvironment) -> None:
        """What runs with the packages of another environment says nothing of this one."""
        if self.plan.environment.kind == "none" or ready.python is None or self.plan.trial:
            return
        found = foreign((*self.plan.command, *self.plan.extra), ready.python.parent, ready.variables["PATH"])
        if found:
            name, place = found
            instead = "choose the version with --python" if name.startswith(("python", "pypy")) else f"add it with --with {name}"
            lock = self.plan.environment.lock
            message = f"{name} is not in the environment of {lock}, and {place} on PATH would run with the packages of another one"
            raise BuildFailed(f"{message}; {instead}, or use your own environment for all commits: --env none")

    def _patches(self, main: Pin) -> tuple[str, ...]:
        """The patches that a commit is to have; those that are files lie in the bisect directory."""
        git_dir = self.stores.git_dir(main.repo)
        wanted = [patch.source for patch in self.plan.patches if patch.since is None or is_ancestor(git_dir, patch.since, main.commit)]
        return tuple(str(self.patches / name) if (self.patches / name).is_file() else name for name in wanted)

    def _with_others(self, step: BisectStep, ready: ReadyEnvironment) -> ReadyEnvironment:
        """Other repositories come first on the import path, and a variable names the place of each. A submodule that is looked into
        is none of them: it must be found as in every other run."""
        names = {repo.name for repo in self.plan.repos}
        variables = dict(ready.variables)
        roots = []
        for pin in (pin for pin in step.point.pins[1:] if pin.repo in names):
            tree = real_path(step.tree / pin.place)
            variables[tree_variable(pin.repo)] = str(tree)
            roots.append(provided(tree)[0] or str(tree))
        path = [root for root in (*roots, variables.get("PYTHONPATH")) if root]
        return replace(ready, variables={**variables, "PYTHONPATH": os.pathsep.join(path)} if path else variables)


def skipped(kind: SkipKind, reason: str, *, transient: bool = False) -> Observation:
    return Observation(mark=Mark.SKIP, skip=kind, reason=reason, transient=transient)
