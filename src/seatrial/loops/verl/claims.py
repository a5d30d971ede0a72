"""Comparing values of a configuration with what a level claims of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

ABSENT = "(no such key)"


def lookup(config: Mapping[str, Any], key: str) -> Any:
    """The value at a dotted key of nested mappings."""
    value: Any = config
    for part in key.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return ABSENT
        value = value[part]
    return value


def holds(claimed: Any, value: Any) -> bool:
    """Whether a value is what is claimed; a list of one file is that file; `"> 0"` and `">= N"` are least values."""
    if isinstance(value, list) and len(value) == 1 and not isinstance(claimed, list):
        value = value[0]
    if isinstance(claimed, str) and claimed.startswith(">"):
        sign, _, least = claimed.partition(" ")
        return type(value) in (int, float) and (value >= float(least) if sign == ">=" else value > float(least))
    return type(value) is type(claimed) and bool(value == claimed)


def differences(claims: Mapping[str, Any], values: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Key, value and claim, where a value is not as claimed; `values` are by dotted key."""
    for key, claimed in claims.items():
        value = values.get(key, ABSENT)
        if not holds(claimed, value):
            yield key, value, claimed
