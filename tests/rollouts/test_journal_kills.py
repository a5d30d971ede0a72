"""The short version of the kill -9 harness; the long one is `python -m tests.rollouts.kills --points 200`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1])
def test_kills_lose_nothing_and_double_nothing(seed: int) -> None:
    command = [sys.executable, "-m", "tests.rollouts.kills", "--points", "20", "--seed", str(seed)]
    # A process of its own: it forks, which a test runner with threads must not.
    done = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("20 kill points")
    assert "0 lost, 0 twice, same bytes" in done.stdout
