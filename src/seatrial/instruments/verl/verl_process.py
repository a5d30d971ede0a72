"""What a process of verl is, the fault that acts in it, and its part of the batch record: by command line and environment, stdlib only."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from seatrial.instruments import facts
from seatrial.instruments.facts import LoopFault


def process_kind(command: Sequence[str]) -> str:
    """`driver`, `worker` or `child`.

    The wrapper's own question for the device (`python3 -`) and spawned children are no drivers: were they taken for
    one, the real driver could be missing without anybody noticing.
    """
    if any(word.endswith("default_worker.py") for word in command):
        return "worker"
    return "driver" if main_module(command).startswith(("verl.", "seatrial.")) else "child"


def main_module(command: Sequence[str]) -> str:
    """The module that `python -m` runs, or nothing."""
    words = list(command)
    return words[words.index("-m") + 1] if "-m" in words[:-1] else ""


def current_fault() -> str:
    """The fault to inject, or nothing."""
    return os.environ.get("SEATRIAL_FAULT", "")


def before_step(engine: Any) -> None:
    """Faults that act on the optimizer."""
    if current_fault() == "frozen" and engine.role == "actor":
        for group in (group for optimizer in engine.optimizers() for group in optimizer.param_groups):
            group["lr"] = 0.0


def after_load(engine: Any) -> None:
    """Faults that act on a checkpoint."""
    if current_fault() == "fresh-optimizer" and engine.optimizer is not None:
        for optimizer in engine.optimizers():
            optimizer.state.clear()


EVERY = (0, 1, 5)
FAULTS: dict[str, LoopFault] = {
    "stale-generator": LoopFault("the generation server keeps its first weights: every later sync is dropped", EVERY),
    "frozen": LoopFault("the actor's optimizer steps with a learning rate of 0, whatever is logged", EVERY),
    "reward-raises": LoopFault("the reward function raises for every third prompt, and the loop swallows it", EVERY),
    "constant-reward": LoopFault("every completion earns 0.5: no advantage anywhere", EVERY),
    "fresh-optimizer": LoopFault("the checkpoint's optimizer state is not restored", (1,)),
}


RECORD_VARIABLE = "SEATRIAL_RECORD"
"""Names the directory of the parts; without it nothing is recorded."""
PARTS = "parts"
REWARDS = "rewards.jsonl"


def record_directory() -> Path | None:
    """Where the parts go; None when nothing is recorded."""
    place = os.environ.get(RECORD_VARIABLE)
    return Path(place) if place else None


def rewarded(row: int, text: str, reward: float) -> None:
    """One call of the reward function."""
    place = record_directory()
    if place is not None:
        place.mkdir(parents=True, exist_ok=True)
        facts.append(place / REWARDS, {"row": row, "text": text, "reward": reward})
