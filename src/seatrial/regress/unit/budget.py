"""The GPU hours of a suite: what tests say that they take, what they took, and how much there is.

- `@pytest.mark.gpu_hours(h)`, or `(gpus=8, minutes=30)`; the nearest marker of a test counts. `(h, gpus=8)` says on how many it runs.
- Without `gpus=`, as many as the test's `needs` marker asks for, else one.
- A plan is over the tests that will run; one above the budget is refused before anything runs, with the largest named. A test with a
  `skipif` counts: whether it holds is known only when the test starts, and a plan may be too large but not too small.
- Wrong arguments are a `ValueError`; hours are finite.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from seatrial.regress.unit.needs import gpu_number, nearest

KEYS = ("gpus", "minutes")
LARGEST = 5
SLACK = 1e-9
"""Sums of minutes are not exact: ten times six minutes are one hour."""


class Share(NamedTuple):
    """What one test says that it takes."""

    test: str
    hours: float
    gpus: int


def share(test: str, args: Sequence[object], kwargs: Mapping[str, object], needed: int) -> Share:
    """The share of a test from the arguments of its marker; `needed`: the GPUs of its `needs`."""
    for key in kwargs:
        if key not in KEYS:
            raise ValueError(f"unknown argument {key!r}; {nearest(key, KEYS)}")
    gpus = gpu_number(kwargs["gpus"]) if "gpus" in kwargs else max(needed, 1)
    if len(args) + ("minutes" in kwargs) != 1:
        raise ValueError("give hours, or minutes=, and one of them: gpu_hours(0.5) or gpu_hours(gpus=2, minutes=15)")
    if args:
        return Share(test, _number("hours", args[0]), gpus)
    return Share(test, gpus * _number("minutes", kwargs["minutes"]) / 60, gpus)


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise ValueError(f"{name}: must be a number, not below 0 (got {value!r})")
    return float(value)


def hours_given(text: str) -> float:
    """The value of `--seatrial-gpu-hours`."""
    try:
        return _number("hours", float(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be a number of hours, not below 0 (got {text!r})") from error


def told(hours: float) -> str:
    """Hours as people say them: a test of milliseconds is no 2e-08."""
    return "under 0.001" if 0 < hours < 0.001 else f"{hours:.6g}"


def excess(shares: Sequence[Share], budget: float, origin: str) -> str | None:
    """Why the plan is refused; None when the budget holds."""
    total = math.fsum(one.hours for one in shares)
    if total <= budget * (1 + SLACK):
        return None
    largest = sorted(shares, key=lambda one: (-one.hours, one.test))[:LARGEST]
    lines = [f"seatrial: the tests plan {told(total)} GPU hours, the budget is {told(budget)} ({origin}); the largest:"]
    lines += [f"  {told(one.hours)} {one.test}" for one in largest]
    lines += [f"  … and {len(shares) - LARGEST} more"] if len(shares) > LARGEST else []
    return "\n".join([*lines, "select fewer tests, or give --seatrial-gpu-hours"])
