"""A stand-in with the class and the signatures of verl's sender."""

from __future__ import annotations

from typing import Any

import wire  # type: ignore[import-not-found]


class BucketedWeightSender:
    """Puts each tensor on the wire."""

    def __init__(self, zmq_handle: str, bucket_size_mb: int = 512, use_shm: bool = False) -> None:
        self.zmq_handle = zmq_handle

    async def async_send_weights(self, weights: Any) -> str:
        """Send a stream, synchronous or not."""
        if hasattr(weights, "__aiter__"):
            async for name, tensor in weights:
                wire.put(name, tensor)
        else:
            for name, tensor in weights:
                wire.put(name, tensor)
        return "sent"
