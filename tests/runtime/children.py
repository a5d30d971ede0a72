"""Tiny children for the process tests."""

from __future__ import annotations

import os
import sys
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from seatrial.runtime.interrupt import stop_requested
from seatrial.runtime.process import STAMP_LENGTH, ProcessSpec

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


def ended(pid: int) -> bool:
    """Whether the process ended, though nobody may have collected it yet."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_until(true: Callable[[], object], what: str) -> None:
    """Wait for something that comes soon; a busy machine is given a minute."""
    stops = time.monotonic() + 60
    while not true():
        assert time.monotonic() < stops, f"still not: {what}"
        time.sleep(0.01)


def wait_for(path: Path) -> str:
    """The content of a file that a child is about to write."""
    wait_until(lambda: path.exists() and path.read_text(), f"{path} is written")
    return path.read_text()


def send(path: Path, *numbers: int) -> None:
    """Send signals to this process once a file is written; the second when the first was taken."""

    def work() -> None:
        wait_for(path)
        for number in numbers:
            os.kill(os.getpid(), number)
            wait_until(stop_requested, "the signal is taken")

    threading.Thread(target=work, daemon=True).start()
