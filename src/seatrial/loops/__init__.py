"""The loops that Seatrial drives, and the environments of generation engines.

A folder here with a `loop.py` that defines `LOOP` adds a loop.
"""

from __future__ import annotations

import difflib
import importlib
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from seatrial.core.loop import Loop
    from seatrial.core.records import Plan

VLLM_CPU = "vllm-cpu"
"""vLLM on a CPU: a real server for the refit probe where there is no GPU."""
MEGATRON_CPU = "megatron-cpu"
"""Megatron-Core and Megatron-Bridge on a CPU: what the conformance ladder runs in where there is no GPU."""


def engine_environments() -> dict[str, Path]:
    """The locks of these environments, by the environment's name."""
    return {name: Path(__file__).parent / f"{name}.lock" for name in (VLLM_CPU, MEGATRON_CPU)}


HERE = Path(__file__).parent


def names() -> tuple[str, ...]:
    """All loops, by their names on the command line."""
    return tuple(sorted(path.parent.name.replace("_", "-") for path in HERE.glob("*/loop.py")))


def environments() -> dict[str, Path]:
    """The locks of all environments that can be built, by the environment's name."""
    return {name: lock for loop in names() for name, lock in get_loop(loop).environments().items()} | engine_environments()


def loop_of(plan: Plan) -> Loop:
    """The loop of a plan, with the plan's options in force."""
    return get_loop(plan.loop).configured(plan.options)


def get_loop(name: str) -> Loop:
    """The loop of this name; an unknown one is an error that lists the known ones."""
    if name not in names():
        from seatrial.core.errors import UserError

        close = difflib.get_close_matches(name, names(), n=1)
        raise UserError(f"unknown loop {name!r}; known: {', '.join(names())}", f"use {close[0]!r}" if close else "use a known one")
    loop: Loop = importlib.import_module(f"seatrial.loops.{name.replace('-', '_')}.loop").LOOP
    return loop
