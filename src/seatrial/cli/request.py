"""From flags to a plan: shared by `run`, `plan` and `doctor`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from seatrial.core.records import replace

if TYPE_CHECKING:
    from seatrial.core.config import Loaded
    from seatrial.core.jobs import Profile
    from seatrial.core.loop import Loop
    from seatrial.core.records import Plan, RepoState
    from seatrial.evidence.changes import Changes
    from seatrial.trial.plan import Diff, RequiredLevel

LoopName = Annotated[str | None, typer.Argument(metavar="LOOP", help="The loop to drive; trl unless seatrial.toml says otherwise.")]
Levels = Annotated[
    str | None, typer.Option("--level", "--levels", "-l", help="Levels, such as 0,1,6 or 0-2 or all. Default: the loop's own.")
]
Model = Annotated[
    str | None, typer.Option("--model", "-m", help="A local model directory (verl, nemo-rl: or a model id). Default: the loop's own.")
]
Device = Annotated[str | None, typer.Option("--device", help="verl: gpu drives its own wrapper, cpu trains a tiny model here.")]
Verl = Annotated[Path | None, typer.Option("--verl", metavar="PATH", help="verl: the checkout whose wrapper is driven.")]
NemoRl = Annotated[Path | None, typer.Option("--nemo-rl", metavar="PATH", help="nemo-rl: the checkout whose functionals are driven.")]
Change = Annotated[
    list[str] | None, typer.Option("--change", "-c", metavar="[NAME=]PATH", help="A checkout under test; repeat for several.")
]
Auto = Annotated[bool, typer.Option("--auto", help="Choose the levels from the diff of the changes.")]
Base = Annotated[
    str | None, typer.Option("--base", metavar="REV", help="Revision before the change. Default: the merge base with the main branch.")
]
NoBase = Annotated[bool, typer.Option("--no-base", help="Do not run the base beside the change; its failures then count as new.")]
Expect = Annotated[
    Literal["identical"] | None, typer.Option("--expect", help="identical: any difference from the base, bit by bit, is a Fail.")
]
Baseline = Annotated[
    str | None,
    typer.Option("--baseline", metavar="REV|RUN", help="Compare with this revision, or with a recorded trial, instead of the base."),
]
Python = Annotated[Path | None, typer.Option("--python", help="Interpreter of your own environment for the loop.")]
Set = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Set a configuration value, such as limits.stall_minutes=2.")
]
ConfigFile = Annotated[Path | None, typer.Option("--config", help="Configuration file. Default: the nearest seatrial.toml.")]
On = Annotated[
    str | None, typer.Option("--on", metavar="slurm:PROFILE", help="Run it as a Slurm job; [slurm.PROFILE] in seatrial.toml says how.")
]
Detach = Annotated[bool, typer.Option("--detach", help="With --on: do not follow the job; `seatrial attach` does that later.")]


@dataclass(frozen=True, slots=True)
class TrialRequest:
    """What the flags and the configuration ask for."""

    loop: Loop
    plan: Plan
    diffs: tuple[Diff, ...]
    loaded: Loaded
    required: RequiredLevel | None = None
    """What the diffs ask for; None when the levels were not chosen from them."""


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
        "environment.python": str(python) if python else None,
        **{f"options.{name}": str(value) for name, value in (options or {}).items() if value is not None},
    }
    return load(file or find_file(Path.cwd()), settings or (), flags)


def profile_named(loaded: Loaded, text: str) -> tuple[str, Profile]:
    """The profile that `slurm:NAME` names; `slurm` alone is the only one there is."""
    from seatrial.core.errors import UserError

    profiles = loaded.config.slurm
    kind, separator, name = text.partition(":")
    if kind != "slurm" or (separator and not name):
        fix = "write slurm:PROFILE, with a [slurm.PROFILE] section in seatrial.toml; leave out --on to run here"
        raise UserError(f"{text!r} names no place to run", fix)
    if not profiles:
        raise UserError(
            f"{text}: there is no profile in seatrial.toml of this directory or above",
            f'add a section, such as [slurm.{name or "main"}] with partition = "batch"',
        )
    if not separator and len(profiles) > 1:
        raise UserError(f"there are {len(profiles)} profiles: {', '.join(profiles)}", f"name one: slurm:{next(iter(profiles))}")
    name = name or next(iter(profiles))
    if name not in profiles:
        fix = f'name a known one, or add a section [slurm.{name}], for example with partition = "batch"'
        raise UserError(f"no profile is called {name!r}; known: {', '.join(profiles)}", fix)
    from seatrial.cli.input_files import refuse_secrets

    refuse_secrets(f"[slurm.{name}]", profiles[name])
    return name, profiles[name]


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
