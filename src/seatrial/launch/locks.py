"""Lock files: the exact packages of an environment, written as pip requirements.

- Header comments `# key: value` stand before the first pin; the keys are `python`, `layer`, `disk-mb`, `requires-python`,
  and no others. `requires-python: ignored` takes packages that say they are not for this Python, but were tried with it.
- Then one `name==version` per line; comments are allowed. Anything else is a UserError with file and line.
- A layer is a lock too (`layers/<name>.lock`): packages that several environments share. A package is pinned once,
  in the environment or in its layer.
- The hash covers what is installed (pins, layer, Python version, machine), not comments or order.
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from seatrial import files
from seatrial.model.errors import UserError
from seatrial.model.guarded import parse_step

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
