"""Running pip, uv and the build command of a tree, and saying whether the machine or the commit failed.

- pip runs from outside the environment, as for loops (`launch.venvs`); uv is told the project, the place, and what not to install.
- Settings of the caller that would change what is installed are not passed on; indexes, credentials, caches and proxies are.
- A failure is transient when the log shows one that is known to come from the network, the disk or the memory. That costs a second try,
  and never turns a commit good or bad.
"""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from seatrial import files
from seatrial.launch.linelog import LineFilter
from seatrial.launch.process import CannotStart
from seatrial.launch.venvs import clean_env, follow, interpreter, python_with_pip, read_installed
from seatrial.model.errors import BlockedError
from seatrial.model.verdict import Boundary
from seatrial.regress.bisect.environments.locks import BuildFailed, Wanted
from seatrial.triage.log import read_log
from seatrial.triage.signatures import GENERAL, Hit, first_match, load_signatures

MACHINE = (
    *("no-space", "dns", "network", "connection-refused", "hub-rate-limit"),
    *("host-memory", "process-limit", "too-many-open-files", "shared-memory"),
)
"""Known failures that no commit causes in a build. A missing compiler or a file that may not be read can be the commit's doing."""

_INDEX = re.compile(
    r"ReadTimeoutError|ConnectTimeoutError|NewConnectionError|ConnectionResetError|IncompleteRead|Max retries exceeded|SSLError"
    r"|Connection (reset|aborted|broken|timed out)|(Read|[Oo]peration) timed out|error sending request|connection closed"
    r"|\b(429|50[0234]) (Client |Server )?Error|HTTP status (server error|client error \(429)"
)
"""How pip and uv say that an index could not be reached; no loop does, so these are not among the general signatures."""

BESIDE = "(--with)"
"""In the message of a failure: it was about further packages, not about the lock."""
_NOT_FOR_OTHERS = ("-e", "--editable", "--require-hashes")
"""Options of a lock that are not about where packages come from."""
_UV_KEPT = (
    *("UV_CACHE_DIR", "UV_DEFAULT_INDEX", "UV_INDEX", "UV_EXTRA_INDEX_URL", "UV_FIND_LINKS", "UV_NO_INDEX", "UV_OFFLINE", "UV_NETRC"),
    *("UV_HTTP", "UV_NATIVE_TLS", "UV_SYSTEM_CERTS", "UV_INSECURE_HOST", "UV_KEYRING", "UV_CONCURRENT", "UV_LINK_MODE", "UV_PYTHON_"),
)
"""Beginnings of the variables of uv that say where from and how fast, not what."""


@dataclass(frozen=True, slots=True)
class Job:
    """One build under way."""

    name: str
    log: Path
    stops: float
    """`time.monotonic()` at which it is given up."""
    progress: Callable[[str], None]
    redact: LineFilter
    by_command: bool = False
    """Whether it is the command of --build."""

    def run(self, what: str, argv: tuple[str, ...], cwd: Path, env: Mapping[str, str]) -> None:
        """Run one step of it; a BuildFailed when that fails."""
        try:
            failure = follow(
                argv,
                self.name,
                what,
                log=self.log,
                cwd=cwd,
                env=env,
                stops=self.stops,
                progress=self.progress,
                line_filter=self.redact,
            )
        except CannotStart as error:
            raise BuildFailed(f"{what} failed: {error.message}", by_command=self.by_command) from error
        if failure:
            raise BuildFailed(failure, transient=by_machine(self.log), by_command=self.by_command)


_PIP_OPTIONS = ("--no-input", "--disable-pip-version-check", "--progress-bar", "off")


def build_with_pip(job: Job, venv: Path, wanted: Wanted, python: str) -> None:
    """A venv with what the requirements ask for, without pip itself."""
    outer = python_with_pip(python)
    job.run("creating", (python, "-m", "venv", "--without-pip", str(venv)), venv.parent, clean_env())
    if not wanted.requirements:
        return
    place, options = venv.parent / "requirements.txt", [*_PIP_OPTIONS]
    files.write_text(place, "".join(f"{line}\n" for line in wanted.requirements))
    if wanted.constraints:
        files.write_text(venv.parent / "constraints.txt", "".join(f"{line}\n" for line in wanted.constraints))
        options += ["-c", str(venv.parent / "constraints.txt")]
    argv = (outer, "-m", "pip", "--python", str(interpreter(venv)), "install", *options, "-r", str(place))
    job.run(f"installing {len(wanted.requirements)} requirements", argv, venv.parent, clean_env())


def build_with_uv(job: Job, venv: Path, wanted: Wanted, python: str, project: Path) -> None:
    """What `uv sync` makes of the lock, without the packages that are in the tree."""
    leave = [part for name in wanted.left_out for part in ("--no-install-package", name)]
    chosen = ("--python", python) if python else ()
    argv = (find_uv(), "sync", "--frozen", "--no-progress", *chosen, *leave)
    job.run("syncing", argv, project, {**_uv_env(), "UV_PROJECT_ENVIRONMENT": str(venv)})


def add_with_pip(job: Job, venv: Path, wanted: Wanted, packages: Sequence[str], python: str) -> None:
    """Install further packages from where the lock takes its own; what is there keeps its version."""
    options = [line for line in wanted.requirements if line.startswith("-") and not line.startswith(_NOT_FOR_OTHERS)]
    place = venv.parent / "with.txt"
    files.write_text(place, "".join(f"{line}\n" for line in (*options, *packages)))
    argv = (python_with_pip(python), "-m", "pip", "--python", str(interpreter(venv)), "install", *_PIP_OPTIONS)
    job.run(_beside(packages), (*argv, "-c", str(_present(venv, wanted.constraints)), "-r", str(place)), venv.parent, clean_env())


def add_with_uv(job: Job, venv: Path, packages: Sequence[str], project: Path) -> None:
    """The same with uv, which reads in the project where packages come from."""
    argv = (find_uv(), "pip", "install", "--no-progress", "--python", str(interpreter(venv)), "--constraint", str(_present(venv)))
    job.run(_beside(packages), (*argv, *packages), project, _uv_env())


def _beside(packages: Sequence[str]) -> str:
    return f"installing {', '.join(packages)} beside it {BESIDE}"


def _present(venv: Path, constraints: Sequence[str] = ()) -> Path:
    """What is installed, as constraints: unlike the lock, this holds versions only, which is all that pip takes here."""
    place, installed = venv.parent / "present.txt", read_installed(interpreter(venv)).packages
    pins = (f"{name}=={versions[0]}" for name, versions in sorted(installed.items()))
    more = (line for line in constraints if "--hash" not in line)  # one hash would demand one of everything
    files.write_text(place, "".join(f"{line}\n" for line in (*pins, *more)))
    return place


def run_build(tree: Path, command: tuple[str, ...], variables: Mapping[str, str], log: Path, minutes: float, redact: LineFilter) -> None:
    """Run a build command in the tree; a BuildFailed when it fails."""
    job = Job(command[0], log, time.monotonic() + 60 * minutes, lambda _: None, redact, by_command=True)
    job.run("the build command", command, tree, {**clean_env(), **variables})


def find_uv() -> str:
    """Where uv is; a BlockedError when it is not."""
    if found := shutil.which("uv"):
        return found
    raise BlockedError(Boundary.ENVIRONMENT, "uv is not on PATH", "install it (pip install uv), or choose --env none")


def by_machine(log: Path) -> bool:
    """Whether the log shows a failure that the machine or the network is known for."""
    lines = [Hit(line.number, line.body) for line in read_log(log)]
    known = (signature for signature in load_signatures(GENERAL) if signature.id in MACHINE)
    return any(first_match(signature, lines) for signature in known) or any(_INDEX.search(line.text) for line in lines)


def _uv_env() -> dict[str, str]:
    passed = {name: value for name, value in clean_env().items() if not name.startswith("UV_") or name.startswith(_UV_KEPT)}
    passed.pop("VIRTUAL_ENV", None)
    return passed
