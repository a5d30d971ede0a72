"""Which files are the project's: below the root, outside of environments and caches.

- `relative(path)`: the path below the root with links resolved, or None. Directories are resolved once and remembered.
- A link below the root to a file outside counts under its own name.
- `beside(path)`: the absolute path of a source that is neither the project's nor Python's nor an installed distribution's nor ours.
"""

# Paths are text here: pathlib may not be loaded yet, and what it does is watched.
# ruff: noqa: PTH100, PTH116, PTH118, PTH120

from __future__ import annotations

import fnmatch
import os
import stat
from collections.abc import Sequence

SKIPPED = frozenset({".git", "site-packages", "node_modules", "__pycache__", ".tox", ".nox", ".pytest_cache", ".seatrial-select"})
STATE = ".seatrial-select"
ENVIRONMENT = "pyvenv.cfg"
INSTALLED = ("/site-packages/", "/dist-packages/")
LIBRARY = os.path.realpath(os.path.dirname(os.__file__)) + "/"
OURS = os.path.realpath(__file__).removesuffix("regress/select/trace/paths.py")


class Tree:
    """The project's files."""

    def __init__(self, root: str, skip: Sequence[str] = (), apart: Sequence[str] = ()) -> None:
        """`skip`: globs of files that are not instrumented; `apart`: directories of our own that are no part of it."""
        self.root = os.path.realpath(root)
        self.skip = tuple(skip)
        self._apart = tuple(os.path.realpath(path) for path in apart)
        self._prefix = self.root.rstrip("/") + "/"
        self._directories: dict[str, str | None] = {}
        self.sources: dict[str, str | None] = {}
        """What `source` has found already."""

    def relative(self, path: str) -> str | None:
        """Below the root, or None for what is not the project's."""
        return next(iter(self.names(path)), None)

    def names(self, path: str) -> list[str]:
        """All names below the root that this path stands for: its own, and that of the file which it links to."""
        if not _possible(path):
            return []
        directory, name = os.path.split(os.path.abspath(path))
        found = []
        above = self._directory(directory)
        if above is not None and not name.startswith(STATE) and name not in SKIPPED:
            found.append(f"{above}/{name}" if above else name)
        if name and _is_link(path):
            target = os.path.realpath(path)
            directory, name = os.path.split(target)
            above = self._directory(directory)
            if above is not None and not name.startswith(STATE):
                found.append(f"{above}/{name}" if above else name)
        own = os.path.abspath(path)
        below = own.removeprefix(self._prefix)
        if found and below != own and below not in found:
            found.append(below)  # a directory on the way is a link, and may be another one tomorrow
        if not found and own == self.root:
            found.append("")
        return found

    def beside(self, filename: str) -> str | None:
        """Of a source that is not the project's: where it is, if its changes must be noticed."""
        if filename.startswith(("<", LIBRARY, OURS)) or any(part in filename for part in INSTALLED) or not _possible(filename):
            return None
        real = os.path.realpath(filename)
        if real.startswith((self._prefix, LIBRARY, OURS)) or any(part in real for part in INSTALLED) or self.left_alone(real):
            return None
        return real

    def directory(self, path: str) -> str | None:
        """The same of a directory; the root itself is ""."""
        return self._directory(os.path.abspath(path))

    def source(self, filename: str) -> str | None:
        """The project's file that a code object names; remembered."""
        if filename not in self.sources:
            self.sources[filename] = None if filename.startswith("<") else self.relative(filename)
        return self.sources[filename]

    def left_alone(self, relative: str) -> bool:
        """Whether a glob says that this file is not to be instrumented."""
        return any(fnmatch.fnmatch(relative, glob) for glob in self.skip)

    def _directory(self, path: str) -> str | None:
        if path in self._directories:
            return self._directories[path]
        found = self._resolve(path)
        if _is_there(path):  # one that is made later may be a link
            self._directories[path] = found
        return found

    def _resolve(self, path: str) -> str | None:
        real = os.path.realpath(path)
        if real == self.root:
            return ""
        if not real.startswith(self._prefix) or any(real == own or real.startswith(own + "/") for own in self._apart):
            return None
        below = real[len(self._prefix) :]
        parts = below.split("/")
        if not SKIPPED.isdisjoint(parts) or any(part.startswith(STATE) for part in parts):
            return None
        for count in range(1, len(parts) + 1):
            if _is_file(os.path.join(self.root, *parts[:count], ENVIRONMENT)):
                return None
        return below


def _possible(path: str) -> bool:
    """Whether any file can be called so."""
    try:
        return b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:
        return False


def _is_link(path: str) -> bool:
    try:
        return stat.S_ISLNK(os.lstat(path).st_mode)
    except (OSError, ValueError):
        return False


def _is_there(path: str) -> bool:
    try:
        os.stat(path)
    except (OSError, ValueError):
        return False
    return True


def _is_file(path: str) -> bool:
    # os.path.isfile is watched, and this is called by the watcher
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except (OSError, ValueError):
        return False
