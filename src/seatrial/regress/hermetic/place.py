"""Where a command runs: here as it is, in a container, or in a fresh environment.

- A place is entered before it is used and left afterwards; leaving it removes what it made.
- `command` gives the words and variables with which a command runs there; `end` makes sure that nothing of the last command is left.
- `shown` is what a person may read beforehand.
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from types import TracebackType
from typing import Self


class Place:
    """The caller's own environment; other places differ from it."""

    notes: tuple[str, ...] = ()
    """What a report must say of it."""

    def __enter__(self) -> Self:
        self.prepare()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.remove()

    def command(self, argv: tuple[str, ...], cwd: Path) -> tuple[tuple[str, ...], dict[str, str]]:
        """The words and the whole environment with which `argv` runs there."""
        return argv, {**os.environ, "PWD": str(cwd)}

    def shown(self, argv: tuple[str, ...], cwd: Path) -> list[str]:
        """The lines that would run, secrets by name only."""
        return [f"cd {shlex.quote(str(cwd))}", shlex.join(argv)]

    def prepare(self) -> None:
        """Make what is needed; a BlockedError when that cannot be done."""

    def refuse(self, argv: tuple[str, ...], env: dict[str, str]) -> None:
        """A BlockedError when the command that `command` gave cannot be found there; by default that is seen when it starts."""

    def end(self) -> None:
        """Make sure that nothing of the last command is left."""

    def remove(self) -> None:
        """Remove what was made."""
