"""What `seatrial bisect` checks before anything runs: the environments, the words of a trial, the program of the command."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from seatrial.cli.bisect_options import Flags
    from seatrial.regress.bisect.record import EnvironmentPlan, Plan


def choose_environment(flags: Flags, main: Path, bad: str) -> EnvironmentPlan:
    """How environments are made; what cannot be had for any commit is refused."""
    from seatrial.model.errors import UserError
    from seatrial.regress.bisect.environments.cache import detect

    # A trial and a nightly bring environments of their own.
    asked = "none" if flags.env is None and (flags.trial or flags.nightly) else flags.env
    found = detect(main, bad, asked)
    if flags.python:
        _check_python(flags.python, found)
    for package in flags.packages or ():
        _check_package(package)
    if flags.packages and found.kind == "none":
        raise UserError(
            f"--with {flags.packages[0]}: no environment is built, so there is none to install it into",
            "install it where you call from, or name a lock: --env pip:LOCKFILE",
        )
    build, packages = tuple(shlex.split(flags.build or "")), tuple(flags.packages or ())
    return found.model_copy(update={"python": flags.python or "", "build": build, "packages": packages})


def _check_python(version: str, plan: EnvironmentPlan) -> None:
    from seatrial.launch.venvs import find_python
    from seatrial.model.errors import BlockedError, UserError

    if not re.fullmatch(r"3\.\d+", version):
        raise UserError(f"--python {version}: not a version of Python", "name it by major and minor, such as 3.12")
    try:
        if plan.kind != "none":
            find_python(version)
    except BlockedError as error:
        raise UserError(f"--python {version}: {error.message}", error.fix) from error


def _check_package(package: str) -> None:
    """An environment is shared by commits and kept by what was asked for; what lies in a directory may change under it."""
    from seatrial.model.errors import UserError
    from seatrial.regress.bisect.environments.locks import is_local

    if not package.strip() or package.startswith("-") or "\n" in package or is_local(package):
        raise UserError(
            f"--with {package}: not a requirement by name",
            "name a package, such as pytest or 'pytest<9'; what lies in a directory is installed with --build 'pip install …'",
        )


def check_trial(words: Sequence[str], main: Path) -> None:
    """Read the words as `seatrial run` will, so that a wrong loop, level or option is not found out by a run."""
    import typer
    from typer.exceptions import TyperException

    from seatrial.cli.run import run
    from seatrial.loops import get_loop
    from seatrial.model.errors import UserError
    from seatrial.trial.plan import parse_levels

    app = typer.Typer(add_completion=False)
    app.command("run")(run)
    ours = list(words)[: list(words).index("--")] if "--" in words else list(words)
    try:
        context = typer.main.get_command(app).make_context("seatrial run", [word.replace("{tree}", str(main)) for word in ours])
    except TyperException as error:
        raise UserError(f"--trial: {error}", "after `--` stand the words of `seatrial run`; see: seatrial run --help") from error
    asked = context.params
    if asked["out"] is not None:
        raise UserError("--trial: --out is chosen for each commit", "leave it out; the trial of each run is kept in its steps/ directory")
    if asked["loop"] is None:
        return  # the seatrial.toml of each commit names it
    options = {name: str(asked[name]) for name in ("device", "verl", "nemo_rl") if asked[name] is not None}
    loop = get_loop(asked["loop"]).configured(options)
    if asked["level"] is not None:
        parse_levels(asked["level"], loop)


def unknown_program(plan: Plan) -> str | None:
    """A warning when nothing shows that the program of the command exists."""
    from seatrial.regress.bisect.history import missing_words

    main, program = plan.repos[0], plan.command[:1]
    if plan.trial or not program or "{" in program[0] or shutil.which(program[0]) or missing_words(Path(main.path), program, main.bad):
        return None
    where = "" if plan.environment.kind == "none" else "; it may be in the environments"
    return f"{program[0]} is neither on PATH nor a file of the repository{where}"
