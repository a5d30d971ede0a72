"""What a client needs inside a container, each at the place where it is outside.

Only what is there is mounted: pyxis refuses a source that is missing, and what lies in the image is not on this machine.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

import seatrial
from seatrial.launch.environments import Environments
from seatrial.model.errors import UserError
from seatrial.model.guarded import real_path

SYSTEM = tuple(map(Path, ("/", "/usr", "/usr/local", "/etc", "/dev", "/proc", "/sys")))
"""The container has its own; so a Python of an operating system is that of the container, too."""


def mounts_of(path: Path, wanted: Iterable[Path]) -> tuple[str, ...]:
    """Mounts of `path`, which is made before the job is submitted, of Seatrial itself, and of what else is wanted and is here."""
    found = (real_path(place) if ".." in place.parts else place for place in (*_own(), *wanted) if place.is_absolute())
    places = list(dict.fromkeys((path, *(place for place in found if place not in SYSTEM and _is_here(place)))))
    for place in places:
        if any(sign in str(place) for sign in ",: \t\n"):
            raise UserError(f"{place}: cannot be mounted into a container", "use a path without commas, colons and spaces")
    return tuple(f"{place}:{place}" for place in places)


def _own() -> tuple[Path, ...]:
    """The environments, Seatrial's code, and the Python that it runs on."""
    return Environments().root, Path(seatrial.__file__).parents[1], Path(sys.prefix), Path(sys.base_prefix)


def _is_here(place: Path) -> bool:
    try:
        return place.exists()
    except OSError:  # not ours to look at, or no path at all
        return False
