"""Proof that a directory was not written to."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from seatrial.bisect.bisect_records import Repo

Seen = dict[str, tuple[int, int, bytes]]


def look(*places: Path) -> Seen:
    """Mode, time of change and contents of everything below these places, git directories included."""
    found: Seen = {}
    for place in places:
        for parent, directories, names in os.walk(place):
            for path in (Path(parent, name) for name in (*directories, *names)):
                state = path.lstat()
                data = bytes(path.readlink()) if path.is_symlink() else b"" if path.is_dir() else path.read_bytes()
                found[str(path)] = (state.st_mode, state.st_mtime_ns, data)
    return found


@contextmanager
def untouched(*places: Path) -> Iterator[None]:
    """Nothing below these places changes while the block runs."""
    before = look(*places)
    yield
    assert look(*places) == before


def repo_of(path: Path, ids: list[str], place: str = ".", name: str = "") -> Repo:
    """A repository of a plan, from its first commit to its last."""
    return Repo(name=name or path.name, path=str(path), good=ids[0], bad=ids[-1], place=place)


def quiet(_: str) -> None:
    """Progress that nobody sees."""
