"""Comparing the trajectories of two runs: bit for bit, or within a stated tolerance."""

from __future__ import annotations

import math

from seatrial.loops import proof
from seatrial.model.record import CheckResult
from seatrial.model.series import Metrics
from seatrial.model.verdict import Boundary

TIMES = ("time", "runtime", "per_second")
"""Parts of names of metrics that measure the clock, and so differ between equal runs."""
COMPARED = ("loss", "reward", "reward_std", "grad_norm", "completions/mean_length")
"""Metrics that do not depend on how rows are spread over micro-batches and ranks."""
RELATIVE = 1e-4
ABSOLUTE = 1e-5
"""Two ranks add gradients in another order than one. Measured on six steps: at most 2e-7 relative."""


def is_clock(name: str) -> bool:
    """Whether a metric measures time."""
    return any(word in name.rpartition("/")[2] for word in TIMES)


def same_trajectory(metrics: Metrics, left: str, right: str, after: int | None) -> CheckResult:
    """Every metric of both runs is the same number at every step after `after`."""
    return proof.same_trajectory(metrics, left, right, after, is_clock)


def within_tolerance(metrics: Metrics, left: str, right: str) -> CheckResult:
    """The compared metrics of both runs agree at every step within the tolerance."""
    largest, where, problems = 0.0, "", []
    steps: set[int] = set()
    for name in COMPARED:
        one, two = metrics.series.get(f"{left}train/{name}"), metrics.series.get(f"{right}train/{name}")
        if not one or not two or one.steps != two.steps:
            problems.append(f"{name}: not the same steps in both runs")
            continue
        for step, a, b in zip(one.steps, one.values, two.values, strict=True):
            steps.add(step)
            gap = abs(a - b) / (ABSOLUTE + RELATIVE * abs(a))
            if not math.isfinite(gap) or gap > 1:
                problems.append(f"{name} at step {step}: {a:.6g} against {b:.6g}")
            if gap > largest:
                largest, where = gap, f" ({name}, step {step})"
    return CheckResult(
        name="trajectory of two ranks against one",
        kind="proof",
        passed=bool(steps) and not problems,
        value=f"{100 * largest:.2g} % of the tolerance{where}",
        threshold=f"|difference| <= {ABSOLUTE} + {RELATIVE} x |value|",
        steps=tuple(sorted(steps)),
        message="; ".join(problems[:3]),
        boundary=Boundary.DDP,
    )
