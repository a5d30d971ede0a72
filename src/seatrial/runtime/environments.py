"""The environments that loops run in: a cache of venvs, one per lock file, shared by all trials of this user; their mounts in a container.

- An environment lies in `envs/<name>-<hash of its lock>/`, a layer in `layers/<name>-<hash>/`. A marker, written last, says that it is
  complete.
- One process builds an environment while the others wait; one that is in use is not removed.
- `mounts_of` mounts only what exists: pyxis refuses a source that is missing. Every mount has the same path inside and outside.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import psutil

import seatrial
from seatrial.core import files
from seatrial.core.errors import BlockedError, FindingCode, UserError
from seatrial.core.guarded import exists, real_path
from seatrial.core.records import Finding, Record
from seatrial.core.verdict import Boundary
from seatrial.runtime.filelock import exclusive, holder
from seatrial.runtime.process import LineFilter, end_leftovers, files_below, pid_file
from seatrial.runtime.venvs import BUILD_LOG, LAYERS, Lock, StepFailed, VenvBuilder, interpreter, make_venv, read_installed, read_lock

Kind = Literal["envs", "layers"]

MARKER = "complete.json"
_USED = "last-used"
_DIRECTORY = re.compile(r"(.+)-([0-9a-f]{12})")
_MB = 1024 * 1024


class BuildRecord(Record):
    """complete.json: what was built."""

    name: str
    lock_hash: str
    python_version: str
    built: str
    """UTC, ISO 8601."""
    size_mb: int
    layer: str | None
    """The layer's directory name."""
    packages: dict[str, str]


@dataclass(frozen=True, slots=True)
class Environment:
    """A complete environment, ready to run a loop."""

    name: str
    lock_hash: str
    path: Path

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return interpreter(self.path)


@dataclass(frozen=True, slots=True)
class Listed:
    """One directory of the cache."""

    name: str
    kind: Kind
    hash: str
    path: Path
    size_mb: int
    complete: bool
    python_version: str | None = None
    built: str | None = None
    used: str | None = None
    """When it was last found for a trial; None when never."""


def default_root() -> Path:
    """`$SEATRIAL_CACHE`, or `seatrial` in the user's cache directory."""
    if chosen := os.environ.get("SEATRIAL_CACHE"):
        return Path(chosen)
    if caches := os.environ.get("XDG_CACHE_HOME"):
        return Path(caches) / "seatrial"
    return Path.home() / ".cache" / "seatrial"


class Environments:
    """The cache of environments below `root`."""

    def __init__(self, root: Path | None = None, layers: Path = LAYERS) -> None:
        self.root = (root or default_root()).expanduser().absolute()
        self._layers = layers

    def lock_hash(self, lock: Path) -> str:
        """Hash over the pins of the lock and its layer, the Python version and the kind of machine."""
        return read_lock(lock, self._layers).hash()

    def find(self, name: str, lock: Path) -> Environment | None:
        """The complete environment of this lock, or None."""
        environment = self._find(name, read_lock(lock, self._layers))
        if environment is not None:
            try:
                (environment.path / _USED).touch()
            except OSError:
                pass  # a cache that others maintain may be read-only
        return environment

    def build(
        self,
        name: str,
        lock: Path,
        progress: Callable[[str], None],
        *,
        rebuild: bool = False,
        deadline_s: float = 1800.0,
        line_filter: LineFilter = str,
    ) -> Environment:
        """The environment of this lock, built now if there is none; `rebuild` makes it and its layer anew. The lines of its log go
        through `line_filter`.

        Raises a BlockedError at the boundary environment when it cannot be built.
        """
        wanted = read_lock(lock, self._layers)
        stops = time.monotonic() + deadline_s
        if not rebuild and (found := self._find(name, wanted)):
            return found
        with exclusive(self.root / "build.lock", f"the build of {name}", progress, deadline_s):
            if not rebuild and (found := self._find(name, wanted)):
                return found
            return self._build(name, wanted, rebuild, progress, stops, line_filter)

    def list(self) -> tuple[Listed, ...]:
        """Everything in the cache, environments first, by name."""
        return tuple(self._listed(kind, path) for kind in ("envs", "layers") for path in self._directories(kind))

    def check(self, name: str, lock: Path) -> tuple[Finding, ...]:
        """Whether the environment of this lock exists, is complete, runs, and holds exactly the pinned versions."""
        wanted = read_lock(lock, self._layers)
        path = self._place("envs", name, wanted)
        rebuild = f"seatrial env build {name} --rebuild"
        now = holder(self.root / "build.lock")
        if not path.is_dir():
            others = ", ".join(found.name for found in self._directories("envs", name))
            message = f"{path} is not there" + (f"; built from other locks: {others}" if others else "")
            return (_absent("environment exists", path, message, f"seatrial env build {name}", now),)
        findings = [Finding(name="environment exists", ok=True, message=str(path))]
        if self._find(name, wanted) is None:
            message = f"{path}: the build was not finished, or its interpreter or layer is gone"
            return (*findings, _absent("environment complete", path, message, rebuild, now))
        findings.append(Finding(name="environment complete", ok=True, message=f"{path / MARKER} is there"))
        try:
            installed = read_installed(interpreter(path))
        except BlockedError as error:
            return (*findings, Finding(name="interpreter runs", ok=False, message=error.message, fix=rebuild))
        findings.append(Finding(name="interpreter runs", ok=True, message=f"Python {installed.python_version}"))
        differences = installed.differences(wanted.all_pins())
        message = "; ".join(differences) or f"all {len(wanted.all_pins())} pinned packages have the pinned versions"
        findings.append(Finding(name="packages as locked", ok=not differences, message=message, fix=rebuild if differences else ""))
        return tuple(findings)

    def unbuilt_mb(self, name: str, lock: Path) -> int:
        """What the build of this lock's environment takes, with its layer where that is absent, too; 0 when it is complete."""
        wanted = read_lock(lock, self._layers)
        layer = wanted.layer
        if self._find(name, wanted) is not None:
            return 0
        below = layer is not None and not self._complete(self._place("layers", layer.name, layer), layer)
        return wanted.disk_mb + (layer.disk_mb if layer is not None and below else 0)

    def remove(self, name: str) -> tuple[Path, ...]:
        """Remove every environment of this name, and layers that no environment needs any more; returns what went."""
        with exclusive(self.root / "build.lock", f"the removal of {name}", lambda _: None, 10.0):
            gone = self._directories("envs", name)
            if not gone:
                known = ", ".join(sorted({found.name for found in self.list() if found.kind == "envs"})) or "none"
                raise UserError(f"there is no environment {name} in {self.root}", f"environments there: {known}")
            refuse_if_used(gone)
            for path in gone:
                delete(path)
            needed = {record.layer for path in self._directories("envs") if (record := _record(path))}
            idle = tuple(path for path in self._directories("layers") if path.name not in needed)
            for path in idle:
                delete(path)
        return (*gone, *idle)

    def _build(
        self, name: str, wanted: Lock, rebuild: bool, progress: Callable[[str], None], stops: float, line_filter: LineFilter
    ) -> Environment:
        def make(path: Path, part: str, lock: Lock, layer: Path | None, users: Iterable[Path]) -> None:
            """Build one directory from scratch and mark it complete."""
            refuse_if_used(users)
            start_afresh(path)
            room = files.room_at(self.root)
            if room.free_mb < lock.disk_mb:
                message = f"{part} needs {lock.disk_mb} MB and {room.place} has {room.free_mb:.0f} MB free"
                raise BlockedError(Boundary.ENVIRONMENT, message, "free space, or set SEATRIAL_CACHE to a directory on another disk")
            path.mkdir(parents=True)
            builder = VenvBuilder(part, path / BUILD_LOG, stops, progress, line_filter)
            try:
                installed = make_venv(builder, path, lock, layer, resolve=path.parent.name == "layers")
            except StepFailed as error:
                fix = f"read {builder.log}, remove the cause (network, package index, disk), then: seatrial env build {name}"
                raise BlockedError(Boundary.ENVIRONMENT, f"building {part}: {error} (log: {builder.log})", fix) from error
            record = BuildRecord(
                name=part,
                lock_hash=lock.hash(),
                python_version=installed.python_version,
                built=_utc(datetime.now(UTC)),
                size_mb=_size_mb(path),
                layer=layer.name if layer else None,
                packages=installed.first_versions(),
            )
            files.write_json(path / MARKER, record)

        layer = None
        if (below := wanted.layer) is not None:
            layer = self._place("layers", below.name, below)
            if rebuild or not self._complete(layer, below):
                users = [path for path in self._directories("envs") if (record := _record(path)) and record.layer == layer.name]
                make(layer, below.name, below, None, users)
        path = self._place("envs", name, wanted)
        make(path, name, wanted, layer, [path])
        return Environment(name, wanted.hash(), path)

    def _place(self, kind: Kind, name: str, lock: Lock) -> Path:
        return self.root / kind / f"{name}-{lock.hash()[:12]}"

    def _find(self, name: str, wanted: Lock) -> Environment | None:
        path = self._place("envs", name, wanted)
        layer = wanted.layer
        whole = self._complete(path, wanted) and (layer is None or self._complete(self._place("layers", layer.name, layer), layer))
        return Environment(name, wanted.hash(), path) if whole else None

    def _complete(self, path: Path, lock: Lock) -> bool:
        return (record := _record(path)) is not None and record.lock_hash == lock.hash()

    def _directories(self, kind: Kind, name: str | None = None) -> tuple[Path, ...]:
        matches = [(path, _DIRECTORY.fullmatch(path.name)) for path in sorted((self.root / kind).glob("*")) if path.is_dir()]
        return tuple(path for path, match in matches if match and name in (None, match[1]))

    def _listed(self, kind: Kind, path: Path) -> Listed:
        name, _, short = path.name.rpartition("-")
        record = _record(path)
        used = path / _USED
        when = _utc(datetime.fromtimestamp(used.stat().st_mtime, UTC)) if used.exists() else None
        if record is None:
            return Listed(name, kind, short, path, _size_mb(path), complete=False, used=when)
        whole = record.layer is None or _record(self.root / "layers" / record.layer) is not None
        return Listed(name, kind, short, path, record.size_mb, whole, record.python_version, record.built, when)


def _absent(name: str, path: Path, message: str, fix: str, builder: str | None) -> Finding:
    """An environment that cannot be used; where a build is under way, it may be that of this one."""
    if builder is None:
        return Finding(name=name, ok=False, message=message, fix=fix, path=str(path))
    message = f"{path} is not complete, and this is at work now: {builder}"
    wait = fix.removesuffix(" --rebuild") + " (it waits until that has ended)"
    return Finding(name=name, ok=False, message=message, fix=wait, code=FindingCode.ENVIRONMENT_BUILDING, path=str(path))


def _record(path: Path) -> BuildRecord | None:
    """What complete.json says; None when the directory is broken (no or unreadable marker, no interpreter)."""
    if not (path / MARKER).is_file() or not interpreter(path).exists():
        return None
    try:
        return files.read_model(path / MARKER, BuildRecord)
    except UserError:
        return None


def delete(path: Path) -> None:
    """Remove a directory, the marker first: what is half removed is broken, not complete."""
    files.delete(path / MARKER)
    files.delete(path)


def start_afresh(place: Path) -> None:
    """Where something is to be built: end what a killed build left, and remove what is there."""
    end_leftovers(pid_file(place / BUILD_LOG))
    delete(place)


def refuse_if_used(paths: Iterable[Path]) -> None:
    """A UserError when a process runs in one of these environments."""
    places = tuple(f"{path}{os.sep}" for path in paths)
    for process in psutil.process_iter(["cmdline"]):
        argv = process.info["cmdline"] or [""]
        if places and argv[0].startswith(places):
            raise UserError(f"process {process.pid} runs in {argv[0]}", f"wait for it, or stop it: kill {process.pid}")


def _utc(moment: datetime) -> str:
    return moment.isoformat(timespec="seconds").replace("+00:00", "Z")


def _size_mb(path: Path) -> int:
    return sum(found.lstat().st_blocks * 512 for found in files_below(path)) // _MB


SYSTEM = tuple(map(Path, ("/", "/usr", "/usr/local", "/etc", "/dev", "/proc", "/sys")))
"""The container has its own; so a Python of an operating system is that of the container, too."""


def mounts_of(path: Path, wanted: Iterable[Path]) -> tuple[str, ...]:
    """Mounts of `path`, which is made before the job is submitted, of Seatrial itself, and of what else is wanted and is here."""
    own = (Environments().root, Path(seatrial.__file__).parents[1], Path(sys.prefix), Path(sys.base_prefix))
    found = (real_path(place) if ".." in place.parts else place for place in (*own, *wanted) if place.is_absolute())
    places = list(dict.fromkeys((path, *(place for place in found if place not in SYSTEM and exists(place)))))
    for place in places:
        if any(sign in str(place) for sign in ",: \t\n"):
            raise UserError(f"{place}: cannot be mounted into a container", "use a path without commas, colons and spaces")
    return tuple(f"{place}:{place}" for place in places)
