"""What a level claims of the configuration, compared with the one that is in force.

- A claim is a value by dotted key; `"> 0"` and `">= N"` are least values.
- Types count: `1` is not `True`, and a text is not a number.
- A key that is not there holds no claim.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from seatrial.loops.proof import proof
from seatrial.model.record import CheckResult
from seatrial.model.verdict import Boundary

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
    """Whether a value is what is claimed; a list of one file is that file."""
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


def in_force(phase: str, claims: Mapping[str, Any], printed: Sequence[Mapping[str, Any] | None]) -> CheckResult:
    """The configurations that a run printed are those that the level claims; None stands for one that is torn."""
    name = f"configuration in force ({phase})"
    if not printed or None in printed:
        return proof(name, False, "the run printed no whole configuration", Boundary.CONFIG)
    # Of several runs in one log any may have written the metrics: each must be as claimed.
    wrong = [item for config in printed if config for item in differences(claims, {key: lookup(config, key) for key in claims})]
    fell = "; ".join(f"{key} fell back to {value} (claimed: {claimed})" for key, value, claimed in wrong[:3])
    shown = fell or ", ".join(f"{key}={lookup(printed[-1] or {}, key)}" for key in list(claims)[:3])
    right = len(claims) - len({key for key, _, _ in wrong})
    return proof(name, not wrong, f"{right} of {len(claims)} values as claimed", Boundary.CONFIG, "all", shown)
