"""The marker of a complete environment, and whether the environment is still what was built."""

from __future__ import annotations

from pathlib import Path

from seatrial import files
from seatrial.launch.environments import MARKER
from seatrial.launch.venvs import interpreter
from seatrial.model.errors import UserError
from seatrial.model.record import Record
from seatrial.regress.bisect.environments.overlays import packages_of


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
