"""`seatrial hermetic`: the same command in a container, or in a fresh environment of its own."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Callable

    from seatrial.functional.hermetic import ExecutionPlace

SCRATCH = "seatrial-log-"
Image = Annotated[str | None, typer.Option("--image", help="Run in a container of this image.")]
EngineName = Annotated[str | None, typer.Option("--engine", help="docker, podman or enroot; default: the first that answers.")]
Env = Annotated[list[str] | None, typer.Option("--env", help="Pass this variable on, by its name; repeat for several.")]
Mounts = Annotated[list[str] | None, typer.Option("--mount", help="SRC:DST or SRC:DST:ro, beside the project; repeat for several.")]
With = Annotated[
    list[str] | None, typer.Option("--with", help="A requirement beside the lock, in a fresh environment; repeat for several.")
]
Keep = Annotated[bool, typer.Option("--keep", help="Do not delete the fresh environment afterwards.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What was given of the options above."""

    image: str | None
    engine: str | None
    env: list[str] | None
    mounts: list[str] | None
    packages: list[str] | None
    keep: bool


def make_place(given: Options, projects: tuple[Path, ...], tell: Callable[[str], None], *, fresh: bool = True) -> ExecutionPlace:
    """The place that the options describe; without an image, `fresh` says whether it is a new environment. What cannot be together is a
    UserError."""
    from seatrial.core.errors import UserError
    from seatrial.functional import hermetic as places

    names = places.environment_names(given.env or [])
    if given.image is not None:
        if given.packages or given.keep:
            raise UserError("--with and --keep are about a fresh environment, and --image asks for a container", "leave them out")
        mounts = (*places.own_mounts(*projects), *map(places.parse_mount, given.mounts or []))
        return places.Container(places.make_box(places.choose_engine(given.engine), given.image, mounts, names))
    if given.engine or given.mounts:
        raise UserError("--engine and --mount are about a container", "give --image IMAGE")
    if not fresh:
        if names or given.packages or given.keep:
            raise UserError("--env, --with and --keep are about a container or a fresh environment", "give --hermetic or --image IMAGE")
        return places.ExecutionPlace()
    if len(set(projects)) != 1:
        raise UserError("a fresh environment is that of one project", "run the scripts of each project by themselves")
    return places.Fresh(projects[0], names, tuple(given.packages or ()), keep=given.keep, tell=tell)


def without_secrets() -> Callable[[tuple[str, ...]], tuple[str, ...]]:
    import os

    from seatrial.evidence.redact import Redactor

    redactor = Redactor(os.environ)
    return lambda words: tuple(redactor.value(words))


def hermetic(
    context: typer.Context,
    image: Image = None,
    engine: EngineName = None,
    env: Env = None,
    mount: Mounts = None,
    packages: With = None,
    keep: Keep = False,
    show: Annotated[bool, typer.Option("--show", help="Print what would run, and stop.")] = False,
    deadline: Annotated[float, typer.Option("--deadline", min=0.01, help="Minutes after which the command is ended.")] = 60.0,
    log: Annotated[Path | None, typer.Option("--log", help="Keep the output in this file, too.")] = None,
) -> None:
    """Run the command after `--` in a container (--image), or in a fresh environment from the project's lock:
    seatrial hermetic -- pytest tests/unit

    The exit code is the command's, and the last line says so; else 99 when it could not be started, 1 when --deadline passed.
    """
    from seatrial.core.errors import UserError
    from seatrial.core.verdict import ExitCode
    from seatrial.functional.hermetic import end_earlier, run_in
    from seatrial.runtime.interrupt import Interruptible
    from seatrial.runtime.process import pid_file

    command: tuple[str, ...] = context.obj or ()
    if not command:
        raise UserError("no command is given", "put it after --: seatrial hermetic -- pytest tests/unit")
    cwd = Path.cwd()
    options = Options(image=image, engine=engine, env=env, mounts=mount, packages=packages, keep=keep)
    place = make_place(options, (cwd,), tell)
    for line in place.shown(without_secrets()(command), cwd):
        tell(line)
    if show:
        return
    kept = [pid_file(log.absolute())] if log else []
    end_earlier([*kept, *Path(tempfile.gettempdir()).glob(f"{SCRATCH}*/run.log.pids")], tell)
    with Interruptible() as stop, tempfile.TemporaryDirectory(prefix=SCRATCH) as scratch, place:
        outcome = run_in(place, command, cwd, log.absolute() if log else Path(scratch) / "run.log", deadline, typer.echo)
    for note in place.notes:
        tell(note)
    stop.check()
    if outcome.ended == "deadline":
        tell(f"the command did not end within {deadline:g} minutes, and was ended")
        raise typer.Exit(ExitCode.FAIL)
    if outcome.exit_code is None:
        raise typer.Exit(ExitCode.INTERRUPTED)
    tell(f"the command itself exited with {outcome.exit_code}")
    raise typer.Exit(outcome.exit_code)


def tell(text: str) -> None:
    typer.echo(f"seatrial: {text}", err=True)
