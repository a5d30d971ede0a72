"""Builds one venv from a lock file, and reads back what is in it.

- A lock file holds the exact packages of an environment as pip requirements. Header comments `# key: value` stand before the first pin.
- A venv holds what its lock pins and nothing else, not even pip: pip runs from outside (`pip --python`).
- An environment is a full freeze and is installed without resolving; a layer is resolved, so that a package that needs more on this
  machine (torch with CUDA) gets it.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import platform
import re
import shutil
import sys
import textwrap
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from seatrial.core import files
from seatrial.core.errors import BlockedError, UserError
from seatrial.core.guarded import BadValue, parse_json, parse_step
from seatrial.core.verdict import Boundary
from seatrial.runtime.command import NoAnswerError, run_command
from seatrial.runtime.interrupt import check_stop
from seatrial.runtime.process import STAMP_LENGTH, LineFilter, ProcessSpec, Tick, run

LAYERS = Path(__file__).parent / "layers"

_WAY_OF_BUILDING = 1
"""Part of every hash: raise it when environments must be built anew because Seatrial builds them differently."""
_HEADER = re.compile(r"#\s*([a-z][a-z-]*):\s*(.*)")
_PIN = re.compile(r"([A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)==([A-Za-z0-9](?:[A-Za-z0-9.!+_-]*[A-Za-z0-9])?)")
_VALUE = {
    "python": re.compile(r"\d+\.\d+"),
    "layer": re.compile(r"[a-z0-9][a-z0-9-]*"),
    "disk-mb": re.compile(r"\d+"),
    "requires-python": re.compile("ignored"),
}


@dataclass(frozen=True, slots=True)
class Lock:
    """A parsed lock file with its layer."""

    path: Path
    python: str
    """Major and minor version: `3.11`."""
    pins: Mapping[str, str] = field(default_factory=dict)
    """Version by normalised package name."""
    disk_mb: int = 0
    layer: Lock | None = None
    any_python: bool = False
    """Whether packages are taken that say they are not for this Python."""

    @property
    def name(self) -> str:
        """The name of the file, which is the name of a layer."""
        return self.path.stem

    def all_pins(self) -> dict[str, str]:
        """The pins of the environment and of its layer."""
        return {**(self.layer.pins if self.layer else {}), **self.pins}

    def hash(self) -> str:
        """Equal exactly when the same packages would be installed for the same Python on the same kind of machine."""
        content = {
            "building": _WAY_OF_BUILDING,
            "python": self.python,
            "machine": platform.machine(),
            "pins": sorted(self.pins.items()),
            "layer": self.layer.hash() if self.layer else None,
        }
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def normalise(name: str) -> str:
    """A package name as all tools compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def same_version(pin: str, installed: str) -> bool:
    """Whether `installed` satisfies `==pin`: a local label such as `+cpu` counts only when the pin has one."""
    return _canonical(pin) == _canonical(installed if "+" in pin else installed.partition("+")[0])


def _canonical(version: str) -> list[str]:
    parts = [str(part if (number := parse_step(part)) is None else number) for part in version.lower().split(".")]
    while len(parts) > 1 and parts[-1] == "0":
        parts.pop()
    return parts


def read_lock(path: Path, layers: Path = LAYERS) -> Lock:
    """Parse a lock and its layer."""
    return _read(path, layers, None)


def _read(path: Path, layers: Path, python: str | None) -> Lock:
    """Parse one lock; `python` is given for a layer, which is built for the Python of the environment."""
    header: dict[str, str] = {}
    pins: dict[str, str] = {}
    for number, line in enumerate(files.read_text(path).splitlines(), start=1):
        text, where = line.strip(), f"{path}:{number}"
        if text.startswith("#"):
            if not pins:
                _take_header(header, text, where)
            continue
        pin = re.sub(r"\s+#.*", "", text)
        if pin:
            _take_pin(pins, pin, where)
    wanted = header.get("python", python)
    if wanted is None:
        raise UserError(f"{path}: the header does not name the Python version", "add a line at the top: # python: 3.11")
    if python is not None and wanted != python:
        raise UserError(f"{path}: the layer is for Python {wanted}, the environment for {python}", "use a layer for that Python version")
    if python is not None and "layer" in header:
        raise UserError(f"{path}: a layer cannot have a layer", "remove the line # layer:")
    layer = _layer(path, header["layer"], layers, wanted) if "layer" in header else None
    twice = sorted(pins.keys() & layer.pins.keys()) if layer else []
    if twice:
        raise UserError(
            f"{path}: pinned here and in the layer {header['layer']}: {', '.join(twice)}", "remove the pins from one of the two"
        )
    return Lock(path, wanted, pins, int(header.get("disk-mb", "0")), layer, "requires-python" in header)


def _layer(path: Path, name: str, layers: Path, python: str) -> Lock:
    target = layers / f"{name}.lock"
    if not target.is_file():
        known = ", ".join(sorted(found.stem for found in layers.glob("*.lock"))) or "none"
        raise UserError(f"{path}: there is no layer {name}", f"name one of: {known}")
    return _read(target, layers, python)


def _take_header(header: dict[str, str], text: str, where: str) -> None:
    match = _HEADER.fullmatch(text)
    if match is None:
        return
    key, value = match[1], match[2].strip()
    if key not in _VALUE:
        raise UserError(f"{where}: unknown header key `{key}`", f"use one of {', '.join(_VALUE)}, or write a comment without `word:`")
    if key in header:
        raise UserError(f"{where}: `{key}` is given twice", "remove one of the two lines")
    if not _VALUE[key].fullmatch(value):
        raise UserError(f"{where}: `{key}` cannot be `{value}`", "for example: # python: 3.11, # layer: torch-cpu, # disk-mb: 1600")
    header[key] = value


def _take_pin(pins: dict[str, str], text: str, where: str) -> None:
    match = _PIN.fullmatch(text)
    if match is None:
        raise UserError(f"{where}: not an exact pin: `{text}`", "write name==version, one per line, without markers, extras or options")
    name = normalise(match[1])
    if name in pins:
        raise UserError(f"{where}: {name} is pinned twice", "remove one of the two lines")
    pins[name] = match[2]


BUILD_LOG = "build.log"
_ANSWER_S = 120.0

_NOT_PASSED_ON = (
    "PYTHONPATH",
    "PYTHONHOME",
    "PIP_CONSTRAINT",
    "PIP_REQUIREMENT",
    "PIP_NO_DEPS",
    "PIP_TARGET",
    "PIP_PREFIX",
    "PIP_ROOT",
    "PIP_USER",
    "PIP_PYTHON",
    "PIP_DRY_RUN",
)
_INSTALLED = """
import importlib.metadata, json, platform
found = [(d.metadata["Name"], d.version, str(d.locate_file(""))) for d in importlib.metadata.distributions()]
print(json.dumps({"python": platform.python_version(), "packages": found}))
"""


@dataclass(frozen=True, slots=True)
class Installed:
    """What an interpreter can import, by its package metadata."""

    python_version: str
    packages: Mapping[str, tuple[str, ...]]
    """All versions found, by normalised name: more than one means a torn installation."""

    def differences(self, pins: Mapping[str, str]) -> list[str]:
        """How this differs from `pins`, one sentence each."""
        found = []
        for name, pin in sorted(pins.items()):
            versions = self.packages.get(name, ())
            if not versions:
                found.append(f"{name} {pin} is missing")
            elif not all(same_version(pin, version) for version in versions):
                found.append(f"{name} is {' and '.join(versions)} instead of {pin}")
        return found


@dataclass(frozen=True, slots=True)
class Build:
    """One build under way: where, from what, and whom to tell."""

    name: str
    """Of the environment or layer that is made."""
    asked: str
    """The environment that was asked for; the same as `name` unless this is its layer."""
    directory: Path
    lock: Lock
    progress: Callable[[str], None]
    stops: float
    """`time.monotonic()` at which the build is given up."""
    line_filter: LineFilter = str
    """What the lines of its log go through."""

    def make(self, layer: Path | None, resolve: bool) -> Installed:
        """Make the venv in the empty `directory` and return what is in it, checked against the lock."""
        python = find_python(self.lock.python)
        self._step("creating", (python, "-m", "venv", "--without-pip", str(self.directory)))
        if layer is not None:
            files.write_text(
                site_packages(self.directory, self.lock.python) / "seatrial-layer.pth", f"{site_packages(layer, self.lock.python)}\n"
            )
        inside = interpreter(self.directory)
        if self.lock.pins:
            options = ["--no-input", "--disable-pip-version-check", "--progress-bar", "off"]
            options += [] if resolve else ["--no-deps"]
            options += ["--ignore-requires-python"] if self.lock.any_python else []
            argv = (python_with_pip(python), "-m", "pip", "--python", str(inside), "install", *options, "-r", str(self.lock.path))
            self._step(f"installing {len(self.lock.pins)} packages", argv)
        installed = read_installed(inside)
        differences = installed.differences(self.lock.all_pins())
        if differences:
            raise self._blocked(f"pip succeeded, but {'; '.join(differences)}")
        return installed

    def _step(self, what: str, argv: tuple[str, ...]) -> None:
        log = self.directory / BUILD_LOG

        failure = follow(
            argv,
            self.name,
            what,
            log=log,
            cwd=self.directory,
            env=clean_env(),
            stops=self.stops,
            progress=self.progress,
            line_filter=self.line_filter,
        )
        if failure:
            raise self._blocked(failure)

    def _blocked(self, message: str) -> BlockedError:
        log = self.directory / BUILD_LOG
        fix = f"read {log}, remove the cause (network, package index, disk), then: seatrial env build {self.asked}"
        return BlockedError(Boundary.ENVIRONMENT, f"building {self.name}: {message} (log: {log})", fix)


def follow(
    argv: tuple[str, ...],
    name: str,
    what: str,
    *,
    log: Path,
    cwd: Path,
    env: Mapping[str, str],
    stops: float,
    progress: Callable[[str], None],
    line_filter: LineFilter = str,
) -> str:
    """Run one step of the build `name` until `stops` (`time.monotonic()`) and pass its lines on; why it failed, or an empty string."""
    progress(f"{name}: {what}")
    last = ""

    def tell(tick: Tick) -> None:
        nonlocal last
        if tick.last_line != last and not tick.last_line.startswith("WARNING: "):
            last = tick.last_line
            progress(f"{name}: {textwrap.shorten(last, 120, placeholder=' …')}")

    left = max(0.0, stops - time.monotonic())
    run_id = f"build-{log.parent.name}-{uuid.uuid4().hex[:12]}"
    spec = ProcessSpec(argv=argv, env=env, cwd=cwd, log=log, run_id=run_id, deadline_s=left, stall_s=left, line_filter=line_filter)
    outcome = run(spec, tell)
    if outcome.ended == "interrupted":
        check_stop()
    if outcome.ended != "exited":
        return f"{what} took too long and was ended"
    return f"{what} failed: {_last_error(log)}" if outcome.exit_code != 0 else ""


def interpreter(directory: Path) -> Path:
    """The Python of a venv."""
    return directory / "bin" / "python"


def site_packages(directory: Path, python: str) -> Path:
    """Where a venv for Python `3.11` keeps its packages."""
    return directory / "lib" / f"python{python}" / "site-packages"


def find_python(version: str) -> str:
    """An interpreter of `major.minor`: Seatrial's own if it fits, or the one on PATH, or one that pyenv has; else a BlockedError."""
    if version == f"{sys.version_info.major}.{sys.version_info.minor}":
        return sys.executable
    # A version manager's stand-in exists for every version and works for the activated ones only: try it, then ask for the real one.
    for found in (shutil.which(f"python{version}"), _of_pyenv(version)):
        if found and _output([found, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]).strip() == version:
            return found
    fix = f"install Python {version} with its venv module, so that python{version} is on PATH"
    raise BlockedError(Boundary.ENVIRONMENT, f"no working python{version} on PATH, and Seatrial runs on another version", fix)


def _of_pyenv(version: str) -> str | None:
    """The newest `major.minor` that pyenv has, activated or not."""
    prefix = _output(["pyenv", "prefix", version]).strip() if shutil.which("pyenv") else ""
    return f"{prefix}/bin/python{version}" if prefix.startswith("/") else None


def read_installed(python: Path) -> Installed:
    """Ask an interpreter what it has installed; a BlockedError when it does not run."""
    text = _output([str(python), "-I", "-c", _INSTALLED])
    try:
        answer = parse_json(text)
    except BadValue as error:
        fix = "seatrial env check, or rebuild the environment"
        raise BlockedError(Boundary.ENVIRONMENT, f"{python} does not run: {_last_line(text) or 'no output'}", fix) from error
    packages: dict[str, tuple[str, ...]] = {}
    places: dict[str, str] = {}
    if not isinstance(answer, dict) or not {"python", "packages"} <= answer.keys():
        raise BlockedError(Boundary.ENVIRONMENT, f"{python} is no Python: it answers {text.strip()[:100]}", "name a Python interpreter")
    for name, version, place in answer["packages"]:
        key = normalise(str(name))
        # The first place on the import path wins, as in an import: an environment may shadow what its layer brought along.
        if places.setdefault(key, place) == place:
            packages[key] = (*packages.get(key, ()), str(version))
    return Installed(answer["python"], packages)


def _last_line(text: str) -> str:
    """Where Python and most programs name an error, at most 300 characters of it."""
    line = (text.strip().splitlines() or [""])[-1]
    return line if len(line) <= 300 else f"{line[:300]} …"


def _output(argv: list[str]) -> str:
    """What a short command prints; what it complains about when it fails."""
    try:
        done = run_command(argv, _ANSWER_S, env=clean_env())
    except NoAnswerError as error:
        return f"it did not answer within {_ANSWER_S:g} s" if error.late else str(error)
    return done.out if done.code == 0 else done.error


def python_with_pip(python: str) -> str:
    """Seatrial's interpreter or the environment's base, whichever has pip."""
    if importlib.util.find_spec("pip") is not None:
        return sys.executable
    if _output([python, "-m", "pip", "--version"]).startswith("pip "):
        return python
    raise BlockedError(Boundary.ENVIRONMENT, f"neither {sys.executable} nor {python} has pip", f"{sys.executable} -m ensurepip")


def clean_env() -> dict[str, str]:
    """The caller's environment without what would change what is installed."""
    return {key: value for key, value in os.environ.items() if key not in _NOT_PASSED_ON}


def _last_error(log: Path) -> str:
    """The last line that pip marked as an error, or the last line at all."""
    lines = [line[STAMP_LENGTH:].strip() for line in files.read_text(log).splitlines()]
    lines = [line for line in lines if line]
    errors = [line for line in lines if line.lower().startswith("error")]
    return (errors or lines or ["no output"])[-1]
