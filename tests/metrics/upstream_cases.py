"""Metrics made for one expression: values around its threshold, in shapes that a real run can have.

Both sides of the comparison with upstream's checker use these: `make_upstream.py`, which asks the checker, and the test.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Iterator
from typing import Any

from seatrial.metrics.checks import literal, parse

Table = dict[str, float]
LENGTH = 12

SHAPES: dict[str, Callable[[list[str], float], Table]] = {
    "flat": lambda steps, level: dict.fromkeys(steps, level),
    "falling": lambda steps, level: {step: level * (1 - 0.9 * index / len(steps)) for index, step in enumerate(steps)},
    "one outlier": lambda steps, level: {step: level * (9 if index == 3 else 1) for index, step in enumerate(steps)},
    "resumed": lambda steps, level: {str(int(step) + 100): level for step in steps},
    "with step 0": lambda steps, level: {"0": level * 3, **dict.fromkeys(steps, level)},
    "one gap": lambda steps, level: {step: level for index, step in enumerate(steps) if index != 4},
    "last step missing": lambda steps, level: dict.fromkeys(steps[:-1], level),
    "NaN first": lambda steps, level: {step: math.nan if index == 0 else level for index, step in enumerate(steps)},
    "NaN in the middle": lambda steps, level: {step: math.nan if index == 4 else level for index, step in enumerate(steps)},
    "NaN last": lambda steps, level: {step: math.nan if index == len(steps) - 1 else level for index, step in enumerate(steps)},
    "all NaN": lambda steps, _: dict.fromkeys(steps, math.nan),
    "one infinity": lambda steps, level: {step: math.inf if index == 4 else level for index, step in enumerate(steps)},
    "one minus infinity": lambda steps, level: {step: -math.inf if index == 4 else level for index, step in enumerate(steps)},
    "no points": lambda _steps, _level: {},
}


def cases(expr: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and content of each metrics file for an expression."""
    tree = parse(expr).tree
    tags = sorted({_text(node.slice) for node in ast.walk(tree) if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name)})
    named = {_text(node.slice) for node in ast.walk(tree) if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Subscript)}
    numbers = [
        number
        for node in ast.walk(tree)
        if isinstance(node, ast.Compare)
        for number in map(literal, node.comparators)
        if number is not None
    ]
    bound = numbers[0] if numbers else 1.0
    counted = "len(" in expr
    for name, level in (("below", bound - 0.1 * abs(bound) - 0.01), ("at", bound), ("above", bound + 0.1 * abs(bound) + 0.01)):
        length = {"below": int(bound) - 1, "at": int(bound), "above": int(bound) + 1}[name] if counted else LENGTH
        steps = sorted({*map(str, range(1, length + 1)), *(step for step in named if step.isdecimal())}, key=int)
        for shape, make in SHAPES.items():
            yield f"{name}, {shape}", {tag: make(steps, level) for tag in tags}
        yield f"{name}, single values", dict.fromkeys(tags, level)
    yield "single texts", dict.fromkeys(tags, "yes")
    yield "no such metric", {}


def _text(node: ast.expr) -> str:
    assert isinstance(node, ast.Constant)
    return str(node.value)
