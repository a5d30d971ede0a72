"""What every instrument and driver shares: rows of facts, the type of a loop's seeded fault, and the prompts of its built-in task.

A fact is one JSON object on one line, written by a single `write` on a descriptor opened for appending: rows of several processes never
interleave, and a killed process leaves at most one torn last line.
"""

from __future__ import annotations

import json
import math
import os
import random
from typing import Any, NamedTuple


def plain(value: Any) -> Any:
    """Strict JSON: non-finite numbers become marked strings; tensors and NumPy scalars become numbers."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if hasattr(value, "item") and not isinstance(value, (str, bytes)):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    return value


def append(path: str | os.PathLike[str], row: dict[str, Any]) -> None:
    data = (json.dumps(plain(row), ensure_ascii=False, allow_nan=False) + "\n").encode()
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(handle, data)
    finally:
        os.close(handle)


class LoopFault(NamedTuple):
    text: str  # what it does
    levels: tuple[int, ...]  # the levels that are to catch it
    stage: str = ""  # the stage of the step proof that names it at the first of these levels; empty: another check catches it


WORDS = ("add", "take", "make", "find", "turn", "sort", "name", "pick")


def prompts(count: int, seed: int) -> list[str]:
    """`count` distinct short prompts."""
    draw = random.Random(seed)
    made: dict[str, None] = {}
    while len(made) < count:
        made[f"{draw.choice(WORDS)} {draw.randrange(100)} and {draw.randrange(100)} = ?"] = None
    return list(made)
