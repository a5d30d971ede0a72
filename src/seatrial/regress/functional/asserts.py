"""What is asserted of metrics, whether or not a loop knows the checkout that a script is in.

- The text of a script is read as its loop reads it (`runs/assertions.py`). Where the checker lies, or whether it is there at all, says
  nothing about what the script asserts: a checker that always exits with 0 would else be a false Pass.
- A floor that a loop has for a metric (`functional.py`) holds for every check of that metric, whoever makes it.
"""

from __future__ import annotations

import importlib
from pathlib import Path, PurePosixPath
from types import ModuleType

from seatrial.files import read_text
from seatrial.loops import HERE
from seatrial.loops.nightly import Asserted


def read_asserted(script: Path, cwd: Path) -> tuple[Asserted, ...]:
    """The metrics files that a script hands to a checker, with the expressions; a relative place is one below `cwd`."""
    checks: dict[str, list[str]] = {}
    for module in _modules("runs/assertions.py"):
        _read(script, module, checks)
    return tuple(
        Asserted(metrics=None if "$" in written or "`" in written else cwd / written, written=written, checks=tuple(dict.fromkeys(found)))
        for written, found in checks.items()
    )


def _read(script: Path, module: ModuleType, checks: dict[str, list[str]]) -> None:
    def seen(words: tuple[str, ...]) -> None:
        names = [PurePosixPath(word).name for word in words]
        found = list(module.expressions(words))
        if module.CHECKER in names[:-1] and words[-1].endswith("$"):
            found.append(f"{' '.join(words)}(…)")  # the reader stops at `$(`: what stands behind it must not be lost without a word
        if found:
            checks.setdefault(words[names.index(module.CHECKER) + 1], []).extend(found)

    module.Reader(seen).read(read_text(script))


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
