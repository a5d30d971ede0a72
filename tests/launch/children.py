"""Tiny children for the process tests."""

from __future__ import annotations

import os
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import psutil

from seatrial.launch.linelog import STAMP_LENGTH
from seatrial.launch.process import ProcessSpec

DAEMON = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        {before}
        open("daemon", "w").write(str(os.getpid()))
        time.sleep(60)
    os._exit(0)
os.wait()
while not os.path.exists("daemon") or not open("daemon").read():
    time.sleep(0.01)
{after}
"""
"""A child whose grandchild leaves the session by a double fork, keeps the output open and writes its pid to `daemon`."""


def spec(tmp_path: Path, *argv: str, **changes: Any) -> ProcessSpec:
    """A run in `tmp_path`; `argv` is one Python program, or a command."""
    values: dict[str, Any] = {
        "argv": argv if len(argv) > 1 else (sys.executable, "-S", "-E", "-c", *argv),
        "env": dict(os.environ),
        "cwd": tmp_path,
        "log": tmp_path / "run.log",
        "run_id": f"test-{uuid.uuid4().hex}",
        "deadline_s": 30.0,
        "stall_s": 30.0,
        "grace_s": 2.0,
    }
    return ProcessSpec(**{**values, **changes})


def lines(tmp_path: Path) -> list[str]:
    """The log without its stamps."""
    return [line[STAMP_LENGTH:] for line in (tmp_path / "run.log").read_bytes().decode().split("\n")[:-1]]


def gone(pid: int) -> bool:
    """Whether the process ended (and, if it was a child, was collected)."""
    return not psutil.pid_exists(pid)


def wait_for(path: Path) -> str:
    """The content of a file that a child is about to write."""
    stops = time.monotonic() + 20
    while time.monotonic() < stops:
        if path.exists() and path.read_text():
            return path.read_text()
        time.sleep(0.01)
    raise AssertionError(f"{path} was not written")
