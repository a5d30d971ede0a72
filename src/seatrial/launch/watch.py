"""Progress that shows in files: whether anything below the watched paths changed.

- A watched path may be absent at first, a file, or a directory (everything below it counts).
- Looking is rate-limited, because a directory of checkpoints may be large.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path


class Watch:
    """Remembers what the watched paths looked like."""

    def __init__(self, paths: tuple[Path, ...], every_s: float) -> None:
        self._paths = paths
        self._every_s = every_s
        self._looked = float("-inf")
        self._seen = self._look()

    def changed(self, now: float) -> bool:
        """Whether something changed since the last look; at most one look per `every_s` seconds of `now`."""
        if not self._paths or now - self._looked < self._every_s:
            return False
        self._looked = now
        before, self._seen = self._seen, self._look()
        return before != self._seen

    def _look(self) -> tuple[int, int, int]:
        """Number of files, sum of sizes, newest modification time."""
        count = size = newest = 0
        for path in self._paths:
            for found in _below(path):
                try:
                    state = found.stat()
                except OSError:
                    continue  # gone again, which the count shows
                count, size, newest = count + 1, size + state.st_size, max(newest, state.st_mtime_ns)
        return count, size, newest


def _below(path: Path) -> Iterator[Path]:
    yield path
    for directory, _, names in os.walk(path):
        for name in names:
            yield Path(directory) / name
