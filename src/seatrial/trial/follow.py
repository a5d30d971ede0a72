"""Watching a running level: how far it is and how good, from its log line and the end of its metrics file."""

from __future__ import annotations

import json
import re
from pathlib import Path

from seatrial.model.knowledge import Level
from seatrial.model.loop import Phase
from seatrial.trial.progress import Listener, Running

STEP = re.compile(r"step (\d+) of (\d+)")
TAIL = 8192


def last_reward(path: Path) -> float | None:
    """The newest reward in a metrics.jsonl, by its last whole row; None while there is none."""
    try:
        with path.open("rb") as stream:
            stream.seek(max(0, path.stat().st_size - TAIL))
            rows = stream.read().split(b"\n")[:-1]
    except OSError:
        return None
    for row in reversed(rows):
        try:
            values = json.loads(row)
        except ValueError:
            return None  # the cut first row: nothing newer was found
        for tag, value in values.items():
            if tag.endswith("/reward") and isinstance(value, (int, float)):
                return float(value)
    return None


class Follower:
    """Turns ticks of a process into events."""

    def __init__(self, listener: Listener, level: Level, phase: Phase, metrics: Path) -> None:
        self.listener, self.level, self.phase, self.metrics = listener, level, phase, metrics
        self.step: int | None = None
        self.steps = phase.steps

    def tick(self, seconds: float, line: str) -> None:
        """Called about twice a second."""
        found = STEP.search(line)
        if found:
            self.step, self.steps = int(found[1]), int(found[2])
        reward = last_reward(self.metrics)
        self.listener(Running(self.level.number, self.level.title, self.phase.name, seconds, self.step, self.steps, reward, line))
