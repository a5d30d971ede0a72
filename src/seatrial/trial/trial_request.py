"""From what a user asks for to a plan: configuration, checkouts under test, levels; and from a plan to a request that the runner takes.

The command line and `seatrial.api` both plan here. Rooms are imported when they are used, because every command imports this.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from seatrial.core.guarded import real_path
from seatrial.core.records import replace

if TYPE_CHECKING:
    from seatrial.core.config import Loaded
    from seatrial.core.loop import Fault, Loop
    from seatrial.core.records import Baseline, Plan, PlannedLevel, RepoState, Trial
    from seatrial.evidence.changes import Changes
    from seatrial.trial.plan import Diff, RequiredLevel
    from seatrial.trial.progress import Listener
    from seatrial.trial.runner import Request


@dataclass(frozen=True, slots=True)
class TrialRequest:
    loop: Loop
    plan: Plan
    diffs: tuple[Diff, ...]
    loaded: Loaded
    required: RequiredLevel | None = None
    """What the diffs ask for; None when the levels were not chosen from them."""

    @property
    def levels(self) -> tuple[PlannedLevel, ...]:
        return self.plan.levels


def load_config(
    file: Path | None,
    settings: Sequence[str] | None,
    loop: str | None = None,
    levels: str | None = None,
    model: str | None = None,
    changes: Sequence[str] | None = None,
    base: str | None = None,
    python: Path | None = None,
    arguments: Sequence[str] = (),
    options: Mapping[str, object] | None = None,
    no_base: bool = False,
) -> Loaded:
    """The configuration with the flags on top."""
    from seatrial.core.config import find_file, load
    from seatrial.core.errors import UserError

    if file is not None and not file.is_file():
        raise UserError(f"{file}: no such configuration file", "name an existing file with --config, or leave it out")
    flags = {
        "run.loop": loop,
        "run.levels": levels,
        "run.model": model,
        "run.arguments": list(arguments) or None,
        "change.paths": list(changes) if changes else None,
        "change.base": base,
        "change.run_base": False if no_base else None,
        "environment.python": (shutil.which(str(python)) or str(python)) if python else None,
        **{f"options.{name}": str(value) for name, value in (options or {}).items() if value is not None},
    }
    return load(file or find_file(Path.cwd()), settings or (), flags)


def named_path(text: str) -> tuple[str, Path]:
    """`NAME=PATH` or a path, which may hold a `=` itself."""
    name, separator, path = text.partition("=")
    return (name, Path(path)) if separator and not Path(text).exists() else ("", Path(text))


def checkouts(words: Sequence[str], base: str | None) -> tuple[tuple[RepoState, ...], list[Changes]]:
    """The checkouts under test, and what each differs in from its base."""
    from seatrial.evidence.changes import read_changes
    from seatrial.evidence.repos import repo_state, repo_states

    named = [named_path(text) for text in words]
    states = repo_states([path for _, path in named])
    states = tuple(repo_state(Path(state.path), name) if name else state for (name, _), state in zip(named, states, strict=True))
    changes = [read_changes(Path(state.path), base) for state in states]
    return tuple(_against(state, found) for state, found in zip(states, changes, strict=True)), changes


def ask(loaded: Loaded, auto: bool) -> TrialRequest:
    """Read the changes and choose the levels."""
    from seatrial.core.errors import UserError
    from seatrial.evidence.changes import changed_lines
    from seatrial.loops import get_loop
    from seatrial.trial import plan as known
    from seatrial.trial import plan as planning
    from seatrial.trial.plan import Diff

    config = loaded.config
    loop = get_loop(config.run.loop).configured(config.options)
    known.require_known(loop, config.known_issues, {name: loaded.origins[f"known_issues.{name}"] for name in config.known_issues})
    states, changes = checkouts(config.change.paths, config.change.base)
    numbers = planning.parse_levels(config.run.levels, loop) if config.run.levels is not None else None
    diffs: list[Diff] = []
    required: planning.RequiredLevel | None = None
    if auto:
        if not states:
            raise UserError("--auto needs a change to read", "name the checkout under test with --change PATH")
        for state, found in zip(states, changes, strict=True):
            paths = [name for item in found.paths for name in (item.path, item.old_path) if name]
            lines = changed_lines(Path(state.path), config.change.base)
            base = f"{found.base[:12]}: {found.base_reason}"
            diffs.append(Diff(state.name, base, tuple(paths), lines.lines, lines.complete, state.packages))
        required = planning.required(loop, diffs)
        levels = required.levels
        if numbers is not None:
            extra = [level for level in planning.requested(loop, numbers) if level.number not in {item.number for item in levels}]
            levels = tuple(sorted([*levels, *extra], key=lambda level: level.number))
    else:
        levels = planning.requested(loop, numbers)
    model = str(Path(config.run.model).absolute()) if config.run.model and Path(config.run.model).exists() else config.run.model
    states = loop.placed((*states, *_companions(loop, states)))
    plan = planning.make_plan(loop, levels, model, states, required, tuple(config.run.arguments), loop.chosen)
    plan = replace(plan, known_issues=dict(config.known_issues))
    return TrialRequest(loop, plan, tuple(diffs), loaded, required)


def _companions(loop: Loop, changes: Sequence[RepoState]) -> list[RepoState]:
    """The checkouts that the loop drives, unless they are under test; names are distinct, because they name files."""
    from seatrial.core.errors import UserError
    from seatrial.evidence.repos import repo_state

    found = [repo_state(path, name) for name, path in loop.checkouts().items()]
    under_test = {state.path for state in changes}
    driven = [replace(state, companion=True) for state in found if state.path not in under_test]
    for state in driven:
        if any(state.name.casefold() == change.name.casefold() for change in changes):
            message = f"--{state.name} and --change {state.name}= name two checkouts"
            raise UserError(message, f"leave out --{state.name}, or give both the same path")
    names = [state.name.casefold() for state in changes]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice:
        raise UserError(f"two changes are called {twice}", "give them distinct names: --change NAME=PATH")
    return driven


def _against(state: RepoState, found: Changes) -> RepoState:
    """A checkout with its base and the changed files that are there to be loaded; with neither when the base is a guess."""
    if found.is_guess():
        return state
    changed = tuple(item.path for item in found.paths if Path(state.path, item.path).is_file())
    return replace(state, changed=changed, base=found.base)


def require_fault(fault: str, loop: Loop, levels: Sequence[int]) -> None:
    """A fault that is unknown, or that no chosen level is to catch, is an error."""
    from seatrial.core.errors import UserError

    known = faults_of(loop)
    if fault not in known:
        raise UserError(f"unknown fault {fault!r}; known: {', '.join(known)}", f"seatrial run {loop.name} --fault list")
    places = known[fault].levels
    if not set(places).intersection(levels):
        raise UserError(f"the fault {fault} acts at level {', '.join(map(str, places))} only", f"add --level {places[0]}")


def faults_of(loop: Loop) -> Mapping[str, Fault]:
    """The faults that a loop can inject; a UserError where there are none."""
    from seatrial.core.errors import UserError

    known = loop.faults()
    if not known:
        cpu = f"seatrial run {loop.name} --device cpu --fault list" if loop.takes("device") else "leave --fault out"
        raise UserError(f"{loop.title} has no faults to inject here", cpu)
    return known


def runner_request(
    asked: TrialRequest, *, baseline: str | None, expect: Literal["identical"] | None, out: Path | None, fault: str | None, here: bool
) -> Request:
    """What the runner is asked to do; `here` is false for a trial that runs as a job of a cluster."""
    from seatrial.trial import run_dir
    from seatrial.trial.level import Limits
    from seatrial.trial.runner import Request

    config = asked.loaded.config
    return Request(
        plan=asked.plan,
        out=(real_path(out) if ".." in out.parts else out.absolute())
        if out
        else run_dir.new_path(Path(config.run.trials), asked.loop.name),
        python=Path(config.environment.python) if config.environment.python else None,
        limits=Limits(config.limits.deadline_minutes, config.limits.stall_minutes),
        options={"fault": fault} if fault else {},
        config={key: {"value": value, "origin": origin} for key, value, origin, _ in asked.loaded.rows()},
        baseline=_unchanged(asked.plan, baseline, expect, run_base=config.change.run_base, here=here, fault=fault is not None),
    )


def _unchanged(
    plan: Plan, named: str | None, expect: Literal["identical"] | None, *, run_base: bool, here: bool, fault: bool
) -> Baseline | None:
    """What the trial is compared with: what the user named, or the base of the change."""
    from seatrial.core.errors import UserError
    from seatrial.trial.base_worktrees import base_of
    from seatrial.trial.baseline import requested

    if expect and not named and not run_base:
        raise UserError("--expect needs something to compare with, and --no-base switches the base off", "leave one of them out")
    found = requested(named, plan, here=here) if named else base_of(plan, run=run_base, here=here, fault=fault)
    if expect and found is None:
        raise UserError("--expect needs a change", "name the checkout under test with --change PATH")
    return replace(found, expect=expect) if found else None


def run_request(asked: TrialRequest, wanted: Request, listener: Listener) -> Trial:
    """Run a trial here, and the base of its change beside it. One that was interrupted has the status `running`."""
    import os

    from seatrial.trial import baseline, preflight, run_dir, runner

    if asked.plan.levels:
        preflight.require_room(asked.loop, asked.plan, wanted.out, wanted.python, os.environ)
    run_dir.named_directory(wanted.out)
    return baseline.finish(wanted, runner.start(wanted, listener), listener)
