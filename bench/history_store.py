"""The history store with 1,000,000 points: `show` as a command and as a query, `trend`, import, and the same rows as JSON files.

Peer: one JSON file per run in the schema of unit_results.json, read one after the other with json, as the guide's jq one-liner does.
CPU seconds, the least of several runs; the command is measured whole, beside `seatrial --version`.
"""

from __future__ import annotations

import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from seatrial.history.importing import Stated, add
from seatrial.history.store import Kind, Point, Store, StoredRun

SHAPES = {"100 runs x 100 metrics x 100 steps": (100, 100, 100), "10,000 runs x 100 metrics x 1": (10_000, 100, 1)}
METRIC = "test_m::test_50/value"
REPEATS = 7


def child(command: list[str]) -> float:
    """Least CPU seconds of a command."""
    times = []
    for _ in range(REPEATS):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=600)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(times)


def fill(path: Path, runs: int, metrics: int, steps: int) -> float:
    """Make a store by its own interface; CPU seconds."""
    draw, start = random.Random(10), time.process_time()
    with Store(path, write=True) as store:
        for number in range(runs):
            points = [
                Point(metric=f"test_m::test_{metric}/value", step=step if steps > 1 else None, value=draw.gauss(1, 0.01))
                for metric in range(metrics)
                for step in range(steps)
            ]
            store.add(
                StoredRun(
                    project="bench",
                    kind=Kind.TEST,
                    name="unit",
                    commit=f"{number:040x}",
                    branch="main",
                    time=1e9 + number,
                    machine="m",
                    passed=True,
                    trusted=True,
                    digest=str(number),
                ),
                points,
            )
    return time.process_time() - start


def query(path: Path) -> float:
    """Least CPU seconds of the query behind `show`, with opening the store."""
    times = []
    for _ in range(REPEATS):
        start = time.process_time()
        with Store(path, write=False) as store:
            store.values(METRIC)
        times.append(time.process_time() - start)
    return min(times)


def files(folder: Path, runs: int, metrics: int, steps: int) -> None:
    """The same as JSON files; steps as a list."""
    draw = random.Random(10)
    for number in range(runs):
        tests = {
            f"test_m::test_{metric}": {"value": [draw.gauss(1, 0.01) for _ in range(steps)] if steps > 1 else draw.gauss(1, 0.01)}
            for metric in range(metrics)
        }
        data = {"exit_status": 0, "git_commit": f"{number:040x}", "start_time": "2025-03-24 23:34:12", "metrics": tests}
        (folder / f"{number:08d}.json").write_text(json.dumps(data), encoding="utf-8")


READ = """
import json, pathlib, sys
for file in sorted(pathlib.Path(sys.argv[1]).iterdir()):
    data = json.loads(file.read_bytes())
    print(data["start_time"], data["git_commit"], data["metrics"]["test_m::test_50"]["value"], sep="\\t")
"""


def show(place: Path) -> None:
    """Both shapes, ours and the peer's."""
    seatrial = str(Path(sys.executable).with_name("seatrial"))
    bare = child([seatrial, "--version"])
    for number, (what, shape) in enumerate(SHAPES.items()):
        store, folder = place / f"{number}.sqlite", place / f"{number}"
        folder.mkdir()
        made = fill(store, *shape)
        files(folder, *shape)
        whole = child([seatrial, "history", "show", METRIC, "--store", str(store)])
        # The same work as the peer's: every run printed.
        every = child([seatrial, "history", "show", METRIC, "--limit", "0", "--store", str(store)])
        changes = child([seatrial, "history", "trend", METRIC, "--store", str(store)])
        alone = query(store)
        peer = child([sys.executable, "-c", READ, str(folder)])
        size = store.stat().st_size / 1e6
        print(f"history: {what}: made in {made:.1f} s CPU, {size:.0f} MB")
        print(
            f"history:   show {whole:.3f} s CPU as a command (bar: 0.2; seatrial --version {bare:.3f}), the query alone {alone:.3f};"
            f" all runs printed: ours {every:.3f}, JSON files read with json {peer:.3f}, ratio {peer / every:.1f}"
        )
        print(f"history:   trend {changes:.3f} s CPU as a command (bar: 2)")


def imports(place: Path) -> None:
    """100 runs of 3,000 points, as files of the tracker."""
    folder = place / "import"
    folder.mkdir()
    for number in range(100):
        tests = {f"test_m::test_{metric}": {f"value_{one}": number + one / 7 for one in range(10)} for metric in range(300)}
        data = {"exit_status": 0, "git_commit": f"{number:040x}", "start_time": f"2025-03-24 23:{number // 60:02d}:{number % 60:02d}"}
        (folder / f"20250324_{number:06d}.json").write_text(json.dumps(data | {"metrics": tests}), encoding="utf-8")
    start, used = time.perf_counter(), time.process_time()
    with Store(place / "import.sqlite", write=True) as store:
        done = list(add(store, folder, Stated(project="bench"), ("main",)))
        kept = len(store.runs())
    wall, used = time.perf_counter() - start, time.process_time() - used
    points = sum(one.points for one in done)
    print(f"history: import of {kept} runs, {points} points: {used:.2f} s CPU, {wall:.2f} s wall (bar: 5)")


def main() -> None:
    """Print the figures."""
    os.environ["SEATRIAL_HISTORY"] = "off"
    with tempfile.TemporaryDirectory() as folder:
        show(Path(folder))
        imports(Path(folder))


if __name__ == "__main__":
    main()
