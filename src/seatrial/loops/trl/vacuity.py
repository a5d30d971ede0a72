"""Runs in which nothing could have been learned: they finished, and they show nothing.

Only causes that lie outside the trained code count: no reward variance, or a learning rate of zero. Weights that do
not move although there were advantages and a learning rate are a failure, not a vacuity.
"""

from __future__ import annotations

from seatrial.checks.training_run import DEAD_RATE
from seatrial.model.loop import Vacuity
from seatrial.model.series import Metrics
from seatrial.model.verdict import Boundary

SUPERVISED = frozenset({"mean_token_accuracy", "margins", "margin"})
"""What trainers log that learn from given text or pairs (SFT, DPO, reward models): there are no groups of completions to differ."""


def is_evaluation(run: str) -> bool:
    """Whether a run's metrics come from evaluation: they say nothing about training."""
    return run.rpartition("/")[2] in ("eval", "test")


def vacuous(metrics: Metrics) -> Vacuity | None:
    """Why this run could not have shown anything, or None."""
    for tag, series in sorted(metrics.series.items(), key=lambda item: (not item[0].endswith("learning_rate"), item[0])):
        run, _, name = tag.rpartition("/")
        where = "" if run in ("train", "") else f" in {run}"
        if not series.values or is_evaluation(run):
            continue
        if name == "frac_reward_zero_std" and min(series.values) >= 1:
            return Vacuity(f"vacuous: every group of completions earned the same reward at every step{where}, so all advantages are zero")
        if name == "reward_std" and max(series.values) == 0:
            return Vacuity(f"vacuous: the reward never varied{where}, so all advantages are zero")
        if name == "learning_rate" and "control" not in run and max(map(abs, series.values)) <= DEAD_RATE:
            reason = f"vacuous: the learning rate was 0 at every step{where}, so no weight could change"
            return Vacuity(reason, Boundary.OPTIMIZER)
    return None


def unseen(metrics: Metrics) -> str | None:
    """What a Pass would claim of any training run and these metrics do not show, or None."""
    names = {tag.rpartition("/")[2] for tag in metrics.series}
    if "grad_norm" not in names:
        return "no gradient norm was logged, so nothing shows that anything was trained"
    supervised = names & SUPERVISED and "reward" not in names and not any("completions/" in tag for tag in metrics.series)
    if not supervised and not names & {"reward_std", "frac_reward_zero_std"}:
        return "no spread of rewards was logged, so nothing shows that there was something to learn"
    return None
