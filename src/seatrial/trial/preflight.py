"""What is checked before anything starts. Each finding names its boundary and the command that fixes it.

A finding that is not ok blocks the trial: nothing is run, and nothing is held against the change.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from seatrial.evidence.use import loads_itself
from seatrial.launch.ports import free_port
from seatrial.model.loop import Context, Loop
from seatrial.model.record import Finding, Plan, RepoState
from seatrial.model.verdict import Boundary
from seatrial.trial.plan import totals

SPARE_DISK_MB = 200
IGNORED = ("PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP")
"""Variables that are not passed on: they would decide what the loop imports."""
LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK", "LOCAL_WORLD_SIZE")
"""Left behind by another launcher, they make one process wait for ranks that never come."""
CONFLICTS = (("ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"), ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"))


def preflight(loop: Loop, plan: Plan, context: Context, environ: Mapping[str, str]) -> tuple[Finding, ...]:
    """All findings, good and bad."""
    return (
        disk(context.run_dir, totals(plan)["disk_mb"]),
        memory(totals(plan)["memory_mb"]),
        ports(),
        *variables(environ),
        *changes(context.changes),
        *loop.findings(context),
    )


def disk(path: Path, needed_mb: float) -> Finding:
    """Room for the run directory."""
    free = shutil.disk_usage(path).free / 1e6
    wanted = needed_mb + SPARE_DISK_MB
    ok = free >= wanted
    fix = "" if ok else f"free space below {path}, or choose another place with --out"
    return Finding(name="disk", ok=ok, message=f"{free:.0f} MB free at {path}, {wanted:.0f} MB needed", fix=fix)


def memory(needed_mb: float) -> Finding:
    """Room in memory for the largest level."""
    free = psutil.virtual_memory().available / 1e6
    ok = free >= needed_mb
    fix = "" if ok else "end other programs, or run fewer levels with --level"
    return Finding(name="memory", ok=ok, message=f"{free:.0f} MB available, {needed_mb:.0f} MB needed", fix=fix)


def ports() -> Finding:
    """A local port can be bound, as distributed training needs."""
    try:
        port = free_port()
    except OSError as error:
        return Finding(
            name="ports",
            ok=False,
            boundary=Boundary.CLUSTER,
            message=f"no local port can be bound: {error}",
            fix="allow binds on 127.0.0.1",
        )
    return Finding(name="ports", ok=True, boundary=Boundary.CLUSTER, message=f"port {port} on 127.0.0.1 can be bound")


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
            made.append(Finding(name="loads itself", ok=True, boundary=Boundary.CONFIG, message=message, fix=fix))
    return tuple(made)


def variables(environ: Mapping[str, str]) -> tuple[Finding, ...]:
    """Variables that contradict each other, and those that are not passed on."""
    made = []
    for one, two in CONFLICTS:
        if environ.get(one) and environ.get(two):
            message = f"{one} and {two} are both set; workers refuse to start with both"
            made.append(Finding(name="variables", ok=False, message=message, fix=f"unset {one}"))
    dropped = [name for name in (*IGNORED, *LAUNCHER) if environ.get(name)]
    note = f"not passed on to the loop: {', '.join(dropped)}" if dropped else "no conflicting variables"
    return (*made, Finding(name="variables", ok=True, message=note))


def child_environment(environ: Mapping[str, str], import_path: Sequence[str], extra: Mapping[str, str]) -> dict[str, str]:
    """The environment of a loop's process: the caller's, without what would mislead it, with our import path."""
    kept = {key: value for key, value in environ.items() if key not in IGNORED and key not in LAUNCHER}
    # Without bytecode files a checkout under test stays as it was recorded; a safe path keeps the working directory out of imports.
    ours = {"PYTHONPATH": os.pathsep.join(import_path), "PYTHONDONTWRITEBYTECODE": "1", "PYTHONSAFEPATH": "1"}
    return {**kept, **extra, **ours}
