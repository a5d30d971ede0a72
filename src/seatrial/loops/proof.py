"""What the proofs of all loops are made of: one result with its measured value, and comparisons of fingerprints and trajectories.

A fact that is missing is a missed proof, never an absent one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from seatrial.model.record import CheckResult
from seatrial.model.series import Metrics
from seatrial.model.verdict import Boundary

Hashes = Mapping[str, str]


def proof(name: str, passed: bool, value: object, boundary: Boundary, threshold: str = "", message: str = "") -> CheckResult:
    """One proof."""
    text = value if isinstance(value, (float, str)) else str(value)
    return CheckResult(name=name, kind="proof", passed=passed, value=text, threshold=threshold, message=message, boundary=boundary)


def differing(left: Hashes, right: Hashes) -> list[str]:
    """Names whose hashes differ, or that one side lacks."""
    return [name for name in {**left, **right} if left.get(name) != right.get(name)]


def equal(name: str, left: Hashes | None, right: Hashes | None, boundary: Boundary = Boundary.CHECKPOINT) -> CheckResult:
    """Two sets of fingerprints are equal and not empty."""
    if not left or not right:
        return proof(f"{name}: bit-equal", False, "no facts", boundary)
    wrong = differing(left, right)
    value = f"{len(left) - len(wrong)} of {len(left)} equal"
    return proof(f"{name}: bit-equal", not wrong, value, boundary, "all", ", ".join(wrong[:3]))


def same_trajectory(metrics: Metrics, left: str, right: str, after: int | None, is_clock: Callable[[str], bool]) -> CheckResult:
    """Every metric of both runs is the same number at every step after `after`, except those that measure the machine."""
    names, others = _tags(metrics, left, is_clock), _tags(metrics, right, is_clock)
    unequal: list[str] = []
    steps: set[int] = set()
    for name in sorted(names | others):
        one, two = metrics.series.get(left + name), metrics.series.get(right + name)
        a = {s: v for s, v in zip(one.steps, one.values, strict=True) if after is not None and s > after} if one else {}
        b = dict(zip(two.steps, two.values, strict=True)) if two else {}
        if {s: v.hex() for s, v in a.items()} != {s: v.hex() for s, v in b.items()}:
            unequal.append(name)
        steps |= a.keys()
    ok = bool(names) and bool(steps) and not unequal
    value = f"{len(names | others) - len(unequal)} of {len(names | others)} metrics x {len(steps)} steps equal"
    return CheckResult(
        name="trajectory after the resume: bit-equal",
        kind="proof",
        passed=ok,
        value=value,
        threshold="all",
        steps=tuple(sorted(steps)),
        message=", ".join(unequal[:4]),
        boundary=Boundary.CHECKPOINT,
    )


def _tags(metrics: Metrics, prefix: str, is_clock: Callable[[str], bool]) -> set[str]:
    """Names below the prefix that do not measure the machine."""
    names = {tag.removeprefix(prefix) for tag in metrics.series if tag.startswith(prefix)}
    return {name for name in names if not is_clock(name)}
