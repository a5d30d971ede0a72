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
from seatrial.regress.bisect.environments.cache import BisectEnvironments, BuildFailed, Ready
from seatrial.regress.bisect.history import exists
from seatrial.regress.bisect.judging.observe import Observation
from seatrial.regress.bisect.record import Mark, Pin, Plan, SkipKind
from seatrial.regress.bisect.running.steps import Prepared, Step, prepare, tree_variable
from seatrial.regress.bisect.trees.edits import apply_edits, apply_patches
from seatrial.regress.bisect.trees.making import make_tree, remove_tree
from seatrial.regress.bisect.trees.stores import Stores, TreeError
from seatrial.trial.rundir import now

Tell = Callable[[str], None]


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
            kind = SkipKind.ENVIRONMENT if error.transient else SkipKind.BUILD
            return replace(served, refused=_skip(kind, error.message, transient=error.transient))

    def again(self, step: Step) -> Served:
        """A step whose job was handed to a cluster by an earlier sitting: its tree is there, and is left as it is."""
        served = Served(step=step, started=now(), began=time.time())
        ready = self.environments.ensure(step.tree, self.plan.environment, lambda _: None, 60 * self.plan.minutes)
        made = prepare(self.plan, step, self._with_others(step, ready), os.environ)
        return replace(served, prepared=made, environment=ready.key, notes=("its job outlived the Seatrial that began it",))

    def clear(self, step: Step) -> None:
        """Remove what only the run needed."""
        remove_tree(self.stores, step.tree)

    def _serve(self, step: Step, served: Served) -> Served:
        main = step.point.pins[0]
        absent = [file for file in self.named if not exists(self.stores.git_dir(main.repo), main.commit, file)]
        if absent and not self.plan.patches:
            raise TreeError(SkipKind.MISSING, f"{absent[0]} does not exist at this commit")
        notes = list(make_tree(self.stores, step.point.pins, step.tree))
        notes += apply_patches(self.stores, step.tree, main.repo, self._patches(main), main.commit)
        for file in absent:  # a patch may bring the test that is asked about
            if not (step.tree / file).exists():
                raise TreeError(SkipKind.MISSING, f"{file} does not exist at this commit, and no patch brings it")
        notes += apply_edits(step.tree, self.plan.edits)
        deadline_s = 60 * self.plan.minutes
        ready = self.environments.ensure(step.tree, self.plan.environment, lambda text: self.tell(f"environment: {text}"), deadline_s)
        ready = self._with_others(step, ready)
        if self.plan.environment.build:
            self.environments.build(step.tree, self.plan.environment, ready, step.directory / "build.log", self.plan.minutes)
        return replace(
            served,
            prepared=prepare(self.plan, step, ready, os.environ),
            environment=ready.key,
            built=ready.built,
            notes=tuple(notes),
        )

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
            tree = (step.tree / pin.place).resolve()
            variables[tree_variable(pin.repo)] = str(tree)
            roots.append(provided(tree)[0] or str(tree))
        path = [root for root in (*roots, variables.get("PYTHONPATH")) if root]
        return replace(ready, variables={**variables, "PYTHONPATH": os.pathsep.join(path)} if path else variables)


def _skip(kind: SkipKind, reason: str, *, transient: bool = False) -> Observation:
    return Observation(mark=Mark.SKIP, skip=kind, reason=reason, transient=transient)
