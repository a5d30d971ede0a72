"""Watching a running level: how far it is and how good, from the end of its metrics file."""

from __future__ import annotations

from pathlib import Path

from seatrial.model.guarded import parse_json
from seatrial.model.knowledge import Level
from seatrial.model.loop import Phase
from seatrial.trial.progress import Listener, Running

TAIL = 8192


def newest(path: Path) -> tuple[int | None, float | None]:
    """The newest step and reward in a metrics.jsonl, from its last whole rows; None while there is none."""
    try:
        with path.open("rb") as stream:
            stream.seek(max(0, path.stat().st_size - TAIL))
            rows = stream.read().split(b"\n")[:-1]
    except OSError:
        return None, None
    for row in reversed(rows):
        try:
            values = parse_json(row)
        except ValueError:
            break  # the first row may be cut: nothing newer was found
        if not isinstance(values, dict):
            break
        for tag, value in values.items():
            if tag.endswith("/reward") and isinstance(value, (int, float)):
                return values.get("step"), float(value)
    return None, None


class Follower:
    """Turns ticks of a process into events."""

    def __init__(self, listener: Listener, level: Level, phase: Phase, metrics: Path) -> None:
        self.listener, self.level, self.phase, self.metrics = listener, level, phase, metrics

    def tick(self, seconds: float, line: str) -> None:
        """Called about twice a second."""
        step, reward = newest(self.metrics)
        self.listener(Running(self.level.number, self.level.title, self.phase.name, seconds, step, self.phase.steps, reward, line))
