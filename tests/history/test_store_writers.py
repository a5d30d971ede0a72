"""Several writers at once lose nothing, also when one of them is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from seatrial.history.store import Store
from tests.history.histories import TEST, results

pytestmark = pytest.mark.slow

RUNS = 50


def importer(store: Path, folder: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "seatrial.cli.main", "history", "import", str(folder), "--store", str(store), "--project", "p"]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL)


def folders(tmp_path: Path) -> list[Path]:
    for side in (0, 1):
        for number in range(RUNS):
            stamp = f"2025-03-2{side} 10:{number // 60:02d}:{number % 60:02d}"
            table = {TEST: {f"value_{one}": number + one / 7 for one in range(300)}}
            results(tmp_path / str(side) / f"2025032{side}_{number:06d}.json", start_time=stamp, metrics=table)
    return [tmp_path / "0", tmp_path / "1"]


def whole(store: Path) -> int:
    """How many runs there are, each of them with all its values."""
    with Store(store, write=False) as kept:
        runs = kept.runs()
        assert all(len(kept.of_run(run.id or 0)) == 300 for run in runs)
        return len(runs)


def test_two_writers_into_one_new_store_lose_nothing(tmp_path: Path) -> None:
    store = tmp_path / "h.sqlite"
    writers = [importer(store, folder) for folder in folders(tmp_path)]
    assert [writer.wait(timeout=120) for writer in writers] == [0, 0]
    assert whole(store) == 2 * RUNS


def test_a_writer_that_is_killed_leaves_whole_runs_and_the_next_import_brings_the_rest(tmp_path: Path) -> None:
    store = tmp_path / "h.sqlite"
    sides = folders(tmp_path)
    victim, other = importer(store, sides[0]), importer(store, sides[1])
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and victim.poll() is None:
        if store.exists() and _some(store):
            break
        time.sleep(0.005)
    os.kill(victim.pid, signal.SIGKILL)
    victim.wait(timeout=60)
    assert other.wait(timeout=120) == 0
    assert RUNS <= whole(store) <= 2 * RUNS
    assert importer(store, sides[0]).wait(timeout=120) == 0
    assert whole(store) == 2 * RUNS


def _some(store: Path) -> bool:
    """Whether a run is there; a store in the making cannot be read yet."""
    from seatrial.core.errors import UserError

    try:
        with Store(store, write=False) as kept:
            return bool(kept.runs(limit=1))
    except UserError:
        return False
