"""kill -9 of a whole bisect at random points: resumed, it comes to the same answer, and nothing is lost, doubled or left behind.

- 10 points; with SEATRIAL_ALL_LEVELS=1 30, which takes two minutes.
- The command leaves a process in a session of its own behind, and notes in a ledger that it has ended; the ledger tells what was
  run again.
- A kill comes some time after the bisect has begun and so many rows are written: time alone would kill all of them early on a busy
  machine.
- Every fifth kill meets an empty cache and waits for no row, so that some land in the build of an environment. Every other one is
  cleaned before it is resumed, the others afterwards.
"""

from __future__ import annotations

import os
import random
import subprocess
import time
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pytest

from seatrial.bisect.bisect_dir import read_runs
from seatrial.bisect.bisect_records import BisectAnswer
from seatrial.bisect.bisect_report import BisectReport
from seatrial.core.files import read_model
from seatrial.runtime.environments import MARKER
from tests.bisect.driven import SEATRIAL
from tests.bisect.repos import Commit, Script, build, linear, populate, submodule
from tests.bisect.untouched import untouched
from tests.runtime.wheels import make_wheel

pytestmark = pytest.mark.slow

COMMITS, CULPRIT, KILLS = 9, 5, 15 if os.environ.get("SEATRIAL_ALL_LEVELS") else 5
"""Commits of the repository, the one that broke it, and the kills for each number of jobs."""
DEADLINE_S = 120.0
SOON_S = 20.0
CHECK = """#!/bin/sh
setsid sleep 600 > /dev/null 2>&1 &
python -c 'import fit' || exit 125
echo "$SEATRIAL_COMMIT" >> "$KILLS_LEDGER"
test "$(cat third/library/number.txt)" = 1 || exit 200
test "$(cat state)" = fine || { echo "AssertionError: it is broken"; exit 1; }
"""


@dataclass(frozen=True)
class Place:
    """Where one bisect is, and the repository that all of them share."""

    root: Path
    repo: Path
    ends: tuple[str, str]
    wheels: Path
    cache: Path
    jobs: int

    @property
    def out(self) -> Path:
        return self.root / "out"

    @property
    def ledger(self) -> Path:
        return self.root / "ledger"

    @property
    def environment(self) -> Mapping[str, str]:
        own = {"KILLS_LEDGER": str(self.ledger), "SEATRIAL_CACHE": str(self.cache), "PIP_NO_INDEX": "1"}
        return {**os.environ, **own, "PIP_FIND_LINKS": str(self.wheels), "PIP_CONFIG_FILE": "/dev/null", "PIP_NO_COMPILE": "1"}

    def start(self) -> subprocess.Popen[bytes]:
        words = ["--repo", str(self.repo), "--good", self.ends[0], "--bad", self.ends[1], "--jobs", str(self.jobs), "--out", str(self.out)]
        return self._start(*words, "--", "sh", "check.sh")

    def finish(self, *words: str) -> int:
        process = self._start(*words)
        try:
            return process.wait(DEADLINE_S)
        finally:
            process.kill()
            process.wait()

    def _start(self, *words: str) -> subprocess.Popen[bytes]:
        self.root.mkdir(exist_ok=True)
        with (self.root / "said").open("ab") as said:
            return subprocess.Popen([*SEATRIAL, *words], cwd=self.root, env=self.environment, stdout=said, stderr=said)

    def ended(self) -> Counter[str]:
        """How often the command came to its end, by commit."""
        return Counter(self.ledger.read_text(encoding="utf-8").split()) if self.ledger.exists() else Counter()

    def written(self) -> int:
        """How many rows there are; less than none before the bisect has begun."""
        rows = self.out / "runs.jsonl"
        return rows.read_bytes().count(b"\n") if rows.exists() else 0 if (self.out / "bisect.json").exists() else -1

    def answer(self) -> BisectAnswer:
        return read_model(self.out / "report.json", BisectReport).answer

    def left(self) -> list[str]:
        """What still runs of this bisect, without what ends by itself soon, such as a git whose Seatrial was killed."""
        stops = time.monotonic() + SOON_S
        while (found := self._processes()) and time.monotonic() < stops:
            time.sleep(0.1)
        return [f"left running: {words}" for words in found]

    def _processes(self) -> list[str]:
        """Everything that was started for a bisect carries the name of its ledger."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("KILLS_LEDGER") == str(self.ledger) and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(" ".join(process.cmdline()))
            except psutil.Error:
                continue
        return found


def repository(root: Path) -> tuple[Path, tuple[str, str]]:
    """A short history with a submodule and a lock."""
    library = build(root / "library", linear(2))
    first = {
        "check.sh": Script(CHECK),
        "state": "fine\n",
        "requirements.lock": "fit==1.0\n",
        **submodule("third/library", root / "library", library[1]),
    }
    commits = linear(COMMITS, first)
    commits[CULPRIT] = Commit({**commits[CULPRIT].files, "state": "broken\n"})
    ids = build(root / "repo", commits)
    populate(root / "repo")
    return root / "repo", (ids[0], ids[-1])


def killed(place: Place, rows: int, delay: float, attempt: int = 0) -> Place:
    """A bisect that was killed so long after so many rows; when it was over by then, another one that is given half of both."""
    one = replace(place, root=place.root.with_name(f"{place.root.name}.{attempt}"))
    process, stops = one.start(), time.monotonic() + DEADLINE_S
    while process.poll() is None and one.written() < rows and time.monotonic() < stops:
        time.sleep(0.01)
    try:
        process.wait(delay)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return one
    assert process.returncode == 0, (one.root / "said").read_text()
    return killed(place, rows // 2, delay / 2, attempt + 1)


def uninterrupted(place: Place) -> tuple[float, BisectAnswer]:
    """How long it takes when nobody kills it, and its answer."""
    began = time.monotonic()
    assert place.start().wait(DEADLINE_S) == 0, (place.root / "said").read_text()
    return time.monotonic() - began, place.answer()


def cleaned(one: Place) -> list[str]:
    """What `clean` leaves behind."""
    left = [] if one.finish("clean", str(one.out)) == 0 else [(one.root / "said").read_text()]
    left += [f"left: {path}" for pattern in ("stores", "steps/*/tree", "steps/*/beside") for path in one.out.glob(pattern)]
    return left + one.left()


def survive(place: Place, rows_first: int, delay: float, expected: BisectAnswer, *, clean_first: bool) -> tuple[str, int]:
    """Kill one, resume it, clean it: what was wrong, or nothing; and how many rows it had when it was killed."""
    one = killed(place, rows_first, delay)
    said = f"{one.root.name}, {one.jobs} jobs, killed {delay:.2f} s after {rows_first} rows: "
    before = read_runs(one.out / "runs.jsonl").rows
    ended = one.ended()
    problems = cleaned(one) if clean_first else []
    if one.finish("resume", str(one.out)) != 0:
        return said + (one.root / "said").read_text(), len(before)
    rows = read_runs(one.out / "runs.jsonl").rows
    if one.answer() != expected:
        problems.append(f"another answer: {one.answer()}")
    if rows[: len(before)] != before:
        problems.append("a row that was written is lost or changed")
    if [row.number for row in rows] != list(range(1, len(rows) + 1)) or max(Counter(row.point for row in rows).values()) > 1:
        problems.append(f"rows: {[(row.number, row.commit[:7]) for row in rows]}")
    if again := [row.commit[:7] for row in before if one.ended()[row.commit] != ended[row.commit]]:
        problems.append(f"run again although it had a row: {again}")
    problems += one.left()
    problems += [] if clean_first else cleaned(one)
    return (said + "; ".join(problems) if problems else ""), len(before)


def test_killed_anywhere(tmp_path: Path) -> None:
    repo, ends = repository(tmp_path)
    wheels = tmp_path / "wheels"
    make_wheel(wheels, "fit", "1.0")
    chance = random.Random(9)
    with untouched(repo), ThreadPoolExecutor(2) as pool:
        trials = []
        for jobs in (1, 2):
            cold = Place(tmp_path / f"cold-{jobs}", repo, ends, wheels, tmp_path / f"cache-{jobs}", jobs)
            warm = replace(cold, root=tmp_path / f"warm-{jobs}")
            (with_build, answer), (seconds, _) = uninterrupted(cold), uninterrupted(warm)
            for kill in range(KILLS):
                cache = cold.cache if kill % 5 else tmp_path / f"cache-{jobs}-{kill}"
                place = replace(cold, root=tmp_path / f"kill-{jobs}-{kill}", cache=cache)
                rows = kill * warm.written() // KILLS if kill % 5 else 0
                delay = chance.uniform(0, seconds / warm.written() if kill % 5 else with_build - seconds)
                trials.append(pool.submit(survive, place, rows, delay, answer, clean_first=kill % 2 == 0))
        done = [trial.result() for trial in trials]
    assert not any(wrong for wrong, _ in done), "\n".join(wrong for wrong, _ in done)
    # They were killed at different places.
    assert len({rows for _, rows in done}) > 2
    made = [path for path in tmp_path.glob("cache-*/bisect/pip-*") if path.is_dir()]
    assert made
    assert all((path / MARKER).exists() for path in made)
