"""A stand-in with the signature of the function by which NeMo-RL broadcasts weights."""

from __future__ import annotations

from typing import Any

import wire  # type: ignore[import-not-found]


def packed_broadcast_producer(
    iterator: Any, group: Any, src: int, post_iter_func: Any, *, buffer_size_bytes: int | None = None, num_buffers: int | None = None
) -> None:
    """Broadcast; ranks other than `src` take part with what they have."""
    for item in iterator:
        tensor = post_iter_func(item)
        if group.rank == src:
            wire.put(item[0], tensor)
