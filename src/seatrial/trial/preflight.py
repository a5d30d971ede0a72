"""What is checked before anything starts. Each finding names its boundary and the command that fixes it.

A finding that is not ok blocks the trial: nothing is run, and nothing is held against the change. No finding hides another.
`seatrial doctor` shows the same findings without a trial.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from seatrial.evidence.use import loads_itself
from seatrial.model.gather import gather
from seatrial.model.loop import Context, Loop
from seatrial.model.record import Finding, Plan, RepoState
from seatrial.model.verdict import Boundary
from seatrial.trial import disk, machine
from seatrial.trial.machine import IGNORED, LAUNCHER
from seatrial.trial.plan import totals


def preflight(loop: Loop, plan: Plan, context: Context, environ: Mapping[str, str]) -> tuple[Finding, ...]:
    """All findings, good and bad."""
    return (*of_machine(environ), *of_loop(loop, plan, context, environ))


def of_machine(environ: Mapping[str, str]) -> tuple[Finding, ...]:
    """What holds for every trial on this machine."""
    return gather(machine.git_here, machine.encoding, machine.ports, lambda: machine.variables(environ))


def of_loop(loop: Loop, plan: Plan, context: Context, environ: Mapping[str, str]) -> tuple[Finding, ...]:
    """What this trial needs."""
    python = context.python if context.python.is_file() else None
    return gather(
        lambda: disk.room_findings(disk.needs(loop, plan, context.run_dir, python, environ)),
        lambda: disk.shared_memory(loop),
        lambda: disk.nearly_full(loop, environ),
        lambda: machine.memory(totals(plan)["memory_mb"]),
        lambda: machine.open_files(loop),
        lambda: machine.running_ray(environ) if loop.footprint.ray else (),
        lambda: submodules(context.changes),
        lambda: changes(context.changes),
        lambda: loop.findings(context),
    )


def submodules(repos: Sequence[RepoState]) -> Iterator[Finding]:
    """Submodules that were never checked out: what they hold is then missing, or comes from elsewhere."""
    for repo in repos:
        empty = [item.path for item in repo.submodules if item.state == "uninitialised" and _is_empty(Path(repo.path, item.path))]
        if empty:
            shown = f"{', '.join(empty[:3])}{', …' if len(empty) > 3 else ''}"
            message = f"{repo.path}: {len(empty)} of {len(repo.submodules)} submodules are empty: {shown}"
            fix = f"git -C {shlex.quote(repo.path)} submodule update --init --recursive"
            yield Finding(
                name="submodules",
                ok=True,
                boundary=Boundary.CONFIG,
                message=message,
                fix=fix,
                warns=True,
                path=str(Path(repo.path, empty[0])),
            )


def _is_empty(directory: Path) -> bool:
    return not directory.is_dir() or not any(directory.iterdir())


def changes(repos: Sequence[RepoState]) -> tuple[Finding, ...]:
    """What of each checkout the loop can import: without a package nothing of it can be tested."""
    made = []
    for repo in repos:
        ok = bool(repo.packages)
        message = f"{repo.name} provides {', '.join(repo.packages)}" if ok else f"{repo.path} provides no Python package"
        fix = "" if ok else "name the checkout that holds the package which the loop imports"
        made.append(Finding(name="change", ok=ok, boundary=Boundary.CONFIG, message=message, fix=fix))
        for place in loads_itself(repo):
            message = f"every Python of the loop runs {place} as it starts; what that loads or runs does not count as used by the loop"
            fix = "move it out of the import root, unless the loop is to run with it"
            made.append(Finding(name="loads itself", ok=True, boundary=Boundary.CONFIG, message=message, fix=fix, warns=True))
    return tuple(made)


def child_environment(environ: Mapping[str, str], import_path: Sequence[str], extra: Mapping[str, str]) -> dict[str, str]:
    """The environment of a loop's process: the caller's, without what would mislead it, with our import path."""
    kept = {key: value for key, value in environ.items() if key not in IGNORED and key not in LAUNCHER}
    # Without bytecode files a checkout under test stays as it was recorded; a safe path keeps the working directory out of imports.
    ours = {"PYTHONPATH": os.pathsep.join(import_path), "PYTHONDONTWRITEBYTECODE": "1", "PYTHONSAFEPATH": "1"}
    return {**kept, **extra, **ours}
