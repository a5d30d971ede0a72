"""A short child process of the preflight: it has a deadline, and nothing that it started outlives it."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path


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
