"""Which metrics of a loop mean what: data that each loop gives to the checks of a training run.

Every name is a regular expression that must match a whole tag behind the prefix of its run (`full/train/loss` is `train/loss` of the
run `full/`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Bound:
    """Where a metric of a sound run stays. Outside of it a run is inconclusive."""

    tag: str
    low: float = -math.inf
    high: float = math.inf
    """General limits: they hold whatever the run's first steps show."""
    floor: float = math.inf
    """Values up to this are never called diverged."""
    growth: float = 1.0
    """How often the size of the first steps may be exceeded, above the floor."""


@dataclass(frozen=True, slots=True)
class Signals:
    """The metrics that a training run of one loop is judged by."""

    loss: tuple[str, ...]
    grad_norm: tuple[str, ...]
    rate: tuple[str, ...]
    """Learning rates."""
    reward: tuple[str, ...] = ()
    """A run that logs none is supervised."""
    spreads: tuple[tuple[str, str], ...] = ()
    """Largest and smallest value of what a step learns from (plain tags): equal ends are nothing to learn. The first pair that is logged
    counts."""
    deviations: tuple[str, ...] = ()
    """Zero where there was nothing to learn."""
    ties: tuple[str, ...] = ()
    """One where there was nothing to learn: the share of groups whose rewards are equal."""
    lengths: tuple[str, ...] = ()
    """Mean and largest length of what was generated, or tokens in the loss: zero is nothing to train on."""
    entropy: tuple[str, ...] = ()
    moving: tuple[str, ...] = ()
    """Besides loss, gradient, reward and entropy: numbers that no two steps share."""
    counters: tuple[str, ...] = ()
    """Never fall from one step to the next within one run."""
    shares: tuple[str, ...] = ()
    """Lie within 0 and 1 by definition."""
    not_negative: tuple[str, ...] = ()
    """Besides gradient norms, learning rates, deviations, lengths and shares."""
    ordered: tuple[tuple[str, str], ...] = ()
    """Plain tags of which the first never exceeds the second at one step."""
    bounds: tuple[Bound, ...] = ()
    control: str = ""
    """The prefix of a run that is to learn nothing: its learning rate may be zero."""

    @property
    def every_step(self) -> tuple[str, ...]:
        """What each logged step has, where the loop logs it at all."""
        ends = tuple(tag for pair in self.spreads for tag in pair)
        return (*self.loss, *self.grad_norm, *self.rate, *self.reward, *ends, *self.deviations, *self.ties, *self.lengths, *self.entropy)

    @property
    def every(self) -> tuple[str, ...]:
        """All that are numbers by definition."""
        ordered = tuple(tag for pair in self.ordered for tag in pair)
        bounded = tuple(bound.tag for bound in self.bounds)
        return (*self.every_step, *self.moving, *self.counters, *self.shares, *self.not_negative, *ordered, *bounded)
