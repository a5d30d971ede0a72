"""A short command: run to its end within a time limit, its output wanted.

A long child with a log, a stall watch and a deadline is `runtime/process.py`'s. What is really different starts its process itself:

- `rollouts/sandbox/sandbox.py` (asyncio streams) and `rollouts/backends/gym_guard.py` (outlives the process that starts it)
- `instruments/`, `runtime/staged/` and `packages/`, which run where there is no Seatrial
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO


class NoAnswerError(Exception):
    """A command could not be started, or did not end in time; one line says why."""

    def __init__(self, message: str, *, late: bool = False, cause: Exception | None = None) -> None:
        super().__init__(message)
        self.late = late or isinstance(cause, subprocess.TimeoutExpired)
        """It was still at work when its time was up."""
        self.missing = isinstance(cause, FileNotFoundError)
        """There is no such program, or no such directory."""
        self.why = (isinstance(cause, OSError) and cause.strerror) or message
        """The cause without the name of the program."""


@dataclass(frozen=True, slots=True)
class Answer:
    """How a command ended, and what it wrote."""

    code: int
    """Negative for a signal."""
    data: bytes
    """Standard output."""
    complaint: bytes = b""
    """Standard error."""

    @property
    def out(self) -> str:
        """Standard output as text."""
        return self.data.decode("utf-8", "replace")

    @property
    def error(self) -> str:
        """Standard error as text."""
        return self.complaint.decode("utf-8", "replace")

    @property
    def last_words(self) -> str:
        """The last line of standard error, where most programs name the cause."""
        return (self.error.strip().splitlines() or ["(nothing said)"])[-1]


def run_command(
    argv: Sequence[str | Path],
    seconds: float,
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    stdin: bytes = b"",
    into: IO[bytes] | None = None,
    own_session: bool = False,
) -> Answer:
    """Run a command to its end; NoAnswerError when it cannot be started or does not end in time, which ends it.

    - Standard output goes `into` a file where one is given.
    - `own_session`: Ctrl-C does not reach it, and what it started is ended with it. Not beside a run of `process.run`, which takes
      processes of other sessions for its own.
    """
    given = subprocess.PIPE if stdin else subprocess.DEVNULL
    try:
        child = subprocess.Popen(
            argv, cwd=cwd, env=env, stdin=given, stdout=into or subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=own_session
        )
    except (OSError, ValueError) as error:  # a word with a null character, or longer than the system takes
        raise NoAnswerError(str(error), cause=error) from error
    with child:
        try:
            out, complaint = child.communicate(stdin or None, timeout=seconds)
        except subprocess.TimeoutExpired as error:
            raise NoAnswerError(str(error), cause=error) from error
        finally:
            if child.returncode is None:
                if own_session:
                    os.killpg(child.pid, signal.SIGKILL)
                child.kill()
                child.wait()
    return Answer(child.returncode, out or b"", complaint)
