"""A short child process of the preflight: it has a deadline, and nothing that it started outlives it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from seatrial.model.guarded import BadValue, parse_json


class NoAnswerError(Exception):
    """A driver did not answer; one line says why."""

    def __init__(self, message: str, *, late: bool = False) -> None:
        super().__init__(message)
        self.late = late
        """It was still at work when its time was up."""


def ask(start: Sequence[str], driver: Path, cwd: Path, environment: Mapping[str, str], seconds: float, request: Any) -> Any:
    """The JSON answer of a driver, run in the loop's own interpreter, to a JSON request; NoAnswerError when there is none."""
    quiet = {**environment, "PYTHONSAFEPATH": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = run_child([*start, str(driver)], cwd, quiet, seconds, json.dumps(request))
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoAnswerError(str(error), late=isinstance(error, subprocess.TimeoutExpired)) from error
    if done.returncode:
        raise NoAnswerError(f"{start[0]}: {(done.stderr.strip().splitlines() or ['(nothing said)'])[-1]}")
    try:
        return parse_json(done.stdout)
    except BadValue as error:
        raise NoAnswerError(f"{start[0]}: what it said is no answer: {done.stdout[:200]!r}") from error


def run_child(
    argv: Sequence[str], cwd: Path, environment: Mapping[str, str], seconds: float, text: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run to the end with `text` as its input; OSError and TimeoutExpired are the caller's to explain."""
    pipe = subprocess.PIPE
    child = subprocess.Popen(
        argv, cwd=cwd, env=environment, stdin=pipe, stdout=pipe, stderr=pipe, text=True, errors="replace", start_new_session=True
    )
    try:
        out, error = child.communicate(text, timeout=seconds)
        return subprocess.CompletedProcess(argv, child.returncode, out, error)
    finally:
        if child.returncode is None:  # past its deadline, or we are being stopped: a script has children of its own
            os.killpg(child.pid, signal.SIGKILL)
            child.communicate()
