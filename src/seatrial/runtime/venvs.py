"""Builds one venv from a lock file, and reads back what is in it.

- A lock file holds the exact packages of an environment as pip requirements. Header comments `# key: value` stand before the first pin.
- A venv holds what its lock pins and nothing else, not even pip: uv (where it is installed) or pip runs from outside.
- An environment is a full freeze and is installed without resolving; a layer is resolved, so that a package that needs more on this
  machine (torch with CUDA) gets it.
"""

from __future__ import annotations

import hashlib
import importlib
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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from seatrial.core import files
from seatrial.core.errors import BlockedError, UserError
from seatrial.core.guarded import BadValue, parse_json, parse_step
from seatrial.core.verdict import Boundary
from seatrial.runtime.command import NoAnswerError, run_command
from seatrial.runtime.interrupt import check_stop
from seatrial.runtime.process import STAMP_LENGTH, CannotStart, LineFilter, ProcessSpec, Tick, run

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
    layer = None
    if "layer" in header:
        target = layers / f"{header['layer']}.lock"
        if not target.is_file():
            known = ", ".join(sorted(found.stem for found in layers.glob("*.lock"))) or "none"
            raise UserError(f"{path}: there is no layer {header['layer']}", f"name one of: {known}")
        layer = _read(target, layers, wanted)
    twice = sorted(pins.keys() & layer.pins.keys()) if layer else []
    if twice:
        raise UserError(
            f"{path}: pinned here and in the layer {header['layer']}: {', '.join(twice)}", "remove the pins from one of the two"
        )
    return Lock(path, wanted, pins, int(header.get("disk-mb", "0")), layer, "requires-python" in header)


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
_PIP_OPTIONS = ("--no-input", "--disable-pip-version-check", "--progress-bar", "off")
_UV_OPTIONS = ("--no-progress", "--compile-bytecode", "--index-strategy", "unsafe-best-match")
"""As pip: all indexes are equal, and modules are compiled at once."""
_UV_NAMES = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "no-index": "UV_NO_INDEX",
    "trusted-host": "UV_INSECURE_HOST",
    "cert": "SSL_CERT_FILE",
}
"""uv's names of pip's settings."""
_UV_KEPT = (
    *("UV_CACHE_DIR", "UV_DEFAULT_INDEX", "UV_INDEX", "UV_EXTRA_INDEX_URL", "UV_FIND_LINKS", "UV_NO_INDEX", "UV_OFFLINE", "UV_NETRC"),
    *("UV_HTTP", "UV_NATIVE_TLS", "UV_SYSTEM_CERTS", "UV_INSECURE_HOST", "UV_KEYRING", "UV_CONCURRENT", "UV_LINK_MODE", "UV_PYTHON_"),
)
"""Beginnings of the variables of uv that say where from and how fast, not what."""
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

    def first_versions(self) -> dict[str, str]:
        """The version of each package that an import finds."""
        return {name: versions[0] for name, versions in sorted(self.packages.items())}

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


LAYER = "seatrial-layer.pth"
"""Names the layer whose packages a venv sees."""


class StepFailed(Exception):
    """A step of a build failed; says which and why."""

    def __init__(self, message: str, *, started: bool = True) -> None:
        super().__init__(message)
        self.started = started
        """Whether its program ran at all."""


@dataclass(frozen=True, slots=True)
class VenvBuilder:
    """Makes a venv and installs into it, with one log and one deadline: with uv where there is one, otherwise with pip."""

    name: str
    log: Path
    stops: float
    """`time.monotonic()` at which the build is given up."""
    progress: Callable[[str], None]
    line_filter: LineFilter = str
    """What the lines of its log go through."""

    def step(self, what: str, argv: tuple[str, ...], *, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> None:
        """Run one step and pass its lines on; a StepFailed when it fails."""
        self.progress(f"{self.name}: {what}")
        last = ""

        def tell(tick: Tick) -> None:
            nonlocal last
            if tick.last_line != last and not tick.last_line.startswith("WARNING: "):
                last = tick.last_line
                self.progress(f"{self.name}: {textwrap.shorten(last, 120, placeholder=' …')}")

        left = max(0.0, self.stops - time.monotonic())
        run_id = f"build-{self.log.parent.name}-{uuid.uuid4().hex[:12]}"
        spec = ProcessSpec(
            argv=argv, env=env or clean_env(), cwd=cwd or self.log.parent, log=self.log, run_id=run_id, deadline_s=left, stall_s=left,
            line_filter=self.line_filter,
        )  # fmt: skip
        try:
            outcome = run(spec, tell)
        except CannotStart as error:
            raise StepFailed(f"{what} failed: {error.message}", started=False) from error
        if outcome.ended == "interrupted":
            check_stop()
        if outcome.ended != "exited":
            raise StepFailed(f"{what} took too long and was ended")
        if outcome.exit_code != 0:
            lines = [text for line in files.read_text(self.log).splitlines() if (text := line[STAMP_LENGTH:].strip())]
            errors = [line for line in lines if line.lower().startswith("error")]
            raise StepFailed(f"{what} failed: {(errors or lines or ['no output'])[-1]}")

    def create(self, python: str, venv: Path) -> None:
        """An empty venv. Not by uv, which puts modules of its own into it."""
        self.step("creating", (python, "-m", "venv", "--without-pip", str(venv)))

    def _empty(self, python: str, venv: Path) -> None:
        """The venv as it was before an install that broke off: pip would take what that began for installed."""
        layers = {path: path.read_text(encoding="utf-8") for path in venv.glob(f"lib/python*/site-packages/{LAYER}")}
        files.delete(venv)
        self.create(python, venv)
        for path, text in layers.items():
            files.write_text(path, text)

    def install(
        self, what: str, python: str, venv: Path, requirements: Path, *options: str, pip_only: Sequence[str] = (), uv_too: bool = True
    ) -> None:
        """Install what a requirements file names into a new venv, with `options` that uv and pip share. Where uv fails pip tries, and its
        word counts. Not `uv_too`: the file may say what uv understands in another way, or the venv is not new."""
        last = (*options, "-r", str(requirements))
        uv = find_uv() if uv_too and not pip_only else None
        if uv is not None:
            argv = (uv, "pip", "install", "--python", str(interpreter(venv)), *_UV_OPTIONS, *last)
            try:
                self.step(f"{what} with uv", argv, env=uv_env(python))
            except StepFailed as error:
                self.progress(f"{self.name}: {error}; pip tries")
                self._empty(python, venv)
            else:
                # Without resolving uv installs also what is for another Python, which pip refuses.
                told = _output([uv, "pip", "check", "--python", str(interpreter(venv))]) if "--no-deps" in options else ""
                if wrong := [line for line in told.splitlines() if "requires Python" in line]:
                    raise StepFailed(wrong[0])
                return
        argv = (python_with_pip(python), "-m", "pip", "--python", str(interpreter(venv)), "install", *_PIP_OPTIONS, *pip_only, *last)
        self.step(what, argv)


def make_venv(builder: VenvBuilder, directory: Path, lock: Lock, layer: Path | None, resolve: bool) -> Installed:
    """Make the venv of a lock in the empty `directory` and return what is in it, checked against the lock."""
    python = find_python(lock.python)
    builder.create(python, directory)
    if layer is not None:
        files.write_text(site_packages(directory, lock.python) / LAYER, f"{site_packages(layer, lock.python)}\n")
    if lock.pins:
        shared, pip_only = () if resolve else ("--no-deps",), ("--ignore-requires-python",) if lock.any_python else ()
        builder.install(f"installing {len(lock.pins)} packages", python, directory, lock.path, *shared, pip_only=pip_only)
    installed = read_installed(interpreter(directory))
    if differences := installed.differences(lock.all_pins()):
        raise StepFailed(f"the installer succeeded, but {'; '.join(differences)}")
    return installed


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
    prefix = _output(["pyenv", "prefix", version]).strip() if shutil.which("pyenv") else ""
    for found in (shutil.which(f"python{version}"), f"{prefix}/bin/python{version}" if prefix.startswith("/") else None):
        if found and _output([found, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]).strip() == version:
            return found
    fix = f"install Python {version} with its venv module, so that python{version} is on PATH"
    raise BlockedError(Boundary.ENVIRONMENT, f"no working python{version} on PATH, and Seatrial runs on another version", fix)


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


def find_uv() -> str | None:
    """Where uv is: on PATH, or beside this interpreter; None when it is not installed."""
    if found := shutil.which("uv"):
        return found
    if importlib.util.find_spec("uv") is None:
        return None
    try:
        return str(importlib.import_module("uv").find_uv_bin())
    except (ImportError, AttributeError, OSError):
        return None


def uv_env(python: str | None = None) -> dict[str, str]:
    """The environment for uv: its variables that say where from, and what pip's settings say of that where `python` is named."""
    passed = {name: value for name, value in clean_env().items() if not name.startswith("UV_") or name.startswith(_UV_KEPT)}
    passed.pop("VIRTUAL_ENV", None)
    if python is None:
        return passed
    found: dict[str, str] = {}
    lines = _output([python_with_pip(python), "-m", "pip", "config", "list"]).splitlines()
    # Sections as pip ranks them: variables win.
    for section in ("global.", "install.", ":env:."):
        for line in lines:
            key, _, value = line.removeprefix(section).partition("=")
            if line.startswith(section) and key in _UV_NAMES:
                found[key] = " ".join(value.strip("'\"").replace("\\n", " ").split())
    if found.get("no-index", "").lower() in ("0", "false", "no", "off"):
        del found["no-index"]
    if "find-links" in found:
        found["find-links"] = found["find-links"].replace(" ", ",")
    # Copies: a file that a run changes in one environment must not change in another.
    return {**{_UV_NAMES[key]: value for key, value in found.items()}, **passed, "UV_LINK_MODE": "copy"}


def clean_env() -> dict[str, str]:
    """The caller's environment without what would change what is installed."""
    return {key: value for key, value in os.environ.items() if key not in _NOT_PASSED_ON}
