"""Runs a command in a fresh environment that sees nothing of the caller's; `--with` requirements are checked before anything is built."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from seatrial.bisect.bisect_records import EnvironmentPlan
from seatrial.bisect.environment_cache import FAILED, BisectEnvironments, ReadyEnvironment
from seatrial.bisect.lockfile import BuildFailed, is_local
from seatrial.core.errors import BlockedError, UserError
from seatrial.core.files import read_text, write_text
from seatrial.core.guarded import BadValue, parse_toml
from seatrial.core.verdict import Boundary
from seatrial.functional.hermetic import ExecutionPlace
from seatrial.history.auto_import import OFF, VARIABLE
from seatrial.runtime.environments import delete
from seatrial.runtime.venvs import find_uv

_CLAUSE = r"\s*(?:===\s*[^\s,;)]+|(?:[<>=!~]=|[<>])\s*v?(?:\d+!)?\d[\w.*+-]*)\s*"
_CLAUSES = rf"{_CLAUSE}(?:,{_CLAUSE})*,?\s*"
_MARKER = r"(?:;\s*\S.*)?"
_NAMED = re.compile(
    r"[A-Za-z0-9](?:[\w.-]*[A-Za-z0-9])?\s*(?:\[[\w\s,.-]*\])?\s*"
    rf"(?:@\s*\S+(?:\s+{_MARKER})?|(?:\({_CLAUSES}\)|{_CLAUSES})?\s*{_MARKER})",
    re.ASCII,
)
"""The form of PEP 508; what a marker says is left to the installer."""
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:\S+")


def check_requirement(text: str, project: Path) -> None:
    """A UserError unless it has the form of a requirement: a name with versions, an address, or a path that is there."""
    wanted = text.strip()
    if _NAMED.fullmatch(wanted) or _ADDRESS.fullmatch(wanted):
        return
    fix = "name a package, such as pytest or 'pytest<9'"
    if wanted and not wanted.startswith("-") and is_local(wanted):
        path = Path(re.sub(r"\[[^]]*\]$", "", wanted))  # extras may follow a path
        if (project / path).exists():
            return
        raise UserError(f"--with {text}: {project / path} does not exist", f"correct the path, or {fix}")
    raise UserError(f"--with {text}: not a requirement", fix)


LOCKS = ("requirements.lock", "requirements.txt")
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
PASSED_ON = (
    *("LANG", "LANGUAGE", "TZ", "TERM", "USER", "LOGNAME", "COLUMNS", "LINES", "NO_COLOR"),
    *(
        "http_proxy",
        "https_proxy",
        "no_proxy",
        "HTTP_PROXY",
        "HTTPS_PROXY",
        "NO_PROXY",
        "SSL_CERT_FILE",
        "SSL_CERT_DIR",
        "REQUESTS_CA_BUNDLE",
    ),
    *("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES"),
)
OWN = ("HOME", "TMPDIR", "PATH", "SHELL", "PWD", "VIRTUAL_ENV", "PYTHONPATH", "PYTHONHOME", "PYTHONNOUSERSITE")
BUILD_S = 3600.0
DEPENDENCIES = "dependencies.txt"
LAST_LINES = 15


class Fresh(ExecutionPlace):
    """See the module."""

    def __init__(
        self,
        project: Path,
        env: tuple[str, ...] = (),
        packages: tuple[str, ...] = (),
        *,
        keep: bool = False,
        tell: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.project, self.env, self.packages, self.keep, self._tell = project.absolute(), env, packages, keep, tell
        if taken := [name for name in env if name in OWN]:
            raise UserError(f"--env {taken[0]}: a fresh environment has one of its own", "leave it out")
        for package in packages:
            check_requirement(package, self.project)
        self.directory: Path | None = None
        self._ready: ReadyEnvironment | None = None

    def prepare(self) -> None:
        """Build it."""
        self.directory = Path(tempfile.mkdtemp(prefix="seatrial-hermetic-"))
        try:
            plan, note = self._plan(self.directory)
            self._ready = BisectEnvironments(self.directory / "environments").ensure(self.project, plan, self._tell, BUILD_S)
            for name in ("home", "tmp", "bin"):
                (self.directory / name).mkdir()
            if uv := find_uv():
                (self.directory / "bin" / "uv").symlink_to(Path(uv).resolve())
            self.notes = (f"ran in a fresh environment from {note}",)
        except BuildFailed as error:
            blocked = self._blocked(self.directory, error)
            self.remove()
            raise blocked from error
        except BaseException:
            self.remove()
            raise

    def _blocked(self, directory: Path, error: BuildFailed) -> BlockedError:
        """The error of a build that failed. Its log goes with the directory, so the end of it is told and no file there is named."""
        for log in (directory / "environments").glob(f"*{FAILED}"):
            lines = read_text(log).splitlines()[-LAST_LINES:]
            for line in ("the build ended with:", *(f"  {line}" for line in lines)):
                self._tell(line)
        message = error.without_log.replace(str(directory / DEPENDENCIES), "pyproject.toml")
        what = " ".join(f"--with {shlex.quote(one)}" for one in self.packages) if error.beside else "the lock (without one, pyproject.toml)"
        fix = f"correct {what}, or the access to the package index; then run it again"
        return BlockedError(Boundary.ENVIRONMENT, f"the fresh environment cannot be built: {message}", fix)

    def command(self, argv: tuple[str, ...], cwd: Path) -> tuple[tuple[str, ...], dict[str, str]]:
        """The words as they are, with variables of their own."""
        assert self._ready is not None
        assert self._ready.python is not None
        assert self.directory is not None
        kept = {name: value for name, value in os.environ.items() if name in PASSED_ON or name.startswith("LC_") or name in self.env}
        path = os.pathsep.join([str(self._ready.python.parent), str(self.directory / "bin"), SYSTEM_PATH])
        home = self.directory / "home"
        own = {"HOME": str(home), "TMPDIR": str(self.directory / "tmp"), "PATH": path, "SHELL": "/bin/sh", "PWD": str(cwd)}
        own |= {f"XDG_{kind}_HOME": str(home / place) for kind, place in _XDG.items()}
        if VARIABLE not in self.env:
            own[VARIABLE] = OFF
        made = {**kept, **own, **{name: value for name, value in self._ready.variables.items() if name != "PATH"}}
        return argv, made

    def refuse(self, argv: tuple[str, ...], env: dict[str, str]) -> None:
        """The usual mistake is a tool of the caller's, such as pytest, that the project does not name among its dependencies."""
        program = argv[0]
        if "/" in program or shutil.which(program, path=env["PATH"]):
            return
        fix = f"add it with `--with {program}` (or the package that has it), or name it among the project's dependencies"
        raise BlockedError(Boundary.ENVIRONMENT, f"{program} is not in the fresh environment", fix)

    def shown(self, argv: tuple[str, ...], cwd: Path) -> list[str]:
        """What is built from, then the command."""
        if self._ready is None:
            with tempfile.TemporaryDirectory(prefix="seatrial-hermetic-") as scratch:
                note = self._plan(Path(scratch))[1]
            return [f"# a fresh environment from {note}", shlex.join(argv)]
        words, _ = self.command(argv, cwd)
        return [f"# in {self.directory}", shlex.join(words)]

    def remove(self) -> None:
        """Delete it, unless it is to be kept."""
        if self.directory is None:
            return
        if self.keep and self._ready is not None:
            self._tell(f"kept: {self.directory}")
        else:
            delete(self.directory)

    def _plan(self, scratch: Path) -> tuple[EnvironmentPlan, str]:
        """How it is made, and in words."""
        if (self.project / "uv.lock").is_file() and find_uv():
            return EnvironmentPlan(kind="uv", lock="uv.lock", packages=self.packages), "uv.lock"
        for name in LOCKS:
            if (self.project / name).is_file():
                return EnvironmentPlan(kind="pip", lock=name, packages=self.packages), name
        if (self.project / "uv.lock").is_file():
            raise UserError(f"{self.project}: has a uv.lock, and uv is not on PATH", "install it: pip install uv")
        if (self.project / "pyproject.toml").is_file():
            wanted = scratch / DEPENDENCIES
            write_text(wanted, "".join(f"{line}\n" for line in _dependencies(self.project / "pyproject.toml")))
            note = "the dependencies in pyproject.toml, which no lock pins"
            return EnvironmentPlan(kind="pip", lock=str(wanted), packages=self.packages), note
        looked = ", ".join(("uv.lock", *LOCKS, "pyproject.toml"))
        raise UserError(f"{self.project}: nothing says what a fresh environment must hold", f"add one of {looked}; or give --image")


_XDG = {"CACHE": ".cache", "CONFIG": ".config", "DATA": ".local/share", "STATE": ".local/state"}


def _dependencies(file: Path) -> list[str]:
    try:
        project = parse_toml(read_text(file)).get("project", {})
    except BadValue as error:
        raise UserError(f"{file}: {error}", "correct the file") from error
    found = project.get("dependencies", [])
    if not isinstance(found, list) or not all(isinstance(line, str) for line in found):
        raise UserError(f"{file}: project.dependencies is not a list of texts", "correct the file")
    return found
