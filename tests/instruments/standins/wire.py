"""What the stand-ins of both frameworks send and receive: a list in this process instead of a socket."""

from __future__ import annotations

from typing import Any

SENT: list[tuple[str, Any]] = []
BROKEN: list[str] = []
"""Names that arrive with other bits."""


def put(name: str, tensor: Any) -> None:
    """Copy the tensor onto the wire."""
    SENT.append((name, tensor.clone()))


def batches(size: int = 2) -> list[list[tuple[str, Any]]]:
    """Everything on the wire, in batches; the wire is empty then."""
    taken = [(name, tensor + 1 if name in BROKEN else tensor) for name, tensor in SENT]
    SENT.clear()
    return [taken[start : start + size] for start in range(0, len(taken), size)]
