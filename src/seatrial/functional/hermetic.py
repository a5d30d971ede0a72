"""Runs a command here, in a container or in a fresh environment, and ends what a killed Seatrial left running."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Self

from seatrial.core.errors import BlockedError, UserError
from seatrial.evidence.redact import Redactor
from seatrial.runtime.process import Outcome, ProcessSpec, end_leftovers, run


class ExecutionPlace:
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


GRACE_S = 10.0


def run_in(place: ExecutionPlace, argv: tuple[str, ...], cwd: Path, log: Path, minutes: float, line: Callable[[str], None]) -> Outcome:
    """Run the command in a place that was entered; nothing of it is left when this returns. A BlockedError when it cannot be started."""
    clear = Redactor(os.environ).lines().line

    def passed_on(text: str) -> str:
        shown = clear(text)
        line(shown)
        return shown

    words, env = place.command(argv, cwd)
    place.refuse(words, env)
    spec = ProcessSpec(
        argv=words,
        env=env,
        cwd=cwd,
        log=log,
        run_id=f"hermetic-{time.time_ns()}",
        deadline_s=60 * minutes,
        stall_s=60 * minutes,
        grace_s=GRACE_S,
        line_filter=passed_on,
    )
    try:
        return run(spec)
    finally:
        place.end()


def end_earlier(pid_files: Iterable[Path], tell: Callable[[str], None]) -> None:
    """End what the runs of these files left, and say so."""
    for file in sorted(pid_files):
        try:
            if file.is_symlink() or file.stat().st_uid != os.getuid():
                continue
            count = end_leftovers(file)
        except (OSError, UserError):
            continue  # gone meanwhile, no such file of ours, or its Seatrial is at work
        except BlockedError as error:
            tell(error.message)
            continue
        if count:
            tell(f"{file.parent}: ended {count} process{'' if count == 1 else 'es'} that a killed Seatrial had left running")
