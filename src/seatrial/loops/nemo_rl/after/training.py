"""The training runs that metrics show, and the steps at which they changed weights."""

from __future__ import annotations

from seatrial.model.series import Metrics

SHOWING = ("train/loss", "train/grad_norm", "train/reward")
"""Tags that every training run has at least one of."""
SPREAD = ("train/advantages/min", "train/advantages/max")
"""What a step could learn from: both are 0 where every answer of a prompt was rewarded alike."""


def runs(metrics: Metrics) -> list[str]:
    """The prefixes of all training runs."""
    found = {tag.removesuffix(name) for tag in metrics.series for name in SHOWING if tag.endswith(name)}
    return sorted(prefix for prefix in found if not prefix or prefix.endswith("/"))


def supervised(metrics: Metrics, run: str) -> bool:
    """Whether a run has no rewards."""
    return f"{run}train/reward" not in metrics.series


def updates(metrics: Metrics, run: str) -> list[int]:
    """Steps with a gradient and a learning rate."""
    gradient, rate = (metrics.series.get(f"{run}train/{name}") for name in ("grad_norm", "lr"))
    return [step for step in gradient.steps if (gradient.get(step) or 0) > 0 and (rate.get(step) or 0) > 0] if gradient and rate else []
