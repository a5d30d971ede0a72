"""Flags of `run`, `plan` and `doctor`, and the profile that `--on` names. Planning itself is `trial/trial_request.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from seatrial.trial.trial_request import load_config

if TYPE_CHECKING:
    from seatrial.core.config import Loaded
    from seatrial.core.jobs import Profile

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
Opt = Annotated[
    list[str] | None, typer.Option("--opt", metavar="NAME=VALUE", help="An option of the loop; repeat for several. `list` names them.")
]
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


def loaded_with(
    opt: Sequence[str] | None, flags: Mapping[str, object], settings: list[str] | None, config: Path | None, loop: str | None, **others: Any
) -> Loaded:
    """The configuration with flags on top. `flags` are those that are short for an option of a loop; `--opt list` ends here."""
    if opt and "list" in opt:
        from seatrial.loops import get_loop

        known = get_loop(load_config(config, settings, loop).config.run.loop)
        typer.echo("\n".join(option.describe() for option in known.options) or f"{known.title} takes no options")
        raise typer.Exit
    return load_config(config, settings, loop, options=given_options(opt, flags), **others)


def given_options(opt: Sequence[str] | None, flags: Mapping[str, object]) -> dict[str, object]:
    """The options of a loop that were given, by `--opt` and by the flags that are short for one."""
    from seatrial.core.errors import UserError

    options = {name: value for name, value in flags.items() if value is not None}
    for word in opt or ():
        name, separator, value = word.partition("=")
        if not separator or not name:
            raise UserError(f"--opt {word!r} is not of the form NAME=VALUE", "write --opt NAME=VALUE; --opt list names the options")
        if name in options:
            raise UserError(f"the option {name} is given twice", f"leave out --opt {word}")
        options[name] = value
    return options


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
