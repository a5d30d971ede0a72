"""What a dependency is now: a digest of a block, a file, a listing, or the fact that it is absent.

- Content decides, never a time. A time is used for one thing: a file that was written while the session ran has no digest that holds
  (`UNSETTLED`), because nobody knows which content a test saw.
- One object answers for one session and reads each file once.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from seatrial.regress.select.files.facts import Facts, facts, sha
from seatrial.regress.select.files.imports import resolve
from seatrial.regress.select.files.project import Project, heard, stamp

LEVEL = ""
WHOLE = "*"
LISTING = "/"
EXISTS = "?"
IMPORTS = "@imports"
ABSENT = "absent"
UNSETTLED = "unsettled"

# A path, a block in it, and its digest.
Version = tuple[str, str, str]


class Digests:
    """Digests of the project as it stands."""

    def __init__(self, project: Project, look: Callable[[bytes], Facts] = facts) -> None:
        self.project = project
        self._look = look
        self._content: dict[str, str | None] = {}
        self._facts: dict[str, Facts] = {}
        self._targets: dict[str, frozenset[str]] = {}
        self._now: dict[tuple[str, str], str] = {}
        self._same: dict[str, bool] = {}

    def now(self, path: str, block: str) -> str:
        """The digest of a block of `path` today."""
        key = (path, block)
        if key not in self._now:
            self._now[key] = self._find(path, block)
        return self._now[key]

    def version(self, path: str, block: str) -> Version:
        """A dependency as it is recorded now: with `UNSETTLED` for what changed since the session began."""
        if block == EXISTS:
            # Records speak of how a session began: what is made on the way by a test or a tool was not there.
            return path, block, self.now(path, block) if self._settled(path, block) else self.project.kind(path)
        return path, block, self.now(path, block) if self._settled(path, block) else UNSETTLED

    def _settled(self, path: str, block: str) -> bool:
        """Whether this is as it was when the session began; what was not looked at then is taken as it is."""
        if path not in self._same:
            names = self.project.names.get(path)
            if names is not None or _is_dir(self.project.root / path):
                self._same[path] = names is not None and _names(self.project.root / path) == frozenset(filter(heard, names))
            else:
                known = path if path in self.project.stamps else self.project.relative(path)  # a link on the way has another name
                self._same[path] = known is None or stamp(self.project.root / path) == self.project.stamps.get(known)
        if block == EXISTS and not self._same[path]:
            return self._kind(path) == self.project.kind(path)
        return self._same[path] or (block != LISTING and path in self.project.names)

    def facts(self, path: str) -> Facts | None:
        """Facts of a Python file, None when it is not there."""
        if path not in self._facts:
            data = self._read(path)
            if data is None:
                return None
            self._facts[path] = self._look(data)
        return self._facts[path]

    def targets(self, path: str) -> frozenset[str]:
        """Files that `path` imports, by its text."""
        if path not in self._targets:
            found = self.facts(path)
            self._targets[path] = resolve(path, found.imports, self.project) if found else frozenset()
        return self._targets[path]

    def _find(self, path: str, block: str) -> str:
        if block == LISTING:
            return self._listing(path)
        if block == WHOLE:
            return self._whole(path)
        if block == EXISTS:
            return self._kind(path)
        found = self.facts(path)
        if found is None:
            return ABSENT
        if block == IMPORTS:
            return sha("\n".join(sorted(self.targets(path))).encode())
        if WHOLE in found.blocks:
            return f"unreadable {found.blocks[WHOLE]}"
        return found.blocks.get(block, ABSENT)

    def _whole(self, path: str) -> str:
        if _is_dir(self.project.root / path):
            return "directory"
        if path not in self._content:
            data = self._read(path)
            self._content[path] = None if data is None else sha(data)
        return self._content[path] or ABSENT

    def _kind(self, path: str) -> str:
        place = self.project.root / path
        return "directory" if _is_dir(place) else "file" if os.path.exists(place) else ABSENT  # noqa: PTH110  # as _is_dir

    def _listing(self, path: str) -> str:
        names = _names(self.project.root / path)
        return ABSENT if names is None else sha("\n".join(sorted(names)).encode("utf-8", "surrogateescape"))

    def _read(self, path: str) -> bytes | None:
        try:
            return (self.project.root / path).read_bytes()
        except (OSError, ValueError):
            return None


def _is_dir(path: Path) -> bool:
    # Unlike those of Path this never raises: a test may ask for names that no file can have.
    return os.path.isdir(path)  # noqa: PTH112


def _names(directory: Path) -> frozenset[str] | None:
    """Names in a directory, without those that tools keep for themselves."""
    try:
        return frozenset(filter(heard, (path.name for path in directory.iterdir())))
    except (OSError, ValueError):
        return None
