"""driver = "collector": Gym's servers as always, and its own collector in the place of our requests."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence

from seatrial.rollouts.gym.backend import GymBackend
from seatrial.rollouts.gym.collector import collect_with_gym
from seatrial.rollouts.work import Outcome, RolloutError, Unit


class GymCollector(GymBackend):
    """A `Streaming` backend."""

    def stream(self, units: Sequence[Unit]) -> AsyncGenerator[tuple[Unit, Outcome | RolloutError], None]:
        """Roll them out with Gym's collector; what it never hands on is owed."""
        return collect_with_gym(self, units, self._logs)
