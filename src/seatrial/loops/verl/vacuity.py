"""What the metrics of a run cannot show: nothing could be learned, or what would show it was not logged.

Only causes that lie outside the trained code make a run vacuous: rewards without spread, or a learning rate of zero. A
gradient that is zero although there were advantages and a learning rate is a failure, not a vacuity.
"""

from __future__ import annotations

import re

from seatrial.checks.training_run import DEAD_RATE
from seatrial.loops.verl.console import skipped_steps
from seatrial.model.loop import Vacuity
from seatrial.model.series import Metrics, Series
from seatrial.model.verdict import Boundary

ACTOR = "actor"
SUPERVISED = "train"
CONTROL = "control/"
"""The run that is to learn nothing: level 5 on a CPU compares with it."""
SPREADS = (("critic/advantages", "all advantages were equal"), ("critic/score", "the reward never varied"))
CRITIC = "critic/vf_loss"
"""With a critic a reward that never varies leaves advantages to learn from; without one they would have to be equal, too."""


def vacuous(metrics: Metrics) -> Vacuity | None:
    """Why this run could not have shown anything, or None."""
    for run in _runs(metrics):
        where = f" in {run.rstrip('/')}" if run else ""
        for part in (ACTOR, SUPERVISED):
            rate = metrics.series.get(f"{run}{part}/lr")
            if rate and rate.values and max(map(abs, rate.values)) <= DEAD_RATE and run != CONTROL:
                reason = f"vacuous: the learning rate was 0 at every step{where}, so no weight could change"
                return Vacuity(reason, Boundary.OPTIMIZER)
        for name, what in SPREADS:
            highest, lowest = metrics.series.get(f"{run}{name}/max"), metrics.series.get(f"{run}{name}/min")
            if not (highest and lowest and _trained(highest) and _trained(lowest)):
                continue
            if _trained(highest) == _trained(lowest):
                return Vacuity(f"vacuous: {what} within any step{where}, so there was nothing to learn from")
            if f"{run}{CRITIC}" in metrics.series:
                break
    return None


def unseen(metrics: Metrics) -> str | None:
    """What a Pass would claim of a run and these metrics do not show, or None. A supervised run has no rewards."""
    if skipped := skipped_steps(metrics):
        return skipped
    for run in _runs(metrics):
        supervised = f"{run}{SUPERVISED}/loss" in metrics.series
        part = SUPERVISED if supervised else ACTOR
        if f"{run}{part}/grad_norm" not in metrics.series:
            return f"no {part}/grad_norm was logged, so nothing shows that anything was trained"
        if not supervised and f"{run}critic/score/max" not in metrics.series:
            return "no critic/score was logged, so nothing shows that there was something to learn"
    return None


def _runs(metrics: Metrics) -> list[str]:
    """The prefixes of the runs: a level with several phases has one for each."""
    found = {match[1] for tag in metrics.series if (match := re.fullmatch(r"((?!val)[\w.-]+/)?(?:actor|critic|train)/.+", tag))}
    return sorted(prefix or "" for prefix in found) or [""]


def _trained(series: Series) -> tuple[tuple[int, float], ...]:
    """The points of training steps; step 0 is validation."""
    return tuple((step, value) for step, value in zip(series.steps, series.values, strict=True) if step > 0)
