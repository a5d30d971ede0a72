"""A stand-in with the class and the signatures of verl's checkpoint engines."""

from __future__ import annotations

from typing import Any


class CheckpointEngine:
    """The base of all engines."""

    async def send_weights(self, weights: Any, global_steps: int | None = None) -> Any:
        """Send."""
        raise NotImplementedError

    async def receive_weights(self, global_steps: int | None = None) -> Any:
        """Receive."""
        raise NotImplementedError
