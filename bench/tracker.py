"""What the tracker costs: 2,000 trivial tests with a plain fixture, and the same with `tracker.track`; bar: under 5 %.

    python bench/tracker.py [--tests 2000] [--runs 5] [--bar 1.05]

CPU seconds of the whole pytest process and its children, alternating, medians. A third pair says what the plugin costs where nobody
uses the tracker: the plain suite without it (`-p no:seatrial_tracker`) and with it. The other plugins of Seatrial are off throughout.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

PLAIN = """import pytest

class Plain:
    def __init__(self): self.values = {}
    def track(self, name, value): self.values[name] = value

@pytest.fixture
def plain():
    made = Plain()
    yield made
"""
OTHERS = ("-p", "no:seatrial_guards", "-p", "no:seatrial_select", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:timeout")
DEADLINE_S = 300


def suite(directory: Path, fixture: str, tests: int) -> Path:
    """A directory with one file of tests that track one value each."""
    directory.mkdir()
    (directory / "pytest.ini").write_text("[pytest]\n")
    (directory / "conftest.py").write_text(PLAIN)
    each = (f'def test_{number}({fixture}):\n    {fixture}.track("value", {number})\n' for number in range(tests))
    (directory / "test_many.py").write_text("\n".join(each))
    return directory


def cpu_seconds(directory: Path, tests: int, *options: str) -> float:
    """Of one pytest and its children."""
    before = os.times()
    call = [sys.executable, "-m", "pytest", "-q", *OTHERS, *options]
    done = subprocess.run(call, cwd=directory, capture_output=True, text=True, check=False, timeout=DEADLINE_S)
    after = os.times()
    if done.returncode or f"{tests} passed" not in done.stdout:
        sys.exit(f"the suite did not pass:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return after.children_user + after.children_system - before.children_user - before.children_system


def main() -> int:
    """Print medians and ratios; 1 if the bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tests", type=int, default=2000)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--bar", type=float, default=1.05)
    given = parser.parse_args()
    off = ("-p", "no:seatrial_tracker")
    with tempfile.TemporaryDirectory(prefix="seatrial-bench-") as place:
        plain = suite(Path(place, "plain"), "plain", given.tests)
        ours = suite(Path(place, "ours"), "tracker", given.tests)
        kinds = {"plain, plugin off": (plain, off), "plain, plugin on": (plain, ()), "tracker.track": (ours, ())}
        taken: dict[str, list[float]] = {kind: [] for kind in kinds}
        for directory, options in kinds.values():
            cpu_seconds(directory, given.tests, *options)  # compiled files and caches
        for _ in range(given.runs):
            for kind, (directory, options) in kinds.items():
                taken[kind].append(cpu_seconds(directory, given.tests, *options))
    medians = {kind: statistics.median(values) for kind, values in taken.items()}
    for kind, values in taken.items():
        print(f"{kind:18} {medians[kind]:.3f} s CPU (median of {given.runs}: {min(values):.3f} to {max(values):.3f})")
    ratio = medians["tracker.track"] / medians["plain, plugin on"]
    whole = medians["tracker.track"] / medians["plain, plugin off"]
    unused = medians["plain, plugin on"] / medians["plain, plugin off"]
    verdict = "met" if whole < given.bar else "missed"
    print(f"tracker.track / plain fixture: {ratio:.3f} (without the plugin: {whole:.3f}); bar {given.bar}: {verdict}")
    print(f"the plugin, unused: {unused:.3f}")
    return 0 if whole < given.bar else 1


if __name__ == "__main__":
    sys.exit(main())
