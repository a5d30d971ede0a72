"""Which Python a loop runs in: a user's own, or the environment that Seatrial built from the loop's lock."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from seatrial.evidence.redact import Redactor
from seatrial.launch.environments import Environments
from seatrial.loops import engines
from seatrial.model.errors import BlockedError
from seatrial.model.loop import Loop
from seatrial.model.record import Finding
from seatrial.model.verdict import Boundary


@dataclass(frozen=True, slots=True)
class Interpreter:
    """An interpreter, the lock it was built from, and what was found about it."""

    python: Path
    lock: str | None
    findings: tuple[Finding, ...]


def engine_interpreters() -> dict[str, Path]:
    """The interpreters of generation engines whose opt-in environment is built, by the environment's name."""
    cache = Environments()
    return {name: found.python for name, lock in engines.environments().items() if (found := cache.find(name, lock))}


def find_interpreter(loop: Loop, own: Path | None, progress: Callable[[str], None], build: bool = True) -> Interpreter:
    """The interpreter for a trial; an environment of ours is built first if it is absent and `build` is set."""
    if own is not None:
        if not own.is_file():
            raise BlockedError(
                Boundary.ENVIRONMENT, f"{own}: no such interpreter", "name the Python of the loop's environment with --python"
            )
        return Interpreter(
            own.absolute(), None, (Finding(name="environment", ok=True, message=f"{own}: the user's own, not built by Seatrial"),)
        )
    if loop.environment is None:
        ambient = loop.interpreter()
        message = f"{ambient}: of this machine or container, not built by Seatrial"
        return Interpreter(ambient, None, (Finding(name="environment", ok=True, message=message),))
    cache, name, lock = Environments(), loop.environment, loop.environments()[loop.environment]
    digest = cache.lock_hash(lock)
    found = cache.find(name, lock)
    if found is None and not build:
        raise BlockedError(Boundary.ENVIRONMENT, f"the environment {name} is not built", f"seatrial env build {name}")
    if found is None:
        progress(f"building the environment {name}, once: this takes minutes")
        found = cache.build(name, lock, progress, line_filter=Redactor(os.environ).lines().line)
    note = Finding(name="environment", ok=True, message=f"{found.path}: built from lock {digest[:12]}")
    return Interpreter(found.python, digest, (note,))
