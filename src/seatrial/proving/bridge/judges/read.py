"""Readers of facts for the judges of rungs. One rule: what is missing, doubled, no number, NaN, infinite or a truth value is nothing.

Nothing is None, 0, or an empty fact, and never what a check asks for: a check that reads nothing is missed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from seatrial.loops.facts import Row


def only(rows: Sequence[Row], fact: str, dtype: str | None = None) -> Row:
    """The only such fact; an empty one when there is none or more than one."""
    found = [row for row in rows if row.get("fact") == fact and dtype in (None, row.get("dtype"))]
    return found[0] if len(found) == 1 else {}


def number(value: object) -> float | None:
    """A finite number, or None."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) else None


def count(row: Mapping[str, Any], key: str) -> int:
    """How many a fact says; 0 when it does not."""
    value = row.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else 0


def figures(row: Mapping[str, Any], key: str) -> dict[str, Any]:
    """The fields of a part of a fact; none when there is no such part."""
    found = row.get(key)
    return found if isinstance(found, dict) else {}


def length(found: object) -> int | None:
    """How many a list of a fact has (`probes.bridge.weights.listed`); None when it is no such list."""
    many, first = (found.get("count"), found.get("first")) if isinstance(found, dict) else (None, None)
    whole = isinstance(many, int) and not isinstance(many, bool) and isinstance(first, list) and many >= len(first)
    return many if whole else None


def first(found: object) -> list[Any]:
    """The first of a list of a fact: those that it names."""
    names = found.get("first") if isinstance(found, dict) else None
    return names if isinstance(names, list) else []
