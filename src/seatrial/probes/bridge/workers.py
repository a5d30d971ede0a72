"""Processes that run one rung each where forking is impossible: on a GPU, what Megatron imports touches CUDA before any rung does.

Each worker imports everything, waits for its job on its standard input, does it and ends. A few are started ahead, so that the next
rung does not wait for an import.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

AHEAD = 4
IMPORT_S = 600.0
"""How long a worker may import before its job's own deadline begins."""


class Workers:
    """As many workers as there are jobs, never more than `AHEAD` at once."""

    def __init__(self, jobs: int) -> None:
        self._left, self._waiting = jobs, deque[subprocess.Popen[str]]()
        self._running: subprocess.Popen[str] | None = None

    def __enter__(self) -> Workers:
        self._fill()
        return self

    def __exit__(self, *_exc: object) -> None:
        for worker in (*self._waiting, *([self._running] if self._running else [])):
            worker.kill()
            worker.wait()

    def _fill(self) -> None:
        while self._left and len(self._waiting) < AHEAD:
            self._left -= 1
            self._waiting.append(
                subprocess.Popen([sys.executable, "-m", "seatrial.probes.bridge.ladder", "--worker"], stdin=subprocess.PIPE, text=True)
            )

    def run(self, job: dict[str, Any], place: Path, deadline_s: float) -> tuple[int | None, float, float]:
        """The exit code of a job (negative: its signal; None: it was late and is ended), seconds and CPU seconds of the job itself."""
        worker = self._running = self._waiting.popleft()
        self._fill()
        place.mkdir(parents=True, exist_ok=True)
        assert worker.stdin is not None
        with contextlib.suppress(OSError):  # it died as it imported: its exit code says so
            worker.stdin.write(json.dumps({**job, "place": str(place)}) + "\n")
            worker.stdin.close()
        code: int | None = None
        try:
            begun = self._begun(worker, place / "begun")
            code = worker.wait(timeout=deadline_s) if begun else worker.returncode
        except subprocess.TimeoutExpired:
            worker.kill()
            worker.wait()
        spent = place / "spent"
        seconds, cpu = json.loads(spent.read_text(encoding="utf-8")) if spent.is_file() else (deadline_s, 0.0)
        return code, seconds, cpu

    def _begun(self, worker: subprocess.Popen[str], mark: Path) -> bool:
        """Whether the worker came as far as its job."""
        limit = time.monotonic() + IMPORT_S
        while not mark.exists():
            if worker.poll() is not None:
                return mark.exists()
            if time.monotonic() > limit:
                raise subprocess.TimeoutExpired(worker.args, IMPORT_S)
            time.sleep(0.02)
        return True
