"""`seatrial bisect` as a process of its own on a generated repository, and what it came to. For tests and for bench/bisect_git.py."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from seatrial.bisect.bisect_records import BisectRun, Mark
from seatrial.bisect.bisect_report import BisectReport
from seatrial.core.files import read_model
from tests.bisect.big import BUILD, COMMAND, Big

SEATRIAL = (sys.executable, "-P", "-m", "seatrial.cli.main", "bisect")
DEADLINE_S = 600.0
_CREATING = re.compile(r"environment: \S+ (\w+): creating")


@dataclass(frozen=True)
class Driven:
    """One bisect of a `Big`, from its start to its end."""

    right: bool
    """Whether it names the smallest range that testing can give, no more and no less."""
    rounds: int
    allowed: int
    """ceil(log2 n) + 3, n the number of commits that may be the first bad one."""
    rows: tuple[BisectRun, ...]
    builds: Counter[str]
    """How often the environment of each lock was begun to be built, as it was told while it ran; failed builds included."""
    seconds: float
    said: str

    @property
    def built(self) -> Counter[str]:
        """How often each environment was built, by the rows."""
        return Counter(row.environment for row in self.rows if row.built)

    @property
    def skips(self) -> int:
        """Runs that could not judge their commit."""
        return sum(row.mark is Mark.SKIP for row in self.rows)


def drive(big: Big, out: Path, cache: Path, jobs: int) -> Driven:
    """Bisect it; `out` is the directory of the bisect, `cache` that of the environments."""
    words = ["--repo", str(big.path), "--good", big.good, "--bad", big.bad, "--build", " ".join(BUILD), "--jobs", str(jobs)]
    began = time.monotonic()
    done = subprocess.run(
        [*SEATRIAL, *words, "--out", str(out), "--", *COMMAND],
        env={**os.environ, **big.variables, "SEATRIAL_CACHE": str(cache)},
        cwd=out.parent,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    seconds = time.monotonic() - began
    expected = 0 if len(big.suspects) == 1 else 99
    assert done.returncode == expected, done.stderr
    report = read_model(out / "report.json", BisectReport)
    named = {suspect.commit for suspect in report.answer.suspects}
    return Driven(
        right=named == {big.ids[index] for index in big.suspects},
        rounds=max(row.round for row in report.runs),
        allowed=math.ceil(math.log2(report.commits)) + 3,
        rows=report.runs,
        builds=Counter(_CREATING.findall(done.stderr)),
        seconds=seconds,
        said=done.stderr,
    )
