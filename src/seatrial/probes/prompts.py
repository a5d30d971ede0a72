"""The prompts that every loop trains on when it makes its own task. Runs inside a loop's interpreter: standard library only."""

from __future__ import annotations

import random

WORDS = ("add", "take", "make", "find", "turn", "sort", "name", "pick")


def prompts(count: int, seed: int) -> list[str]:
    """`count` distinct short prompts."""
    draw = random.Random(seed)
    made: dict[str, None] = {}
    while len(made) < count:
        made[f"{draw.choice(WORDS)} {draw.randrange(100)} and {draw.randrange(100)} = ?"] = None
    return list(made)
