"""The environment of a run: uv, its Python, the vendored Bridge, variables and the caches of worker environments."""

from __future__ import annotations

import filecmp
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from seatrial.files import read_text
from seatrial.loops.child import run_child
from seatrial.loops.nemo_rl.drive import helpers, sync
from seatrial.loops.nemo_rl.drive.process import Failed
from seatrial.loops.nemo_rl.runs.checkout import BRIDGE, CORE, VENDORED, bundled_core, submodules_command, sync_command
from seatrial.model.guarded import BadValue, parse_toml
from seatrial.model.loop import Context
from seatrial.model.record import Finding
from seatrial.model.verdict import Boundary

PYTHON_SECONDS = 30
GUARD = "NRL_IGNORE_TP_ACCURACY_CHECK"
REBUILD = "NRL_FORCE_REBUILD_VENVS"
ARCHITECTURES = "TORCH_CUDA_ARCH_LIST"
POLICY = "nemo_rl/models/policy/lm_policy.py"
_ASK = "import sys; print('.'.join(map(str, sys.version_info[:3])))"
_BOUND = re.compile(r"(>=|<)\s*([\d.]+)")


def launcher() -> Finding:
    """The scripts start everything through uv."""
    found = shutil.which("uv")
    if found is None:
        return Finding(
            name="launcher", ok=False, message="no uv on PATH: NeMo-RL's scripts start everything through it", fix="pip install uv"
        )
    return Finding(name="launcher", ok=True, message=f"{found}: driver and Ray workers run through it")


def python(context: Context, checkout: Path) -> Finding | tuple[()]:
    """The interpreter is one that this checkout takes."""
    if not context.has_python:
        return ()
    wanted = _requires(checkout)
    try:
        done = run_child([str(context.python), "-I", "-c", _ASK], checkout, os.environ, PYTHON_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Finding(name="Python", ok=False, message=f"{context.python}: {error}", fix=sync_command(checkout))
    version = done.stdout.strip()
    if done.returncode or not all(_within(version, sign, bound) for sign, bound in _BOUND.findall(wanted)):
        message = f"{context.python} is Python {version or '(unknown)'}, and this checkout requires {wanted}"
        return Finding(name="Python", ok=False, message=message, fix=sync_command(checkout))
    return Finding(name="Python", ok=True, message=f"{context.python}: Python {version}")


def _requires(checkout: Path) -> str:
    """What pyproject.toml says; "" when it says nothing."""
    path = checkout / "pyproject.toml"
    try:
        project = parse_toml(read_text(path)).get("project", {}) if path.is_file() else {}
    except BadValue:
        return ""
    return str(project.get("requires-python", ""))


def _within(version: str, sign: str, bound: str) -> bool:
    has, limit = ([int(part) for part in text.split(".") if part.isdecimal()] for text in (version, bound))
    return has >= limit if sign == ">=" else has < limit


def vendored(context: Context, checkout: Path) -> Finding:
    """The Bridge inside the checkout is there, and whether it is the one under test."""
    place = checkout / VENDORED
    if not (place / BRIDGE).is_dir():
        return _bridge(False, f"{place}: no {BRIDGE}: the submodule is empty", submodules_command(checkout))
    tested = next((repo for repo in context.changes if "megatron.bridge" in repo.packages), None)
    if tested is None:
        return _bridge(True, f"{place}: no Bridge is under test, this one is used")
    apart = list(_differing(Path(tested.path) / BRIDGE, place / BRIDGE))
    if not apart:
        return _bridge(True, f"{place} is the same as the Bridge under test")
    how = "is replaced by a copy of it while the trial runs" if tested.synced else "stands behind it on PYTHONPATH"
    return _bridge(True, f"{place} differs from the Bridge under test in {len(apart)} files ({', '.join(apart[:3])}): it {how}")


def sources(context: Context, checkout: Path) -> Iterator[Finding]:
    """What the driver would refuse: a vendored tree that cannot be replaced for a while, and helpers that cannot be built."""
    try:
        marker = sync.git_directory(checkout) / sync.MARKER if (checkout / ".git").exists() else None
        if marker is not None and marker.is_file():
            message = f"{checkout / VENDORED} still holds the Bridge of a run that was killed"
            yield _bridge(False, message, shlex.join([sys.executable, "-m", "seatrial.loops.nemo_rl.drive.recover", str(checkout)]))
        elif any(repo.synced for repo in context.changes) and os.environ.get("SEATRIAL_RAY_NODES", "1") != "1":
            message = "bridge = sync copies the Bridge on one node, and Ray runs over several: others may hold another tree at that path"
            yield _bridge(False, message, "--set options.bridge=path")
        elif any(repo.synced for repo in context.changes):
            sync.require_clean(checkout / VENDORED)
    except Failed as error:
        yield _bridge(False, str(error), "see the message, or --set options.bridge=path")
    for core in bundled_core(context)[:1] if context.options.get("helpers") == "local" else ():
        if not (core / helpers.DATASETS / "Makefile").is_file():
            message = f"{core / helpers.DATASETS}: no Makefile, so helpers = local has nothing to build"
            yield Finding(name="Megatron-LM", ok=False, message=message, fix=submodules_command(core.parents[1]))


def submodule_core(context: Context, checkout: Path) -> Iterator[Finding]:
    """Some Megatron-LM must be there: the Bridge's own, or one under test."""
    bridges = [checkout / VENDORED, *(Path(repo.path) for repo in context.changes if "megatron.bridge" in repo.packages)]
    tested = any("megatron.core" in repo.packages for repo in context.changes)
    if not tested and not any((place / CORE / "megatron" / "core").is_dir() for place in bridges):
        message = f"no Megatron-LM below {' or '.join(str(place / CORE) for place in bridges)}: the submodule is empty"
        yield Finding(name="Megatron-LM", ok=False, message=message, fix=submodules_command(checkout))


def _differing(left: Path, right: Path) -> Iterator[str]:
    """Python files of either tree that the other lacks, or that differ."""
    names = {path.relative_to(root).as_posix() for root in (left, right) for path in root.rglob("*.py")}
    for name in sorted(names):
        one, two = left / name, right / name
        if not (one.is_file() and two.is_file() and filecmp.cmp(one, two, shallow=False)):
            yield name


def variables(context: Context, checkout: Path) -> Iterator[Finding]:
    """Variables that evidence must not rest on, and one that Megatron cannot do without."""
    if os.environ.get(GUARD) or any(GUARD in word for word in context.arguments):
        message = f"{GUARD} is set: it switches off NeMo-RL's check of the accuracy with TP >= 4, and evidence must not rest on that"
        yield Finding(name="variables", ok=False, boundary=Boundary.CONFIG, message=message, fix=f"unset {GUARD}")
    policy = checkout / POLICY
    if ARCHITECTURES not in os.environ and policy.is_file() and ARCHITECTURES in read_text(policy):
        message = f"{ARCHITECTURES} is not set: this NeMo-RL refuses to train with Megatron without it"
        yield Finding(name="variables", ok=False, message=message, fix=f"export {ARCHITECTURES}='9.0 10.0' (those of your GPUs)")


def worker_environments(checkout: Path) -> Iterator[Finding]:
    """A worker's environment is used as it is once it exists, even if the lock has changed since."""
    place = Path(os.environ.get("NEMO_RL_VENV_DIR") or checkout / "venvs")
    lock = checkout / "uv.lock"
    made = [path.parents[1] for path in place.glob("*/bin/python")]
    if os.environ.get(REBUILD, "").lower() == "true":
        yield _workers(f"{REBUILD} is set: the environments of Ray workers below {place} are made anew, which takes long")
        return
    old = [path.name for path in made if lock.is_file() and (path / "bin" / "python").lstat().st_mtime < lock.stat().st_mtime]
    if old:
        names = ", ".join(sorted(old)[:3])
        yield _workers(
            f"{len(old)} environments of Ray workers below {place} are older than uv.lock ({names}): {REBUILD}=true makes them anew"
        )


def _workers(message: str) -> Finding:
    return Finding(name="worker environments", ok=True, message=message)


def _bridge(ok: bool, message: str, fix: str = "") -> Finding:
    return Finding(name="vendored Bridge", ok=ok, message=message, fix=fix)
