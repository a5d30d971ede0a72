"""Where the winning record of each unit lies: twelve bytes per unit.

Filled by one scan of the whole journal, which meets the records of a unit in the order of winners.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from seatrial.rollouts.journal.attempt import AttemptFile

_OFFSET_BITS = 42
_OFFSET = (1 << _OFFSET_BITS) - 1
"""4 TiB per file, and four million files."""


class Index:
    """A `journal.scan.Winners`."""

    def __init__(self, total: int) -> None:
        self.where = array("Q", bytes(8 * total))
        """The number of the file, then the offset: sorts in the order in which files are best read."""
        self.length = array("I", bytes(4 * total))
        """Zero where there is no winner."""
        self.files: list[Path] = []
        self._last: AttemptFile | None = None

    def put(self, unit: int, head: Mapping[str, Any], file: AttemptFile, offset: int, length: int) -> None:
        """Note the best record of a unit so far."""
        del head
        if file is not self._last:
            self._last = file
            self.files.append(file.path)
        self.where[unit] = (len(self.files) - 1) << _OFFSET_BITS | offset
        self.length[unit] = length

    def place_of(self, unit: int) -> tuple[int, int]:
        """The number of the file, and the offset in it."""
        where = self.where[unit]
        return where >> _OFFSET_BITS, where & _OFFSET
