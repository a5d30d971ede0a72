"""The loops that Seatrial drives, and the environments of generation engines.

A folder here with a `loop.py` that defines `LOOP` adds a loop; so does an entry point `seatrial.loops` of another distribution
(docs/extending.md). Built-in names win.
"""

from __future__ import annotations

import difflib
import functools
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from seatrial.core.loop import Loop
    from seatrial.core.records import Plan
    from seatrial.core.registry import Extension

VLLM_CPU = "vllm-cpu"
"""vLLM on a CPU: a real server for the refit probe where there is no GPU."""
MEGATRON_CPU = "megatron-cpu"
"""Megatron-Core and Megatron-Bridge on a CPU: what the conformance ladder runs in where there is no GPU."""


def engine_environments() -> dict[str, Path]:
    """The locks of these environments, by the environment's name."""
    return {name: Path(__file__).parent / f"{name}.lock" for name in (VLLM_CPU, MEGATRON_CPU)}


HERE = Path(__file__).parent


@functools.cache
def built_in() -> tuple[str, ...]:
    return tuple(sorted(path.parent.name.replace("_", "-") for path in HERE.glob("*/loop.py")))


def names() -> tuple[str, ...]:
    """All loops, by their names on the command line. No module of another distribution is imported."""
    from seatrial.core import registry

    return tuple(sorted({*built_in(), *registry.names(registry.LOOPS)}))


def usable() -> Iterator[Loop]:
    """All loops, without installed ones that cannot be loaded: for what is about any loop, and needs none of them."""
    yield from map(get_loop, built_in())
    yield from installed()


def signature_files() -> list[Path]:
    """The known failures of the built-in loops, which can be read without importing a loop."""
    return sorted(HERE.glob("*/signatures.toml"))


def installed() -> Iterator[Loop]:
    """The loops of other distributions, without those that cannot be loaded."""
    from seatrial.core.errors import UserError

    for name in names():
        if name not in built_in():
            try:
                yield get_loop(name)
            except UserError:
                continue


def environments() -> dict[str, Path]:
    """The locks of all environments that can be built, by the environment's name."""
    found = {name: lock for loop in map(get_loop, built_in()) for name, lock in loop.environments().items()} | engine_environments()
    return found | {name: lock for loop in usable() for name, lock in loop.environments().items() if name not in found}


def loop_of(plan: Plan) -> Loop:
    return get_loop(plan.loop).configured(plan.options)


def get_loop(name: str) -> Loop:
    """The loop of this name; an unknown one is an error that lists the known ones."""
    if name in built_in():
        loop: Loop = importlib.import_module(f"seatrial.loops.{name.replace('-', '_')}.loop").LOOP
        return loop
    from seatrial.core import registry
    from seatrial.core.errors import UserError

    extension = registry.find(registry.LOOPS, name)
    if extension is None:
        close = difflib.get_close_matches(name, names(), n=1)
        raise UserError(f"unknown loop {name!r}; known: {', '.join(names())}", f"use {close[0]!r}" if close else "use a known one")
    return _installed(extension)


def _installed(extension: Extension) -> Loop:
    """The loop of an entry point."""
    from seatrial.core.loop import Loop

    found: Any = extension.load()
    if not isinstance(found, Loop):
        raise extension.error("is no loop: it is no seatrial.core.loop.Loop, which has a default for every part but a few")
    missing = [part for part in ("name", "title", "default_model", "folder") if not hasattr(found, part)]
    if missing:
        raise extension.error(f"is no loop: it has no {', '.join(missing)}")
    if found.name != extension.name:
        raise extension.error(f"names a loop that calls itself {found.name!r}")
    return found
