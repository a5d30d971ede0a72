"""The environment with a real Ray that tests use; `python -m tests.runtime.rays` builds it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

import seatrial
from seatrial.runtime.environments import Environment, Environments

LOCK = Path(__file__).parents[1] / "data" / "ray" / "environment.lock"
COMMAND = "python -m tests.runtime.rays"
NEW_PIDS = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", '"$@"; exit $?', "sh")
"""`ray stop` ends every Ray that it sees, so a cluster of a test must see no other. The shell collects what Ray orphans."""


def environment() -> Environment:
    """The environment, or a skip that says what builds it."""
    found = Environments().find("ray", LOCK)
    if found is None:
        pytest.skip(f"no environment with Ray here: {COMMAND}")
    return found


def need_namespaces() -> None:
    """A skip where a process may not have a process table of its own."""
    if subprocess.run([*NEW_PIDS, "true"], capture_output=True, check=False, timeout=30).returncode:
        pytest.skip("Ray must be kept apart from other Rays, and unshare --pid is not allowed here: run as root")


def instruments(directory: Path) -> Path:
    """A copy of the probes as a loop's interpreter sees them; returns the directory for PYTHONPATH."""
    source = Path(seatrial.__file__).parent / "instruments"
    for file in sorted(source.glob("*.py")):
        place = directory / "seatrial" / "instruments" / file.name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(file.read_bytes())
    (directory / "seatrial" / "__init__.py").write_bytes(b"")
    return directory


def leftovers(mark: str) -> list[str]:
    """Command lines of processes that mention `mark`."""
    found = []
    for process in psutil.process_iter(["pid", "cmdline"]):
        line = " ".join(process.info["cmdline"] or ())
        if mark in line and process.pid != os.getpid():
            found.append(line[:200])
    return found


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")


def main() -> int:
    """Build the environment."""
    built = Environments().build("ray", LOCK, _say)
    sys.stdout.write(f"ray: ready: {built.python}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
