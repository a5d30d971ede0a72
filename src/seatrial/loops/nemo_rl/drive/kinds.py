"""What a process of NeMo-RL is, by the command line of its interpreter."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import PurePath


def command_line() -> list[str]:
    """That of this process, also where a tool replaced sys.argv."""
    return list(getattr(sys, "orig_argv", [])) or [sys.executable, *sys.argv]  # Python 3.9 has no orig_argv


def program(command: Sequence[str]) -> str | None:
    """The script that runs, also one that coverage runs."""
    return next((word for word in command[1:] if word.endswith(".py") and not word.startswith("-")), None)


def process_kind(command: Sequence[str]) -> str:
    """`driver`: a program in examples/ or in a folder of it; `worker`: a Ray worker; else `child`.

    What prepares a Ray worker, dumps metrics or was spawned is neither: were it taken for one, the real one could be
    missing without anybody noticing.
    """
    place = PurePath(program(command) or "")
    if place.name == "default_worker.py":
        return "worker"
    return "driver" if "examples" in place.parts[-3:-1] else "child"
