"""Token rows for tests: what generator and trainer disagree by is a function of sequence and position."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from seatrial.core.series import TokenRow

PROMPT = 3
Off = Callable[[random.Random, int, float], float]
"""Random source, number of the sequence, and how far along its response a token is (0 to 1): the disagreement."""


def row(errors: list[float], number: int = 0, **fields: Any) -> TokenRow:
    """One sequence whose response tokens have these errors."""
    generation = (*([0.0] * PROMPT), *([-1.0] * len(errors)))
    training = (*([0.0] * PROMPT), *(-1.0 - error for error in errors))
    mask = (*([False] * PROMPT), *([True] * len(errors)))
    given: dict[str, Any] = {
        **{"source": f"train_data_step1.jsonl:{number + 1}", "run": "run", "step": 1, "row": number, "prompt": f"prompt {number // 4}"},
        **{"generation": generation, "training": training, "mask": mask, "length": len(mask), **fields},
    }
    return TokenRow(**given)


def rows(off: Off, count: int = 16, tokens: int = 40, seed: int = 1, steps: int = 2, **fields: Any) -> list[TokenRow]:
    """Sequences of two steps (those with an even and with an odd number), four of each prompt."""
    chance = random.Random(seed)
    made = []
    for number in range(count):
        length = tokens + chance.randrange(tokens)
        errors = [off(chance, number, place / length) for place in range(length)]
        step = 1 + number * steps // count
        made.append(row(errors, number, **{"step": step, "row": number % max(1, count // steps), **fields}))
    return made
