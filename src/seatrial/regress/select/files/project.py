"""The files of a project, as selection sees them.

- Paths are relative to the root, with slashes; what is skipped (environments, caches, git's own files) is no part of the project.
- `Project.walk` looks once; a session asks it for names, never the disk again, so one session has one answer.
- Import roots follow from the layout and from the path before collection: running a part of the tests gives the same roots.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple, Self

SKIPPED = frozenset({".git", ".hg", "site-packages", "node_modules", "__pycache__", ".tox", ".nox"})
OURS = (".seatrial-select",)
NOISE = frozenset(
    {
        ".pytest_cache",
        ".mypy_cache",
        ".ruff_cache",
        ".hypothesis",
        ".testmondata",
        ".coverage",
        ".benchmarks",
        "unit_results",
        "unit_results.json",
    }
)

Stamp = tuple[int, int, int]


class Project(NamedTuple):
    """What stood under the root when the session began."""

    root: Path
    stamps: dict[str, Stamp]
    names: dict[str, tuple[str, ...]]
    environments: tuple[str, ...]
    roots: tuple[str, ...]
    roots_of: dict[str, tuple[str, ...]]
    began: int = 0
    below: str = ""
    """Where pytest's root lies, as a path in the project."""

    @classmethod
    def walk(cls, root: Path, path: Sequence[str] = (), below: str = "") -> Self:
        """Look at everything under `root`; `path` is the import path before collection, `below` pytest's own root."""
        began = time.time_ns()
        stamps: dict[str, Stamp] = {}
        names: dict[str, tuple[str, ...]] = {}
        environments = []
        pending = [""]
        while pending:
            here = pending.pop()
            entries = _entries(root / here)
            names[here] = tuple(entry.name for entry in entries)
            for entry in entries:
                name = f"{here}/{entry.name}" if here else entry.name
                if entry.is_dir(follow_symlinks=False):
                    if Path(entry.path, "pyvenv.cfg").exists():
                        environments.append(f"{name}/")
                    elif not skipped(entry.name):
                        pending.append(name)
                elif not noise(entry.name):
                    found = stamp(Path(entry.path))
                    if found is not None:
                        stamps[name] = found
        starts = [*path, str(root / below), str(root / below / "src")]
        roots = tuple(sorted(_roots(root, stamps, starts)))
        return cls(root, stamps, names, tuple(environments), roots, _tops(stamps, roots), began, below)

    def python(self) -> list[str]:
        """Every Python file of the project."""
        return [name for name in self.stamps if name.endswith(".py")]

    def matching(self, patterns: Iterable[str]) -> list[str]:
        """Files that one of the globs names."""
        return sorted(name for name in self.stamps if any(fnmatch(name, pattern) for pattern in patterns))

    def kind(self, path: str) -> str:
        """What stood at `path`, in the words of `digests`."""
        return "directory" if path in self.names else "file" if path in self.stamps else "absent"

    def foreign(self, path: str) -> bool:
        """Whether a path of an event belongs to tools or to an environment rather than to the project."""
        return path.startswith(self.environments) or any(skipped(part) or noise(part) for part in path.split("/"))

    def relative(self, path: str | os.PathLike[str]) -> str | None:
        """The name of `path` in the project, or None for what lies outside."""
        real = os.path.realpath(self.root / path)
        inside = os.path.relpath(real, os.path.realpath(self.root))
        return None if inside == ".." or inside.startswith("../") else ("" if inside == "." else inside)


def stamp(path: Path) -> Stamp | None:
    """What tells that a file was written since; never used to say that two contents are equal."""
    try:
        found = path.stat()
    except (OSError, ValueError):
        return None
    return found.st_mtime_ns, found.st_ctime_ns, found.st_size


def skipped(name: str) -> bool:
    return name in SKIPPED or name in NOISE or name.startswith(OURS)


def noise(name: str) -> bool:
    """Files that test tools keep for themselves: their change says nothing."""
    return name in NOISE or name.startswith((*OURS, ".coverage.", ".testmondata")) or name.endswith((".pyc", ".pyo"))


def heard(name: str) -> bool:
    """Whether a name in a directory counts."""
    return not skipped(name) and not noise(name)


def _entries(directory: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(directory) as found:
            return list(found)
    except OSError:
        return []


def _roots(root: Path, stamps: dict[str, Stamp], path: Sequence[str]) -> set[str]:
    """Directories from which a module may be imported by its full name."""
    inits = {name.rpartition("/")[0] for name in stamps if name.rpartition("/")[2] == "__init__.py"}
    roots = {"", "src"} | {name.rpartition("/")[0] for name in inits if name}
    for name in stamps:
        directory, _, last = name.rpartition("/")
        if last == "conftest.py" or (last.startswith("test_") and last.endswith(".py")) or last.endswith("_test.py"):
            roots.add(directory)
    real = os.path.realpath(root)
    for entry in path:
        inside = os.path.relpath(os.path.realpath(entry or "."), real)
        if not inside.startswith(".."):
            roots.add("" if inside == "." else inside)
    return {name for name in roots if name not in inits}


def _tops(stamps: dict[str, Stamp], roots: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """First names that can be imported, each with the roots that have it: most imports are of other people's packages."""
    tops: dict[str, set[str]] = {}
    known = frozenset(roots)
    for name in stamps:
        if not name.endswith(".py"):
            continue
        parts = name[:-3].split("/")
        for depth in range(len(parts)):
            above = "/".join(parts[:depth])
            if above in known:
                tops.setdefault(parts[depth], set()).add(above)
    return {name: tuple(sorted(found)) for name, found in tops.items()}
