"""The configuration really in force: what NeMo-RL prints below `Final config:` before it connects to Ray.

- Up to 0.6 it is a dictionary over many lines; since then it is the configuration object on one line, as
  `MasterConfig(policy={...}, grpo=GRPOConfig(max_num_steps=2, ...))`. Both become nested dictionaries.
- It is parsed, never evaluated. Lines of other processes, warnings and other foreign lines in between are left out.
- A block that is torn or holds anything else is None, never a part of it.
"""

from __future__ import annotations

import ast
import math
import re
from pathlib import Path
from typing import Any

from seatrial.loops.lines import Row, blocks
from seatrial.model.guarded import BadValue, parse_literal

TITLE = re.compile(r"Final config:\s*$")
OPENING = re.compile(r"\{['}]|[A-Z]\w*\(")
SEARCHED = 50
"""Rows below the title in which the block must begin: what was written to the other stream may come before it."""
WARNING = re.compile(r"\S+\.py:\d+: \w*Warning: ")
QUOTED = re.compile(r" {2}\S")
"""The line of source that Python writes below a warning."""
TEXT = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"")
NAMES = {"nan": math.nan, "inf": math.inf}


def read_configs(log: Path) -> list[dict[str, Any] | None]:
    """Every configuration that was printed, in order; None stands for one that is torn."""
    return [_block(rows[1:], rows[0][1]) for _, rows in blocks(log, TITLE)]


def _block(rows: list[Row], process: str) -> dict[str, Any] | None:
    """The block that begins in the first rows, as one process wrote it."""
    parts: list[str] = []
    depth, warned = 0, False
    for index, (_, prefix, text) in enumerate(rows):
        if prefix != process:
            continue
        before, warned = warned, bool(WARNING.match(text))
        if warned or (before and QUOTED.match(text)):
            continue
        if not (text.startswith(" ") if parts else OPENING.match(text)):  # all but the first line are indented
            if TITLE.match(text) or (not parts and index >= SEARCHED):
                return None
            continue
        parts.append(text)
        depth += _depth(text)
        if depth <= 0:
            return _parse("\n".join(parts))
    return None


def _depth(text: str) -> int:
    """Brackets opened less brackets closed, outside of strings."""
    plain = TEXT.sub("", text)
    return sum(plain.count(mark) for mark in "{[(") - sum(plain.count(mark) for mark in "}])")


def _parse(text: str) -> dict[str, Any] | None:
    try:
        found = parse_literal(text, _value)
    except BadValue:
        return None
    return found if isinstance(found, dict) else None


def _value(node: ast.expr) -> Any:
    """A literal; the call of a class is the dictionary of its fields, or the one value that it wraps."""
    match node:
        case ast.Dict(keys=keys, values=values):
            return {_value(key): _value(value) for key, value in zip(keys, values, strict=True) if key is not None}
        case ast.List(elts=elements) | ast.Tuple(elts=elements):
            return [_value(element) for element in elements]
        case ast.Call(func=ast.Name() | ast.Attribute(value=ast.Name()), args=[], keywords=fields):
            return {field.arg: _value(field.value) for field in fields if field.arg}
        case ast.Call(func=ast.Name() | ast.Attribute(value=ast.Name()), args=[wrapped], keywords=[]):
            return _value(wrapped)
        case ast.Name(id=name) if name in NAMES:
            return NAMES[name]
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.Constant(value=value):
            return value
    raise ValueError(f"not a literal: {ast.dump(node)[:80]}")
