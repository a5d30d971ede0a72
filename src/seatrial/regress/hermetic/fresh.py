"""A fresh environment as a place to run a command in: nothing of the caller's is seen there.

- A new venv is built from the project's lock (uv.lock, requirements.lock, requirements.txt), by the same code as for a bisect; from
  the dependencies in pyproject.toml where there is no lock, which a note says. The project itself is on the import path.
- HOME, TMPDIR, caches and configuration are new and empty. Of the caller's variables only those are passed on that say language,
  terminal, proxy, certificates and GPUs, and those that the user names. Automatic imports into the history are off, unless the user names
  its variable: the store would go with the environment.
- It is deleted when the command has ended, unless it is to be kept.
"""

from __future__ import annotations

import os
import shlex
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from seatrial.files import read_text, write_text
from seatrial.launch.environments import delete
from seatrial.model.errors import BlockedError, UserError
from seatrial.model.guarded import BadValue, parse_toml
from seatrial.model.verdict import Boundary
from seatrial.regress.bisect.environments.builds import BESIDE
from seatrial.regress.bisect.environments.cache import FAILED, BisectEnvironments, Ready, log_told
from seatrial.regress.bisect.environments.locks import BuildFailed
from seatrial.regress.bisect.record import EnvironmentPlan
from seatrial.regress.hermetic.place import Place
from seatrial.regress.hermetic.requirements import check_requirement
from seatrial.regress.history.switch import OFF, VARIABLE

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


class Fresh(Place):
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
        self._ready: Ready | None = None

    def prepare(self) -> None:
        """Build it."""
        self.directory = Path(tempfile.mkdtemp(prefix="seatrial-hermetic-"))
        try:
            plan, note = self._plan(self.directory)
            self._ready = BisectEnvironments(self.directory / "environments").ensure(self.project, plan, self._tell, BUILD_S)
            for name in ("home", "tmp", "bin"):
                (self.directory / name).mkdir()
            if uv := shutil.which("uv"):
                (self.directory / "bin" / "uv").symlink_to(Path(uv).resolve())
            self.notes = (f"ran in a fresh environment from {note}",)
        except BuildFailed as error:
            blocked = self._blocked(self.directory, error.message)
            self.remove()
            raise blocked from error
        except BaseException:
            self.remove()
            raise

    def _blocked(self, directory: Path, message: str) -> BlockedError:
        """The error of a build that failed. Its log goes with the directory, so the end of it is told and no file there is named."""
        for log in (directory / "environments").glob(f"*{FAILED}"):
            message = message.replace(log_told(log), "")
            lines = read_text(log).splitlines()[-LAST_LINES:]
            for line in ("the build ended with:", *(f"  {line}" for line in lines)):
                self._tell(line)
        message = message.replace(str(directory / DEPENDENCIES), "pyproject.toml")
        beside = BESIDE in message
        what = " ".join(f"--with {shlex.quote(one)}" for one in self.packages) if beside else "the lock (without one, pyproject.toml)"
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
        if (self.project / "uv.lock").is_file() and shutil.which("uv"):
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
