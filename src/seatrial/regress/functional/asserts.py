"""What is asserted of metrics, whether or not a loop knows the checkout that a script is in.

- The text of a script is read as its loop reads it (`runs/assertions.py`). Where the checker lies, or whether it is there at all, says
  nothing about what the script asserts: a checker that always exits with 0 would else be a false Pass.
- A call that cannot be read is told, and no Pass: nobody knows what it asserts.
- A floor that a loop has for a metric (`functional.py`) holds for every check of that metric, whoever makes it.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import ModuleType

from seatrial.files import read_text
from seatrial.loops import HERE
from seatrial.loops.nightly import Asserted


@dataclass(frozen=True, slots=True)
class Read:
    """What the text of a script asserts."""

    asserted: tuple[Asserted, ...]
    unread: tuple[str, ...]
    """What mentions a checker and could not be read."""


def read_asserted(script: Path, cwd: Path) -> Read:
    """The metrics files that a script hands to a checker, with the expressions; a relative place is one below `cwd`."""
    checks: dict[str, list[str]] = {}
    unread = [one for module in _modules("runs/assertions.py") for one in _read(script, module, checks)]
    asserted = tuple(
        Asserted(metrics=None if "$" in written or "`" in written else cwd / written, written=written, checks=tuple(dict.fromkeys(found)))
        for written, found in checks.items()
    )
    return Read(asserted, tuple(unread))


def _read(script: Path, module: ModuleType, checks: dict[str, list[str]]) -> list[str]:
    def seen(words: tuple[str, ...]) -> None:
        call = module.called(words)
        if call is not None and call.expressions:
            checks.setdefault(call.metrics, []).extend(call.expressions)

    unread: list[str] = module.read_calls(read_text(script), seen)
    return unread


def placed(own: tuple[Asserted, ...], place: Path) -> tuple[Asserted, ...]:
    """With the user's place for a file whose own cannot be told, or which is written relative to a directory that the script goes to.

    Only where one file fits: assertions about another one would be held against the wrong metrics.
    """
    fits = [one for one in own if one.metrics is None or _ends_with(place, one.written)]
    if len(fits) != 1:
        return own
    return tuple(Asserted(metrics=place, written=one.written, checks=one.checks, steps=one.steps) if one is fits[0] else one for one in own)


def _ends_with(place: Path, written: str) -> bool:
    parts = PurePosixPath(written).parts
    return place.parts[-len(parts) :] == parts


def with_floors(checks: tuple[str, ...]) -> tuple[str, ...]:
    """The checks, and the floors of the metrics that they are about."""
    floors = [
        module.FLOOR
        for module in _modules("functional.py")
        if any(module.COMPARED in expr.replace("'", '"') for expr in checks)  # both quotes are names of the same metric
    ]
    return tuple(dict.fromkeys((*checks, *floors)))


def _modules(name: str) -> list[ModuleType]:
    """The file of this name of every loop that has one."""
    dotted = name.removesuffix(".py").replace("/", ".")
    loops = sorted(place.relative_to(HERE).parts[0] for place in HERE.glob(f"*/{name}"))
    return [importlib.import_module(f"seatrial.loops.{loop}.{dotted}") for loop in loops]
