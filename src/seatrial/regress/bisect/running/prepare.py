"""From a point to something that can be run: its tree, what is changed in it, its environment, and the command.

- Whatever of this cannot be had is a skip with its reason; only what was asked wrongly (a bad sed clause) is an error.
- A file that the command names and that does not exist at this commit is a skip, before anything is made; unless a patch brings it.
- `clear` removes the trees of a step, whatever state they are in.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from seatrial.evidence.git import is_ancestor
from seatrial.evidence.packages import provided
from seatrial.files import read_model, write_json
from seatrial.model.errors import UserError
from seatrial.model.guarded import real_path
from seatrial.regress.bisect.environments.cache import BisectEnvironments, BuildFailed, Ready
from seatrial.regress.bisect.environments.programs import foreign
from seatrial.regress.bisect.history import exists
from seatrial.regress.bisect.judging.observe import Observation
from seatrial.regress.bisect.record import Mark, Outfit, Pin, Plan, SkipKind
from seatrial.regress.bisect.running.steps import Prepared, Step, begun, prepare, tree_variable
from seatrial.regress.bisect.trees.edits import apply_edits, apply_patches
from seatrial.regress.bisect.trees.making import make_tree, remove_tree
from seatrial.regress.bisect.trees.stores import Stores, TreeError
from seatrial.trial.rundir import now

Tell = Callable[[str], None]
_HIDE = "if the command does not need it, hide the word in a shell: -- sh -c '…'"


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What became of a step before its run."""

    step: Step
    started: str
    began: float
    prepared: Prepared | None = None
    refused: Observation | None = None
    """Set when it cannot be run."""
    environment: str = ""
    built: bool = False
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Kitchen:
    """Makes steps ready; several threads may ask at once."""

    plan: Plan
    stores: Stores
    environments: BisectEnvironments
    patches: Path
    tell: Tell
    named: Sequence[str] = ()
    """Files of the main repository that the command names."""

    def serve(self, step: Step) -> Served:
        """The step, ready to be run, or why it cannot be."""
        served = Served(step=step, started=now(), began=time.time())
        step.directory.mkdir(parents=True, exist_ok=True)
        try:
            return self._serve(step, served)
        except TreeError as error:
            reason = f"{error.message}; {error.fix}" if error.fix else error.message
            return replace(served, refused=_skip(error.kind, reason, transient=error.kind is SkipKind.ENVIRONMENT))
        except BuildFailed as error:
            return replace(served, refused=_skip(_kind(error), error.message, transient=error.transient))

    def again(self, step: Step) -> Served:
        """A step whose job was handed to a cluster by an earlier sitting: what it was begun with is read, and nothing is touched."""
        try:
            kept = read_model(step.ready_file, Outfit)
        except UserError as error:
            reason = f"its job outlived the Seatrial that began it, and what it was begun with is lost: {error.message}"
            return Served(step=step, started=now(), began=time.time(), refused=_skip(SkipKind.ENVIRONMENT, reason, transient=True))
        ready = Ready(Path(kept.python) if kept.python else None, kept.variables, kept.environment)
        return Served(
            step=step,
            started=kept.started,
            began=kept.began,
            prepared=begun(self.plan, step, ready, os.environ, kept.stamp),
            environment=kept.environment,
            built=kept.built,
            notes=(*kept.notes, "its job outlived the Seatrial that began it"),
        )

    def clear(self, step: Step) -> None:
        """Remove what only the run needed."""
        remove_tree(self.stores, step.tree)

    def _serve(self, step: Step, served: Served) -> Served:
        main = step.point.pins[0]
        absent = [file for file in self.named if not exists(self.stores.git_dir(main.repo), main.commit, file)]
        if absent and not self.plan.patches:
            raise TreeError(SkipKind.ABSENT, f"{absent[0]} does not exist at this commit", _HIDE)
        notes = list(make_tree(self.stores, step.point.pins, step.tree))
        notes += apply_patches(self.stores, step.tree, main.repo, self._patches(main), main.commit)
        for file in absent:  # a patch may bring the test that is asked about
            if not (step.tree / file).exists():
                raise TreeError(SkipKind.ABSENT, f"{file} does not exist at this commit, and no patch brings it", _HIDE)
        notes += apply_edits(step.tree, self.plan.edits)
        deadline_s = 60 * self.plan.minutes
        ready = self.environments.ensure(step.tree, self.plan.environment, lambda text: self.tell(f"environment: {text}"), deadline_s)
        ready = self._with_others(step, ready)
        if self.plan.environment.build:
            self.environments.build(step.tree, self.plan.environment, ready, step.directory / "build.log", self.plan.minutes)
        self._refuse_a_foreign_program(ready)
        made = prepare(self.plan, step, ready, os.environ)
        kept = Outfit(
            started=served.started,
            began=served.began,
            stamp=made.stamp,
            python=str(ready.python) if ready.python else None,
            variables=ready.variables,
            environment=ready.key,
            built=ready.built,
            notes=tuple(notes),
        )
        write_json(step.ready_file, kept)
        return replace(served, prepared=made, environment=ready.key, built=ready.built, notes=kept.notes)

    def _refuse_a_foreign_program(self, ready: Ready) -> None:
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

    def _with_others(self, step: Step, ready: Ready) -> Ready:
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
