"""What recording for selection costs: 2,000 trivial tests, each calling a small function of the project.

Usage: .venv/bin/python bench/select_overhead.py [--tests 2000] [--rounds 5] [--testmon PYTHON]

- Plain runs and recording runs alternate; CPU seconds of the whole process tree, medians, and their ratio (the bar: under 1.25).
- Recording again is what costs every time, and what the bar is about; the first time every source is read as well, which stands beside.
- `--testmon` is a Python of an environment of its own that has pytest and pytest-testmon: its plain and its recording runs stand beside.
- One JSON line at the end.
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

BAR = 1.25
OFF = ["-p", "no:seatrial_tracker", "-p", "no:seatrial_guards"]
FORGET = (".seatrial-select.sqlite", ".testmondata", ".testmondata-shm", ".testmondata-wal")


def write_suite(root: Path, tests: int) -> None:
    """A package of 20 functions and 20 test files that share `tests` tests."""
    (root / "package").mkdir()
    (root / "package/__init__.py").write_text("")
    (root / "pytest.ini").write_text("[pytest]\npythonpath = .\n")
    for number in range(20):
        (root / f"package/part{number}.py").write_text(f"def value(x):\n    return x + {number}\n")
        lines = [f"from package.part{number} import value\n"]
        lines += [f"def test_{test}():\n    assert value({test}) == {test + number}\n" for test in range(tests // 20)]
        (root / f"test_part{number}.py").write_text("\n".join(lines))


def seconds(python: str, root: Path, *arguments: str, first: bool) -> float:
    """CPU seconds of one run, all its processes included, for the `first` time without a map; a run that fails ends the benchmark."""
    for name in FORGET if first else ():
        (root / name).unlink(missing_ok=True)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST", "SEATRIAL"))}
    # Nothing of this belongs into the user's history; bytecode is kept, as with any installed plugin.
    environment |= {"SEATRIAL_HISTORY": "off", "PYTHONDONTWRITEBYTECODE": ""}
    command = [python, "-m", "pytest", "-q", *arguments]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def compare(name: str, call: tuple[str, Path, int], plain: list[str], recording: list[str], *, first: bool) -> dict[str, float]:
    """Medians of alternating runs; one of each before them, for caches. `call`: the Python, the suite, how many rounds."""
    python, root, rounds = call
    seconds(python, root, *plain, first=first)
    seconds(python, root, *recording, first=first)
    pairs = [(seconds(python, root, *plain, first=first), seconds(python, root, *recording, first=first)) for _ in range(rounds)]
    without, having = (statistics.median(side) for side in zip(*pairs, strict=True))
    ratio = having / without
    spread = sorted(after / before for before, after in pairs)
    print(f"{name:16} {without:6.2f} s without  {having:6.2f} s recording  ratio {ratio:.3f}  (pairs {spread[0]:.3f} to {spread[-1]:.3f})")
    return {"without_s": round(without, 3), "recording_s": round(having, 3), "ratio": round(ratio, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tests", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--testmon", help="Python of an environment with pytest-testmon")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        write_suite(root, asked.tests)
        ours, record = (sys.executable, root, asked.rounds), [*OFF, "--seatrial-record"]
        found = {
            "seatrial_first": compare("seatrial, first", ours, OFF, record, first=True),
            "seatrial": compare("seatrial, again", ours, OFF, record, first=False),
        }
        if asked.testmon:
            found["testmon"] = compare("pytest-testmon", (asked.testmon, root, asked.rounds), [], ["--testmon"], first=True)
    print(json.dumps({"benchmark": "select_overhead", "tests": asked.tests, "rounds": asked.rounds, "bar": BAR, **found}))
    if found["seatrial"]["ratio"] >= BAR:
        sys.exit(f"recording costs {found['seatrial']['ratio']} times the plain run; the bar is {BAR}")


if __name__ == "__main__":
    main()
