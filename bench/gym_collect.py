"""NeMo Gym's own collection of a file of rows: its servers and `gym eval run`, started by our backend, timed from first to last row.

    python bench/gym_collect.py ROWS URL GYM_PYTHON

Its last line is [rows, wall seconds, CPU seconds, peak KiB of the collector] as JSON. CPU seconds are of Gym's servers and collector
alike; start-up and imports are left out.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path

import orjson
import psutil

from seatrial.rollouts.backends.gym_backend import GymCollector
from seatrial.rollouts.campaign import Campaign
from seatrial.rollouts.rollout_record import InputRow, RolloutOutcome, Unit

AGENT = "mcqa_simple_agent"


def units(path: Path) -> list[Unit]:
    """One unit per row."""
    rows = [orjson.loads(line) for line in path.read_bytes().splitlines()]
    return [Unit(number, InputRow(number, f"t{number}", "rows", row, agent=AGENT), 0, number) for number, row in enumerate(rows)]


def used() -> tuple[float, int]:
    """CPU seconds of all our descendants, and the largest resident size among Gym's collectors."""
    seconds, largest = 0.0, 0
    for process in psutil.Process().children(recursive=True):
        try:
            times = process.cpu_times()
            seconds += times.user + times.system
            if "eval" in process.cmdline():
                largest = max(largest, process.memory_info().rss)
        except psutil.NoSuchProcess:
            continue
    return seconds, largest // 1024


async def measure(path: Path, url: str, python: str, logs: Path) -> list[float]:
    """Collect everything; raises when a row failed."""
    gym = {"resources": ["mcqa"], "python": python, "shared_environments": True, "driver": "collector"}
    about = {"name": "bench", "datasets": [{"name": "rows", "path": str(path)}], "policy": {"url": url}, "gym": gym}
    backend = GymCollector(Campaign.model_validate(about), [url], None, logs, agents=[AGENT])
    done, began, before, last, peak = 0, 0.0, 0.0, 0.0, 0
    await backend.open()
    try:
        async for unit, result in backend.stream(units(path)):
            if not isinstance(result, RolloutOutcome):
                raise RuntimeError(f"row {unit.number} failed: {result}")
            if not done:
                began, before = time.monotonic(), used()[0]
            done += 1
            if done % 100 == 0:
                last, peak = used()
    finally:
        await backend.close()
    return [done, time.monotonic() - began, last - before, peak]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        print(json.dumps(asyncio.run(measure(Path(sys.argv[1]), sys.argv[2], sys.argv[3], Path(name)))))
