"""Prepares a step: its tree, patches and edits, environment and command.

- What cannot be prepared is a skip with its reason; only a wrong request (a bad sed clause) is an error.
- A file that the command names and this commit lacks is a skip before anything is made, unless a patch brings it.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from seatrial.bisect.bisect_records import BisectPlan, Mark, Pin, SetupRecord, SkipKind
from seatrial.bisect.bisect_step import BisectStep, PreparedStep, begun, tree_variable, write_step
from seatrial.bisect.commit_history import exists
from seatrial.bisect.environment_cache import BisectEnvironments, BuildFailed, ReadyEnvironment
from seatrial.bisect.git_stores import Stores, TreeError
from seatrial.bisect.judge_run import Observation
from seatrial.bisect.worktrees import apply_edits, apply_patches, make_tree, remove_tree, unchanged
from seatrial.core.errors import UserError
from seatrial.core.files import read_model, write_json
from seatrial.core.guarded import real_path
from seatrial.evidence.git import is_ancestor
from seatrial.evidence.repos import provided
from seatrial.trial.run_dir import now

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


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSetup:
    """What became of a step before its run."""

    step: BisectStep
    started: str
    began: float
    prepared: PreparedStep | None = None
    refused: Observation | None = None
    """Set when it cannot be run."""
    environment: str = ""
    built: bool = False
    notes: tuple[str, ...] = ()
    unedited: tuple[str, ...] = ()
    """Files in which an edit changed nothing."""


@dataclass(frozen=True, slots=True)
class StepPreparer:
    """Makes steps ready; several threads may ask at once."""

    plan: BisectPlan
    stores: Stores
    environments: BisectEnvironments
    patches: Path
    tell: Tell
    named: Sequence[str] = ()
    """Files of the main repository that the command names."""

    def serve(self, step: BisectStep) -> StepSetup:
        """The step, ready to be run, or why it cannot be."""
        served = StepSetup(step=step, started=now(), began=time.time())
        step.directory.mkdir(parents=True, exist_ok=True)
        try:
            return self._serve(step, served)
        except TreeError as error:
            reason = f"{error.message}; {error.fix}" if error.fix else error.message
            return replace(served, refused=_skip(error.kind, reason, transient=error.kind is SkipKind.ENVIRONMENT))
        except BuildFailed as error:
            return replace(served, refused=_skip(_kind(error), error.message, transient=error.transient))

    def again(self, step: BisectStep) -> StepSetup:
        """A step whose job was handed to a cluster by an earlier session: what it was begun with is read, and nothing is touched."""
        try:
            kept = read_model(step.ready_file, SetupRecord)
        except UserError as error:
            reason = f"its job outlived the Seatrial that began it, and what it was begun with is lost: {error.message}"
            return StepSetup(step=step, started=now(), began=time.time(), refused=_skip(SkipKind.ENVIRONMENT, reason, transient=True))
        ready = ReadyEnvironment(Path(kept.python) if kept.python else None, kept.variables, kept.environment)
        return StepSetup(
            step=step,
            started=kept.started,
            began=kept.began,
            prepared=begun(self.plan, step, ready, os.environ, kept.stamp),
            environment=kept.environment,
            built=kept.built,
            notes=(*kept.notes, "its job outlived the Seatrial that began it"),
            unedited=kept.unedited,
        )

    def clear(self, step: BisectStep) -> None:
        """Remove what only the run needed."""
        remove_tree(self.stores, step.tree)

    def _serve(self, step: BisectStep, served: StepSetup) -> StepSetup:
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
            started=served.started,
            began=served.began,
            stamp=made.stamp,
            python=str(ready.python) if ready.python else None,
            variables=ready.variables,
            environment=ready.key,
            built=ready.built,
            notes=tuple(notes),
            unedited=unedited,
        )
        write_json(step.ready_file, kept)
        return replace(served, prepared=made, environment=ready.key, built=ready.built, notes=kept.notes, unedited=unedited)

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


def _kind(error: BuildFailed) -> SkipKind:
    if error.transient:
        return SkipKind.ENVIRONMENT
    return SkipKind.BUILD_COMMAND if error.by_command else SkipKind.BUILD


def _skip(kind: SkipKind, reason: str, *, transient: bool = False) -> Observation:
    return Observation(mark=Mark.SKIP, skip=kind, reason=reason, transient=transient)
