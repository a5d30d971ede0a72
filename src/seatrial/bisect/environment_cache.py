"""The environments of a bisect's commits: one for each distinct lock, built once and cached.

- `detect_environment` chooses how they are made; `read_complete` says whether a cached one is still what was built.
- A build command installs into a venv of one tree on top of a shared environment, or of the caller's own.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from seatrial.bisect.bisect_records import EnvironmentPlan
from seatrial.bisect.lockfile import (
    BuildFailed,
    LockRequest,
    add_with_pip,
    add_with_uv,
    build_with_pip,
    build_with_uv,
    failing_build,
    read_wanted,
    require_uv,
    run_build,
)
from seatrial.core import files
from seatrial.core.errors import BlockedError, UserError
from seatrial.core.guarded import parse_json, real_path
from seatrial.core.records import Record
from seatrial.evidence.git import git
from seatrial.evidence.redact import Redactor
from seatrial.evidence.repos import provided
from seatrial.runtime.command import NoAnswerError, run_command
from seatrial.runtime.environments import MARKER, default_root, delete, refuse_if_used, start_afresh
from seatrial.runtime.filelock import exclusive
from seatrial.runtime.process import end_leftovers, pid_file
from seatrial.runtime.venvs import BUILD_LOG, VenvBuilder, clean_env, find_python, find_uv, interpreter, python_with_pip, read_installed
from seatrial.trial.run_dir import now


class Complete(Record):
    """complete.json: what was built."""

    key: str
    lock: str
    python_version: str
    built: str
    """UTC."""
    seconds: float
    packages: dict[str, str]
    contents: tuple[str, ...]
    """What lies in it, to see later whether it is still so."""


def read_complete(place: Path, key: str) -> Complete | None:
    """What was built here; None when it is not there, broken, or not what was built."""
    if not (place / MARKER).is_file() or not interpreter(place / "venv").exists():
        return None
    try:
        record = files.read_model(place / MARKER, Complete)
        return record if record.key == key and record.contents == contents(place / "venv") else None
    except (UserError, OSError):
        return None


def contents(venv: Path) -> tuple[str, ...]:
    """Names of what is installed; of package metadata also the time, which tells a package that was installed again."""
    found = []
    for entry in sorted((*packages_of(venv).iterdir(), *(venv / "bin").iterdir())):
        stamp = entry.stat().st_mtime_ns if entry.suffix in (".dist-info", ".pth", ".egg-link") else ""
        if entry.name != "__pycache__":
            found.append(f"{entry.name} {stamp}".strip())
    return tuple(found)


_PIP_LOCKS = ("requirements.lock", "requirements.txt")
_UV_LOCK = "uv.lock"


def detect_environment(git_dir: Path, commit: str, asked: str | None) -> EnvironmentPlan:
    """How environments are made: as asked (`none`, `pip:PATH`, `uv`, `uv:PATH`), or by the lock that the commit has."""
    kind, _, lock = (asked or "").partition(":")
    if asked is None:
        found = [name for name in (_UV_LOCK, *_PIP_LOCKS) if _has(git_dir, commit, name)]
        if _UV_LOCK in found and find_uv():
            return EnvironmentPlan(kind="uv", lock=_UV_LOCK)
        if pip := [name for name in found if name != _UV_LOCK]:
            return EnvironmentPlan(kind="pip", lock=pip[0])
        if found:
            fix = "install it (pip install uv), or use the present environment for all commits: --env none"
            raise UserError(f"{commit[:12]} has a {_UV_LOCK}, and uv is not on PATH", fix)
        return EnvironmentPlan(kind="none")
    if asked == "none":
        return EnvironmentPlan(kind="none")
    if kind != "uv" and not (kind == "pip" and lock):
        raise UserError(f"--env: unknown way `{asked}`", "use none, pip:PATH (a requirements file of the repository), uv or uv:PATH")
    if kind == "uv":
        require_uv()
    lock = lock or _UV_LOCK
    if not _has(git_dir, commit, lock):
        raise UserError(f"--env: {lock} does not exist at {commit[:12]}", "name a lock of the repository, by its path from the top")
    return EnvironmentPlan(kind="uv" if kind == "uv" else "pip", lock=lock)


def _has(git_dir: Path, commit: str, path: str) -> bool:
    """Whether the commit has this file (a link counts)."""
    return b" blob " in git(git_dir, "ls-tree", "-z", "--full-tree", commit, "--", path)


_WAY_OF_BUILDING = 2
"""Part of every key: raise it when environments must be built anew because they are built differently."""
FAILED = ".failed.log"
_OWN = f"{sys.version_info.major}.{sys.version_info.minor}"


@dataclass(frozen=True, slots=True)
class ReadyEnvironment:
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
        self._failed: dict[str, BuildFailed] = {}
        self._redactor = Redactor(os.environ)

    def key(self, tree: Path, plan: EnvironmentPlan) -> str:
        """Equal exactly where the same environment would be built. A lock that cannot be used is a BuildFailed."""
        return _key(read_wanted(tree, plan), plan)

    def ensure(self, tree: Path, plan: EnvironmentPlan, progress: Callable[[str], None], deadline_s: float) -> ReadyEnvironment:
        """The environment of this tree, built now if there is none. Raises a BuildFailed when it cannot be built, and a BlockedError when
        no environment could be (no such Python, no uv)."""
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
        return ReadyEnvironment(interpreter(venv), _variables(tree, plan, wanted, venv, place / "venv"), key, built)

    def build(self, tree: Path, plan: EnvironmentPlan, ready: ReadyEnvironment, log: Path, minutes: float) -> None:
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
                with exclusive(place.with_name(f"{place.name}.lock"), "the removal", lambda _: None, 0.0):
                    end_leftovers(pid_file(place / BUILD_LOG))
                    if wanted(place):
                        delete(place)
                        gone.append(place)
            except BlockedError:
                continue  # somebody builds it at present
        return tuple(gone)

    def _build(self, order: _Order, progress: Callable[[str], None], stops: float) -> bool:
        """Build it under its lock; False when somebody else has done so meanwhile."""
        # An interpreter to build with (empty: uv chooses), and the tool: no commit is to blame for one that is missing.
        python = find_python(version) if (version := _python(order.plan)) else ""
        if order.plan.kind == "uv":
            require_uv()
        else:
            python_with_pip(python)
        try:
            with exclusive(
                order.place.with_name(f"{order.place.name}.lock"), f"the build of {order.name}", progress, stops - time.monotonic()
            ):
                if read_complete(order.place, order.key) is not None:
                    return False
                if order.key in self._failed:
                    raise copy.copy(self._failed[order.key])
                self._make(order, python, progress, stops)
        except BlockedError as error:
            raise BuildFailed(f"{error.message}; {error.fix}", transient=True) from error
        return True

    def _make(self, order: _Order, python: str, progress: Callable[[str], None], stops: float) -> None:
        place, venv, began = order.place, order.place / "venv", time.monotonic()
        self._clear(place, progress)
        builder = VenvBuilder(order.name, place / BUILD_LOG, stops, progress, self._redactor.lines().line)
        try:
            project, packages = (order.tree / order.plan.lock).parent, order.plan.packages
            with failing_build(builder.log):
                if order.plan.kind == "uv":
                    build_with_uv(builder, venv, order.wanted, python, project)
                else:
                    build_with_pip(builder, venv, order.wanted, python)
            with failing_build(builder.log, beside=True):
                if packages and order.plan.kind == "uv":
                    add_with_uv(builder, venv, packages, project)
                elif packages:
                    add_with_pip(builder, venv, order.wanted, packages, python)
            refuse_pip(venv)
            installed = read_installed(interpreter(venv))
            record = Complete(
                key=order.key,
                lock=order.plan.lock,
                python_version=installed.python_version,
                built=now(),
                seconds=round(time.monotonic() - began, 3),
                packages=installed.first_versions(),
                contents=contents(venv),
            )
            files.write_json(place / MARKER, record)
        except BlockedError:
            delete(place)
            raise
        except BuildFailed as error:
            raise self._given_up(order, builder.log, error) from error

    def _given_up(self, order: _Order, log: Path, error: BuildFailed) -> BuildFailed:
        """Remove a failed build but for its log, and remember it."""
        kept = order.place.with_name(f"{order.place.name}{FAILED}")
        if log.exists():
            log.replace(kept)
        delete(order.place)
        message = f"{order.plan.lock}: {error.message}"
        failed = BuildFailed(f"{message} (log: {kept})", error.transient, beside=error.beside, without_log=message)
        if not error.transient:
            self._failed[order.key] = failed
        return failed

    def _clear(self, place: Path, progress: Callable[[str], None]) -> None:
        """An empty directory instead of what is there, which is broken."""
        if (place / MARKER).exists():
            progress(f"{place}: not as it was built; it is built anew")
        end_leftovers(pid_file(place / BUILD_LOG))
        try:
            refuse_if_used([place])
        except UserError as error:
            raise BuildFailed(f"{place}: not as it was built, and {error.message}; {error.fix}", transient=True) from error
        start_afresh(place)
        try:
            place.mkdir(parents=True)
        except OSError as error:
            raise BuildFailed(f"{place}: cannot write: {error.strerror or error}", transient=True) from error


@dataclass(frozen=True, slots=True)
class _Order:
    tree: Path
    plan: EnvironmentPlan
    wanted: LockRequest
    key: str
    place: Path

    @property
    def name(self) -> str:
        return f"{self.plan.lock} {self.key[:8]}"


def _on_caller(tree: Path, plan: EnvironmentPlan) -> ReadyEnvironment:
    """The caller's own environment; for a build with a venv of the tree on top, so that nothing is installed into it."""
    variables = {"PYTHONPATH": provided(tree)[0] or str(tree)}
    caller = find_caller(tree) if plan.build else None
    if caller is None:
        return ReadyEnvironment(None, variables)
    venv = overlay_on_caller(tree, caller)
    variables |= {"PATH": _path(venv), "VIRTUAL_ENV": str(venv), **PIP_SETTINGS}
    return ReadyEnvironment(interpreter(venv), variables | ({"PYTHONHOME": ""} if "PYTHONHOME" in os.environ else {}))


def _path(*venvs: Path) -> str:
    return os.pathsep.join([*(str(venv / "bin") for venv in dict.fromkeys(venvs)), os.environ.get("PATH", os.defpath)])


def _python(plan: EnvironmentPlan) -> str:
    """The version of Python. Left to itself uv chooses by files that are part of the identity."""
    return plan.python or ("" if plan.kind == "uv" else _OWN)


def _key(wanted: LockRequest, plan: EnvironmentPlan) -> str:
    content: list[object] = [_WAY_OF_BUILDING, plan.kind, _python(plan), platform.machine(), *wanted.identity]
    content += [{"with": sorted(plan.packages)}] if plan.packages else []
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def _variables(tree: Path, plan: EnvironmentPlan, wanted: LockRequest, venv: Path, shared: Path) -> dict[str, str]:
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


ASK_S = 60.0
PIP_SETTINGS = {"PIP_USER": "0", "PIP_TARGET": "", "PIP_PREFIX": "", "PIP_ROOT": "", "PIP_PYTHON": ""}
"""Settings of the caller that would let pip install elsewhere than into the venv of the tree; an empty one is none for pip."""
_ASK = """
import importlib.util, json, os, sys, sysconfig
user = sysconfig.get_path("scripts", os.name + "_user")
print(json.dumps({
    "executable": sys.executable, "prefix": sys.prefix, "version": "%d.%d" % sys.version_info[:2],
    "venv": sys.prefix != sys.base_prefix and os.path.isfile(os.path.join(sys.prefix, "pyvenv.cfg")),
    "pip": importlib.util.find_spec("pip") is not None,
    "scripts": [sysconfig.get_path("scripts"), os.path.dirname(sys.executable), user],
}))
"""
_SHEBANG = re.compile(rb"#!\s*(?:/usr/bin/env\s+)?(\S*python[\d.]*)\s*(?:-\S+\s*)*\n")


@dataclass(frozen=True, slots=True)
class Caller:
    """What an interpreter says of itself."""

    executable: str
    prefix: Path
    version: str
    """Such as 3.11."""
    venv: bool
    pip: bool
    scripts: tuple[Path, ...]
    """Where its programs may lie; later ones come first on PATH."""

    def programs(self) -> Iterator[Path]:
        """The Python programs that start this interpreter."""
        own = real_path(Path(self.executable))
        for directory in self.scripts:
            for program in sorted(directory.iterdir()) if directory.is_dir() else ():
                if program.is_file() and os.access(program, os.R_OK | os.X_OK):
                    with program.open("rb") as file:
                        first = _SHEBANG.match(file.read(4096))
                    found = shutil.which(os.fsdecode(first[1])) if first else None
                    if found and real_path(Path(found)) == own:
                        yield program


def find_caller(tree: Path) -> Caller | None:
    """The Python that PATH gives in this tree; None when it gives none, and a BuildFailed when that does not run."""
    found = shutil.which("python") or shutil.which("python3")
    if found is None:
        return None
    try:
        command = [found, "-I", "-c", _ASK]
        told = parse_json(run_command(command, ASK_S, cwd=tree, env=clean_env()).data)
    except (NoAnswerError, ValueError) as error:
        message = f"{found} does not run in this tree, so the build has nothing to install into but your own environment"
        raise BuildFailed(f"{message}; activate a Python, or name a lock: --env pip:LOCKFILE") from error
    scripts = tuple(dict.fromkeys(Path(place) for place in told["scripts"]))
    return Caller(told["executable"], Path(told["prefix"]), told["version"], told["venv"], told["pip"], scripts)


OVERLAY = ".seatrial-venv"
"""In the tree; test runners and packaging tools pass over names that begin with a dot."""

_PIP = """import os, sys
os.execv({python!r}, [{python!r}, "-I", "-m", "pip", "--python", sys.executable, *sys.argv[1:]])
"""


def make_overlay(tree: Path, shared: Path, pip: str) -> Path:
    """Make the venv of this tree anew on top of a shared one; `pip` is an interpreter that has pip."""
    return _made(tree / OVERLAY, lambda place: _write(place, shared, pip))


def overlay_on_caller(tree: Path, caller: Caller) -> Path:
    """Make the venv of this tree anew on top of the caller's own environment."""
    if caller.venv:
        return make_overlay(tree, caller.prefix, python_with_pip(caller.executable))
    return _made(tree / OVERLAY, lambda place: _write_on_system(place, caller))


def _made(place: Path, write: Callable[[Path], None]) -> Path:
    try:
        if place.exists():
            shutil.rmtree(place)
        write(place)
    except OSError as error:
        raise BuildFailed(f"{place}: cannot write: {error.strerror or error}", transient=True) from error
    return place


def refuse_pip(venv: Path) -> None:
    """Let `pip` say, in an environment that several commits use and that has none, that nothing is to be installed here."""
    said = "pip: this environment is shared by commits, and nothing is installed into it; use --build, or --with"
    if (packages_of(venv) / "pip").exists():
        return
    for name in _pips(packages_of(venv)):
        _program(venv / "bin" / name, f"echo {shlex.quote(said)} >&2; exit 1")


def packages_of(venv: Path) -> Path:
    """Where a venv has its packages; a FileNotFoundError when it has no such place."""
    found = next((venv / "lib").glob("python*/site-packages"), None)
    if found is None:
        raise FileNotFoundError(f"{venv}: no site-packages")
    return found


def _write(place: Path, shared: Path, pip: str) -> None:
    packages = packages_of(shared)
    own = place / packages.relative_to(shared)
    own.mkdir(parents=True)
    (place / "bin").mkdir()
    if (shared / "lib64").is_symlink():
        (place / "lib64").symlink_to("lib")
    shutil.copy(shared / "pyvenv.cfg", place)
    # `addsitedir` follows the .pth files of the shared environment too; a plain path would not.
    (own / "seatrial-shared.pth").write_text(f"import site; site.addsitedir({str(packages)!r})\n")
    for program in (shared / "bin").iterdir():
        _copy_program(program, place, shared)
    if not (packages / "pip").exists():
        _write_pip_module(own, pip)
        _write_pips(place, own)


def _write_on_system(place: Path, caller: Caller) -> None:
    own = place / "lib" / f"python{caller.version}" / "site-packages"
    own.mkdir(parents=True)
    (place / "bin").mkdir()
    (place / "lib64").symlink_to("lib")
    home = Path(caller.executable).parent
    (place / "pyvenv.cfg").write_text(f"home = {home}\ninclude-system-site-packages = true\nversion = {caller.version}\n")
    for name in ("python", "python3", f"python{caller.version}"):
        (place / "bin" / name).symlink_to(caller.executable)
    for program in caller.programs():
        target = place / "bin" / program.name
        if not target.is_symlink():  # else it is an interpreter
            target.write_bytes(_start(place) + b"\n" + program.read_bytes().partition(b"\n")[2])
            target.chmod(0o755)
    if not caller.pip:
        _write_pip_module(own, python_with_pip(caller.executable))
    _write_pips(place, own)


def _write_pip_module(own: Path, pip: str) -> None:
    """What `python -m pip` runs: the pip of another interpreter, for this one."""
    (own / "pip").mkdir()
    (own / "pip" / "__init__.py").touch()
    (own / "pip" / "__main__.py").write_text(_PIP.format(python=pip))


def _write_pips(place: Path, packages: Path) -> None:
    for name in _pips(packages):
        _program(place / "bin" / name, f'exec {shlex.quote(str(interpreter(place)))} -m pip "$@"')


def _pips(packages: Path) -> tuple[str, ...]:
    return ("pip", "pip3", f"pip{packages.parent.name.removeprefix('python')}")


def _program(path: Path, text: str) -> None:
    path.unlink(missing_ok=True)  # it may be a link to somebody else's
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def _start(place: Path) -> bytes:
    """As pip writes it where a path is too long for the kernel, or holds blanks: a shell program that is a string for Python."""
    return f"#!/bin/sh\n'''exec' {shlex.quote(str(interpreter(place)))} \"$0\" \"$@\"\n' '''".encode()


def _copy_program(program: Path, place: Path, shared: Path) -> None:
    target = place / "bin" / program.name
    if program.is_symlink():
        link = program.readlink()
        target.symlink_to(link if link.name == str(link) else program.parent / link)
        return
    if program.is_dir():
        return
    data = program.read_bytes()
    if b"\0" in data:
        target.symlink_to(program)
        return
    first, newline, rest = data.partition(b"\n")
    if first.startswith(b"#!" + bytes(shared / "bin")):
        data = _start(place) + newline + rest
    target.write_bytes(data.replace(bytes(shared / "bin"), bytes(place / "bin")))
    target.chmod(program.stat().st_mode)
