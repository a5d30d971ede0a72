"""`seatrial bisect` against plain `git bisect run` that builds a venv at every step, on the same repository; and the bar of 20 seeds.

    python bench/bisect_git.py [--seeds 20] [--seed 0] [--jobs 2]

The repository is that of tests/bisect/big.py: 500 commits, two submodules, five locks, 12 % that cannot be built. The script for git
is what an engineer would write. It runs in a clone, and begins without environments, as Seatrial does. Seatrial also runs both ends,
which git takes on trust. Right means: exactly the smallest range that testing can give. The seeds share one cache of environments, and
run one commit at a time, which needs most rounds.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.bisect.big import Big, big_repository
from tests.bisect.driven import Driven, drive

DEADLINE_S = 1800.0
STEP = """#!/bin/sh
git -c protocol.file.allow=always submodule --quiet update --init --recursive || exit 125
rm -rf .venv
{python} -m venv .venv || exit 125
.venv/bin/python -m pip install --quiet --disable-pip-version-check -r requirements.lock || exit 125
sh build.sh || exit 125
exec .venv/bin/python check.py
"""


@dataclass(frozen=True)
class Plain:
    """What `git bisect run` came to."""

    right: bool
    steps: int
    seconds: float


def plain(big: Big, root: Path) -> Plain:
    """`git bisect run` in a clone, a new venv at each step."""
    clone, script = root / "clone", root / "step.sh"
    script.write_text(STEP.format(python=shlex.quote(sys.executable)), encoding="utf-8")
    environment = {**os.environ, **big.variables}
    _git(root, environment, "clone", "--quiet", str(big.path), str(clone))
    began = time.monotonic()
    _git(clone, environment, "bisect", "start", big.bad, big.good)
    # It exits with 2 when only commits are left that cannot be tested; what it found is in the log.
    _git(clone, environment, "bisect", "run", "sh", str(script), ok=(0, 2))
    seconds = time.monotonic() - began
    log = _git(clone, environment, "bisect", "log")
    found = re.findall(r"^# (?:possible )?first bad commit: \[(\w+)\]", log, re.MULTILINE)
    marks = re.findall(r"^git bisect (?:good|bad|skip) ", log, re.MULTILINE)
    return Plain(set(found) == {big.ids[index] for index in big.suspects}, len(marks), seconds)


def _git(place: Path, environment: Mapping[str, str], *words: str, ok: tuple[int, ...] = (0,)) -> str:
    done = subprocess.run(
        ["git", *words],
        cwd=place,
        env=environment,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    if done.returncode not in ok:
        raise SystemExit(f"git {' '.join(words)} failed with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout


def compare(root: Path, seed: int, jobs: int) -> bool:
    """Both on the same repository: Seatrial before git and after it, each time without environments; the slower of the two counts."""
    big = big_repository(root, seed)
    before = drive(big, root / "out-1", root / "cache-1", jobs)
    theirs = plain(big, root)
    after = drive(big, root / "out-2", root / "cache-2", jobs)
    ours, load = max(before, after, key=lambda one: one.seconds), os.getloadavg()[0]
    print(f"bisect, 500 commits, seed {seed}: seatrial --jobs {jobs}: {before.seconds:.1f} s, after git {after.seconds:.1f} s;")
    print(f"  {len(ours.rows)} runs in {ours.rounds} rounds, {sum(ours.built.values())} environments built; {_said(ours.right)}")
    print(f"git bisect run + venv per step: {theirs.seconds:.1f} s, {theirs.steps} steps, a venv in each; {_said(theirs.right)}")
    print(f"ratio: {theirs.seconds / ours.seconds:.1f} in seconds (aim: 4); load of the machine {load:.1f}")
    return before.right and after.right


def sweep(root: Path, seeds: int) -> bool:
    """The bar: right answers, rounds, builds."""
    done: list[Driven] = []
    for seed in range(seeds):
        place = root / str(seed)
        done.append(drive(big_repository(place, seed), place / "out", root / "cache", jobs=1))
    right = sum(one.right for one in done)
    built = sum((one.built for one in done), Counter[str]())
    again = max(max(one.builds.values(), default=0) for one in done)
    kept = all(one.rounds <= one.allowed for one in done)
    fresh = [row.seconds for one in done for row in one.rows if not row.built and row.mark != "skip"]
    most = max(one.rounds for one in done)
    print(f"bisect, {seeds} seeds, one job: right {right} of {seeds}; rounds at most {most} (bar: {done[0].allowed})")
    print(f"  runs {sum(len(one.rows) for one in done) / seeds:.1f} on average, {sum(one.skips for one in done) / seeds:.1f} of them skips")
    print(f"  environments: {len(built)} locks, {sum(built.values())} builds; one lock was begun at most {again} time in a bisect (bar: 1)")
    print(f"  a run whose environment was there took {sum(fresh) / len(fresh):.2f} s on average, the command and its build included")
    return right == seeds and kept and again <= 1 and set(built.values()) <= {1}


def _said(right: bool) -> str:
    return "right answer" if right else "WRONG answer"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20, help="repositories for the bar; 0 leaves it out")
    parser.add_argument("--seed", type=int, default=0, help="the repository for the comparison")
    parser.add_argument("--jobs", type=int, default=2, help="commits at once, in the comparison")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="seatrial-bench-") as folder:
        root = Path(folder)
        fine = compare(root / "compare", asked.seed, asked.jobs)
        if asked.seeds:
            fine = sweep(root, asked.seeds) and fine
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
