"""What the tracker costs on 2,000 trivial tests; bar: under 5 %.

    python bench/tracker.py [--tests 2000] [--runs 7] [--bar 1.05]

The noise between two whole runs is larger than the bar, so the parts are measured where noise cancels out:

- per test: one session in which tests with a plain fixture, without the plugin's hooks, and tests with `tracker.track` take turns; medians
  of both kinds;
- once per session: CPU seconds of a session of one test with the tracker, less that with the plain fixture; medians, by turns.

The overhead is the sum for all tests, over the CPU seconds of the whole suite with the plain fixture and without the plugin. What the
automatic import into the history adds stands in a line of its own. The other plugins of Seatrial are off throughout.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

CONFTEST = """import json, pathlib, time, pytest

class Plain:
    def __init__(self): self.values = {}
    def track(self, name, value): self.values[name] = value

@pytest.fixture
def plain():
    made = Plain()
    yield made

TAKEN = {"plain": [], "tracker": []}
LISTS = {}

def switch(config, kind):
    # Tests with the plain fixture run without the hooks of the plugin, as if it were not installed.
    if not LISTS:
        ours = [plugin for name, plugin in config.pluginmanager.list_name_plugin() if plugin and name.startswith("seatrial_tracker")]
        for hook in (config.hook.pytest_runtest_setup, config.hook.pytest_runtest_logreport):
            LISTS[hook] = {"tracker": hook._hookimpls, "plain": [one for one in hook._hookimpls if one.plugin not in ours]}
            assert not ours or len(LISTS[hook]["plain"]) == len(LISTS[hook]["tracker"]) - 1
    for hook, lists in LISTS.items():
        hook._hookimpls = lists[kind]

@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item):
    kind = "tracker" if "tracker" in item.fixturenames else "plain"
    switch(item.config, kind)
    began = time.perf_counter_ns()
    done = yield
    TAKEN[kind].append(time.perf_counter_ns() - began)
    return done

def pytest_unconfigure():
    pathlib.Path("taken.json").write_text(json.dumps(TAKEN))
"""
OTHERS = ("-p", "no:seatrial_guards", "-p", "no:seatrial_select", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:timeout")
OFF = ("-p", "no:seatrial_tracker")
DEADLINE_S = 300
SHORT = 5
"""Sessions of one test per run: they are short, and differ by little."""


def suite(directory: Path, fixtures: list[str]) -> Path:
    """A directory with one file of tests that track one value each."""
    directory.mkdir()
    (directory / "pytest.ini").write_text("[pytest]\n")
    (directory / "conftest.py").write_text(CONFTEST)
    each = (f'def test_{number}({fixture}):\n    {fixture}.track("value", {number})\n' for number, fixture in enumerate(fixtures))
    (directory / "test_many.py").write_text("\n".join(each))
    return directory


def cpu_seconds(directory: Path, *options: str, history: str = "off") -> float:
    """Of one pytest and its children."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    call = [sys.executable, "-m", "pytest", "-q", *OTHERS, *options]
    # Bytecode is kept, as with any installed plugin: the first run writes ours, and is none of those that count.
    variables = {**os.environ, "SEATRIAL_HISTORY": history, "PYTHONDONTWRITEBYTECODE": ""}
    done = subprocess.run(call, cwd=directory, env=variables, capture_output=True, text=True, check=False, timeout=DEADLINE_S)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        sys.exit(f"the suite did not pass:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> int:
    """Print the parts and the ratio; 1 if the bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tests", type=int, default=2000)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--bar", type=float, default=1.05)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="seatrial-bench-") as place:
        root = Path(place)
        plain = suite(root / "plain", ["plain"] * given.tests)
        turns = suite(root / "turns", ["plain", "tracker"] * given.tests)
        one, ours = suite(root / "one", ["plain"]), suite(root / "ours", ["tracker"])
        cpu_seconds(turns, history=str(root / "history.sqlite"))
        whole, per_test, once, kept = [], list[dict[str, float]](), [], []
        for _ in range(given.runs):
            whole.append(cpu_seconds(plain, *OFF))
            cpu_seconds(turns)
            taken = json.loads((turns / "taken.json").read_text())
            per_test.append({kind: statistics.median(values) / 1e9 for kind, values in taken.items()})
            once += [cpu_seconds(ours) - cpu_seconds(one, *OFF) for _ in range(SHORT)]
            kept.append(cpu_seconds(turns, history=str(root / "history.sqlite")) - cpu_seconds(turns))
    suite_s = statistics.median(whole)
    each = statistics.median(run["tracker"] - run["plain"] for run in per_test)
    fixed, history = statistics.median(once), statistics.median(kept)
    ratio = 1 + (each * given.tests + fixed) / suite_s
    middle = {kind: statistics.median(run[kind] for run in per_test) for kind in ("plain", "tracker")}
    print(f"{given.tests} tests, plain fixture, no plugin: {suite_s:.3f} s CPU ({min(whole):.3f} to {max(whole):.3f})")
    print(
        f"one test: plain fixture {middle['plain'] * 1e6:.1f} us, tracker.track {middle['tracker'] * 1e6:.1f} us: {each * 1e6:.1f} us more"
    )
    print(f"once per session: {fixed * 1e3:.0f} ms ({min(once) * 1e3:.0f} to {max(once) * 1e3:.0f})")
    print(f"overhead of the tracker: ratio {ratio:.3f}; bar {given.bar}: {'met' if ratio < given.bar else 'missed'}")
    print(f"the import into the history of {given.tests} values adds {history * 1e3:.0f} ms once ({history / suite_s:.1%} of the suite)")
    return 0 if ratio < given.bar else 1


if __name__ == "__main__":
    sys.exit(main())
