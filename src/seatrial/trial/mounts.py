"""What a trial needs inside a container, each at the place where it is outside (see `launch/mounts.py`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from seatrial.files import read_text
from seatrial.launch.mounts import mounts_of
from seatrial.model.guarded import real_path
from seatrial.model.record import Plan

CACHES = ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_DATASETS_CACHE", "UV_CACHE_DIR", "UV_PROJECT_ENVIRONMENT")
"""Variables that name a directory which the loop reads; they reach the job with the caller's environment."""


def mounts(plan: Plan, path: Path, python: str, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Mounts of the job of a trial; `environ` is what the job will see."""
    return mounts_of(path, _wanted(plan, python, environ))


def _wanted(plan: Plan, python: str, environ: Mapping[str, str]) -> Iterator[Path]:
    for repo in plan.changes:
        yield Path(repo.path)
        yield from outside_git(Path(repo.path))
    yield from (Path(text) for text in (plan.model, *plan.options.values()))
    yield from (Path(word.rpartition("=")[2]) for word in plan.arguments)
    if "/" in python:
        yield Path(python).parents[1]
    yield from (Path(environ[name]) for name in CACHES if environ.get(name))


def outside_git(checkout: Path) -> Iterator[Path]:
    """Where git keeps a worktree's or a submodule's own data: the checkout alone could not be asked for its state."""
    link = checkout / ".git"
    if not link.is_file():
        return
    directory = real_path(checkout / read_text(link).partition("gitdir:")[2].strip())
    common = directory / "commondir"
    shared = real_path(directory / read_text(common).strip()) if common.is_file() else directory
    yield from (place for place in dict.fromkeys((shared, directory)) if not place.is_relative_to(checkout))
