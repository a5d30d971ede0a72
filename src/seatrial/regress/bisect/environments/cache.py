"""The environments that the commits of a bisect run in: one for each distinct lock, built once and kept.

- An environment lies in `<cache>/bisect/<kind>-<key>/`; the key is a hash over what would be installed (see `locks`), the version of
  Python and the kind of machine. `complete.json` is written last; without it, or when something was installed into it or removed from it
  since, it is broken, and built from scratch.
- One build per key at a time, whoever asks: threads and other processes wait and take what was made. A build that fails leaves
  nothing but its log, and is not tried again by this object, unless the machine failed and not the lock.
- A tree that is built (`--build`) gets a venv of its own on top (see `overlays`), so that nothing of a commit gets into what others use.
- The tree is on the import path, and the caller's own is not: another copy of the code must not be what is tested.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from seatrial import files
from seatrial.evidence.packages import provided
from seatrial.evidence.redact import Redactor
from seatrial.launch.cachelock import exclusive
from seatrial.launch.environments import MARKER, default_root, delete, refuse_if_used
from seatrial.launch.process import end_leftovers, pid_file
from seatrial.launch.venvs import BUILD_LOG, find_python, interpreter, python_with_pip, read_installed
from seatrial.model.errors import BlockedError, UserError
from seatrial.model.guarded import real_path
from seatrial.regress.bisect.environments.builds import Job, add_with_pip, add_with_uv, build_with_pip, build_with_uv, find_uv, run_build
from seatrial.regress.bisect.environments.callers import PIP_SETTINGS, find_caller
from seatrial.regress.bisect.environments.complete import Complete, contents, read_complete
from seatrial.regress.bisect.environments.detect import detect
from seatrial.regress.bisect.environments.locks import BuildFailed, Wanted, read_wanted
from seatrial.regress.bisect.environments.overlays import make_overlay, overlay_on_caller, refuse_pip
from seatrial.regress.bisect.record import EnvironmentPlan
from seatrial.trial.rundir import now

__all__ = ["BisectEnvironments", "BuildFailed", "Ready", "detect"]

_WAY_OF_BUILDING = 2
"""Part of every key: raise it when environments must be built anew because they are built differently."""
FAILED = ".failed.log"
"""How the name of a failed build's log ends."""
_OWN = f"{sys.version_info.major}.{sys.version_info.minor}"


@dataclass(frozen=True, slots=True)
class Ready:
    """An environment that a command can run in."""

    python: Path | None
    """Its interpreter; None for the caller's own environment."""
    variables: dict[str, str]
    key: str = ""
    """Empty for the caller's own environment."""
    built: bool = False
    """Whether this call built it."""


class BisectEnvironments:
    """The cache of environments below `root`, and what is known of builds that failed."""

    def __init__(self, root: Path | None = None) -> None:
        self.root = (root or default_root() / "bisect").expanduser().absolute()
        self._failed: dict[str, str] = {}
        self._redactor = Redactor(os.environ)

    def key(self, tree: Path, plan: EnvironmentPlan) -> str:
        """Equal exactly where the same environment would be built. A lock that cannot be used is a BuildFailed."""
        return _key(read_wanted(tree, plan), plan)

    def ensure(self, tree: Path, plan: EnvironmentPlan, progress: Callable[[str], None], deadline_s: float) -> Ready:
        """The environment of this tree, built now if there is none.

        Raises a BuildFailed when it cannot be built, and a BlockedError when no environment could be (no such Python, no uv).
        """
        if plan.kind == "none":
            return _on_caller(tree, plan)
        wanted = read_wanted(tree, plan)
        key = _key(wanted, plan)
        place, built = self.root / f"{plan.kind}-{key}", False
        if read_complete(place, key) is None:
            built = self._build(_Order(tree, plan, wanted, key, place), progress, time.monotonic() + deadline_s)
        venv = place / "venv"
        if plan.build:
            venv = make_overlay(tree, venv, python_with_pip(find_python(plan.python or _OWN)))
        return Ready(interpreter(venv), _variables(tree, plan, wanted, venv, place / "venv"), key, built)

    def build(self, tree: Path, plan: EnvironmentPlan, ready: Ready, log: Path, minutes: float) -> None:
        """Run the plan's build command in the tree; a BuildFailed when it fails."""
        run_build(tree, plan.build, ready.variables, log, minutes, self._redactor.lines().line)

    def clean_up(self) -> tuple[Path, ...]:
        """End what killed builds left, and remove what they had begun; builds that are under way are left alone."""
        return self._remove(lambda place: not (place / MARKER).exists())

    def remove(self) -> tuple[Path, ...]:
        """Remove every environment, and the logs of failed builds; a UserError when a process runs in one. Returns what went."""
        refuse_if_used(self._places())
        for log in self.root.glob(f"*{FAILED}"):
            log.unlink(missing_ok=True)
        return self._remove(lambda _: True)

    def _places(self) -> list[Path]:
        return sorted(place for place in self.root.glob("*-*") if place.is_dir())

    def _remove(self, wanted: Callable[[Path], bool]) -> tuple[Path, ...]:
        gone = []
        for place in self._places():
            try:
                with exclusive(_lock_of(place), "the removal", lambda _: None, 0.0):
                    end_leftovers(pid_file(place / BUILD_LOG))
                    if wanted(place):
                        delete(place)
                        gone.append(place)
            except BlockedError:
                continue  # somebody builds it at present
        return tuple(gone)

    def _build(self, order: _Order, progress: Callable[[str], None], stops: float) -> bool:
        """Build it under its lock; False when somebody else has done so meanwhile."""
        python = _require(order.plan)
        try:
            with exclusive(_lock_of(order.place), f"the build of {order.name}", progress, stops - time.monotonic()):
                if read_complete(order.place, order.key) is not None:
                    return False
                if order.key in self._failed:
                    raise BuildFailed(self._failed[order.key])
                self._make(order, python, progress, stops)
        except BlockedError as error:
            raise BuildFailed(f"{error.message}; {error.fix}", transient=True) from error
        return True

    def _make(self, order: _Order, python: str, progress: Callable[[str], None], stops: float) -> None:
        place, venv, began = order.place, order.place / "venv", time.monotonic()
        self._clear(place, progress)
        job = Job(order.name, place / BUILD_LOG, stops, progress, self._redactor.lines().line)
        try:
            _install(order, job, venv, python)
            refuse_pip(venv)
            installed = read_installed(interpreter(venv))
            record = Complete(
                key=order.key,
                lock=order.plan.lock,
                python_version=installed.python_version,
                built=now(),
                seconds=round(time.monotonic() - began, 3),
                packages={name: versions[0] for name, versions in sorted(installed.packages.items())},
                contents=contents(venv),
            )
            files.write_json(place / MARKER, record)
        except BlockedError:
            delete(place)
            raise
        except BuildFailed as error:
            raise self._given_up(order, job.log, error) from error

    def _given_up(self, order: _Order, log: Path, error: BuildFailed) -> BuildFailed:
        """Remove a failed build but for its log, and remember it."""
        kept = order.place.with_name(f"{order.place.name}{FAILED}")
        if log.exists():
            log.replace(kept)
        delete(order.place)
        message = f"{order.plan.lock}: {error.message}{log_told(kept)}"
        if not error.transient:
            self._failed[order.key] = message
        return BuildFailed(message, error.transient)

    def _clear(self, place: Path, progress: Callable[[str], None]) -> None:
        """An empty directory instead of what is there, which is broken."""
        if (place / MARKER).exists():
            progress(f"{place}: not as it was built; it is built anew")
        end_leftovers(pid_file(place / BUILD_LOG))
        try:
            refuse_if_used([place])
        except UserError as error:
            raise BuildFailed(f"{place}: not as it was built, and {error.message}; {error.fix}", transient=True) from error
        delete(place)
        try:
            place.mkdir(parents=True)
        except OSError as error:
            raise BuildFailed(f"{place}: cannot write: {error.strerror or error}", transient=True) from error


@dataclass(frozen=True, slots=True)
class _Order:
    """An environment to be built."""

    tree: Path
    plan: EnvironmentPlan
    wanted: Wanted
    key: str
    place: Path

    @property
    def name(self) -> str:
        return f"{self.plan.lock} {self.key[:8]}"


def _install(order: _Order, job: Job, venv: Path, python: str) -> None:
    """What the lock asks for, then what the user wants beside it."""
    project, packages = (order.tree / order.plan.lock).parent, order.plan.packages
    if order.plan.kind == "uv":
        build_with_uv(job, venv, order.wanted, python, project)
        if packages:
            add_with_uv(job, venv, packages, project)
        return
    build_with_pip(job, venv, order.wanted, python)
    if packages:
        add_with_pip(job, venv, order.wanted, packages, python)


def _on_caller(tree: Path, plan: EnvironmentPlan) -> Ready:
    """The caller's own environment; for a build with a venv of the tree on top, so that nothing is installed into it."""
    variables = {"PYTHONPATH": provided(tree)[0] or str(tree)}
    caller = find_caller(tree) if plan.build else None
    if caller is None:
        return Ready(None, variables)
    venv = overlay_on_caller(tree, caller)
    variables |= {"PATH": _path(venv), "VIRTUAL_ENV": str(venv), **PIP_SETTINGS}
    return Ready(interpreter(venv), variables | ({"PYTHONHOME": ""} if "PYTHONHOME" in os.environ else {}))


def _path(*venvs: Path) -> str:
    return os.pathsep.join([*(str(venv / "bin") for venv in dict.fromkeys(venvs)), os.environ.get("PATH", os.defpath)])


def log_told(log: Path) -> str:
    """How the message of a failed build ends."""
    return f" (log: {log})"


def _lock_of(place: Path) -> Path:
    return place.with_name(f"{place.name}.lock")


def _python(plan: EnvironmentPlan) -> str:
    """The version of Python. Left to itself uv chooses by files that are part of the identity."""
    return plan.python or ("" if plan.kind == "uv" else _OWN)


def _require(plan: EnvironmentPlan) -> str:
    """The interpreter to build with (empty: uv chooses); a BlockedError when a tool is missing, which no commit is to blame for."""
    python = find_python(version) if (version := _python(plan)) else ""
    if plan.kind == "uv":
        find_uv()
    else:
        python_with_pip(python)
    return python


def _key(wanted: Wanted, plan: EnvironmentPlan) -> str:
    content: list[object] = [_WAY_OF_BUILDING, plan.kind, _python(plan), platform.machine(), *wanted.identity]
    content += [{"with": sorted(plan.packages)}] if plan.packages else []
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def _variables(tree: Path, plan: EnvironmentPlan, wanted: Wanted, venv: Path, shared: Path) -> dict[str, str]:
    roots = [real_path((tree / plan.lock).parent), *wanted.roots] if plan.kind == "uv" else [tree]
    path = [provided(root)[0] or str(root) for root in roots]
    variables = {
        "PATH": _path(venv, shared),
        "VIRTUAL_ENV": str(venv),
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(path)),
        "PYTHONNOUSERSITE": "1",
    }
    if "PYTHONHOME" in os.environ:
        variables["PYTHONHOME"] = ""  # Python takes an empty one for none
    if plan.build:
        variables |= PIP_SETTINGS
    if plan.kind == "uv":
        variables |= {"UV_PROJECT_ENVIRONMENT": str(venv), "UV_NO_SYNC": "1"}
    return variables
