"""What tests of the sandbox share: one that is small, whether there can be one here, and whether anything is left of it."""

from __future__ import annotations

import asyncio
import functools
import os
import time
from collections.abc import Mapping

import psutil
import pytest

from seatrial.rollouts.campaign import SandboxLimits
from seatrial.rollouts.sandbox import bubblewrap
from seatrial.rollouts.sandbox.sandbox import Ran, Sandbox, why_not

LIMITS = SandboxLimits(memory_mb=200, cpu_s=1, wall_s=1.2, processes=12, output_kb=64, disk_mb=8, at_once=2)

STAYS_S = 45
"""Programs of the tests that would outlive their sandbox do so for longer."""

refusal = functools.cache(why_not)


@functools.cache
def needs_sandbox() -> pytest.MarkDecorator:
    return pytest.mark.skipif(refusal() is not None, reason=f"no sandbox here: {refusal()}")


def ran(program: str, stdin: str = "", limits: SandboxLimits = LIMITS, files: Mapping[str, str] | None = None) -> Ran:
    """Run a Python program in the small sandbox; nothing may be left of it."""
    result = asyncio.run(Sandbox(limits).run(program, stdin=stdin, files=files))
    assert left_over() == []
    return result


def left_over() -> list[str]:
    """Processes that stay, under one of our sandboxes' user ids or as bubblewrap below us: those of tests beside this one come and go."""
    stops = time.monotonic() + STAYS_S
    while (found := _seen()) and time.monotonic() < stops:
        time.sleep(0.05)
    return found


def _seen() -> list[str]:
    """Those that are there now."""
    ids = {bubblewrap.uid_of(slot) for slot in range(bubblewrap.SLOTS)}
    found = []
    for process in psutil.process_iter(["pid", "uids", "name", "ppid"]):
        uids, ours = process.info["uids"], process.info["ppid"] == os.getpid() and process.info["name"] == "bwrap"
        if ours or (uids is not None and uids.real in ids):
            found.append(f"{process.info['pid']} {process.info['name']}")
    return found
