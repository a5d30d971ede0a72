"""A stand-in with the signature of the function by which NeMo-RL streams weights."""

from __future__ import annotations

from typing import Any

import wire  # type: ignore[import-not-found]


def stream_weights_via_ipc_zmq_impl(params_generator: Any, buffer_size_bytes: int, zmq_socket: Any, rank: int, worker_name: str) -> None:
    """Stream."""
    for name, tensor in params_generator:
        wire.put(name, tensor)
