"""What a trial needs inside a container, each at the place where it is outside.

Only what is there is mounted: pyxis refuses a source that is missing, and what lies in the image is not on this machine.
The run directory is the exception: it is made before the job is submitted.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import seatrial
from seatrial.files import read_text
from seatrial.launch.environments import Environments
from seatrial.model.errors import UserError
from seatrial.model.record import Plan

CACHES = ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_DATASETS_CACHE", "UV_CACHE_DIR", "UV_PROJECT_ENVIRONMENT")
"""Variables that name a directory which the loop reads; they reach the job with the caller's environment."""
SYSTEM = tuple(map(Path, ("/", "/usr", "/usr/local", "/etc", "/dev", "/proc", "/sys")))
"""The container has its own; so a Python of an operating system is that of the container, too."""


def mounts(plan: Plan, path: Path, python: str, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Mounts of the job of a trial; `environ` is what the job will see."""
    found = (place.resolve() if ".." in place.parts else place for place in _wanted(plan, python, environ) if place.is_absolute())
    places = list(dict.fromkeys((path, *(place for place in found if place not in SYSTEM and _is_here(place)))))
    for place in places:
        if any(sign in str(place) for sign in ",: \t\n"):
            raise UserError(f"{place}: cannot be mounted into a container", "use a path without commas, colons and spaces")
    return tuple(f"{place}:{place}" for place in places)


def _wanted(plan: Plan, python: str, environ: Mapping[str, str]) -> Iterator[Path]:
    yield from (Environments().root, Path(seatrial.__file__).parents[1])
    yield from (Path(sys.prefix), Path(sys.base_prefix))
    for repo in plan.changes:
        yield Path(repo.path)
        yield from outside_git(Path(repo.path))
    yield from (Path(text) for text in (plan.model, *plan.options.values()))
    yield from (Path(word.rpartition("=")[2]) for word in plan.arguments)
    if "/" in python:
        yield Path(python).parents[1]
    yield from (Path(environ[name]) for name in CACHES if environ.get(name))


def _is_here(place: Path) -> bool:
    try:
        return place.exists()
    except OSError:  # not ours to look at, or no path at all
        return False


def outside_git(checkout: Path) -> Iterator[Path]:
    """Where git keeps a worktree's or a submodule's own data: the checkout alone could not be asked for its state."""
    link = checkout / ".git"
    if not link.is_file():
        return
    directory = (checkout / read_text(link).partition("gitdir:")[2].strip()).resolve()
    common = directory / "commondir"
    shared = (directory / read_text(common).strip()).resolve() if common.is_file() else directory
    yield from (place for place in dict.fromkeys((shared, directory)) if not place.is_relative_to(checkout))
