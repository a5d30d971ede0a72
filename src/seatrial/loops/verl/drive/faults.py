"""Known real-world bugs, injected on purpose where the real one acted. The name comes from SEATRIAL_FAULT."""

from __future__ import annotations

import os
from typing import Any


def current() -> str:
    """The fault to inject, or nothing."""
    return os.environ.get("SEATRIAL_FAULT", "")


def before_step(engine: Any) -> None:
    """Faults that act on the optimizer."""
    if current() == "frozen" and engine.role == "actor":
        for group in (group for optimizer in engine.optimizers() for group in optimizer.param_groups):
            group["lr"] = 0.0


def after_load(engine: Any) -> None:
    """Faults that act on a checkpoint."""
    if current() == "fresh-optimizer" and engine.optimizer is not None:
        for optimizer in engine.optimizers():
            optimizer.state.clear()
