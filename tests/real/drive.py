"""Driving the installed command as a user does: a subprocess, a run directory, an exit code.

- Nothing is imported from the loop; what a test knows it reads from the run directory.
- `GITHUB_*` is kept from the child: a test must not write into the summary of the job that runs it. So is `PYTHON*`:
  a caller who switches bytecode files off would hide that a trial leaves them in a checkout or in the evidence.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from seatrial.core.files import read_model, read_text
from seatrial.core.records import LevelResult, Trial
from seatrial.runtime.process_tree import MARKER

SEATRIAL = Path(sys.executable).with_name("seatrial")
PLAIN = ("--", "--max_steps", "8")
"""Level 0 as it is, but without its variants, which go without a user's own arguments: half of a trial's cost."""
MINUTES = 40
"""After which a call of the command is taken for hung: every level takes eight on two idle cores, and tests share them."""


def environ() -> dict[str, str]:
    """The caller's environment without what would make Seatrial report to GitHub, or Python behave in another way."""
    return {key: value for key, value in os.environ.items() if not key.startswith(("GITHUB_", "PYTHON"))}


@dataclass(frozen=True, slots=True)
class Ran:
    """A call of the command that made or finished a run directory."""

    code: int
    output: str
    """Standard output and error."""
    directory: Path

    @property
    def trial(self) -> Trial:
        """trial.json as it is now."""
        return read_model(self.directory / "trial.json", Trial)

    def level(self, number: int) -> LevelResult:
        """The stored result of one level."""
        return next(result for result in self.trial.levels if result.number == number)

    def place(self, number: int) -> Path:
        """The directory of one level."""
        return next(self.directory.glob(f"levels/{number}-*"))

    def log(self, number: int) -> str:
        """run.log of one level."""
        return read_text(self.place(number) / "run.log")


def call(where: Path, *words: str | Path) -> subprocess.CompletedProcess[str]:
    """Run `seatrial` in the directory `where`; standard error is part of the output."""
    return subprocess.run(
        [SEATRIAL, *words],
        cwd=where,
        env=environ(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60 * MINUTES,
        check=False,
    )


def run(where: Path, *words: str | Path, name: str = "run") -> Ran:
    """`seatrial run` into the directory `where/name`."""
    out = where / name
    done = call(where, "run", "--out", out, *words)
    return Ran(done.returncode, done.stdout, out)


def start(where: Path, *words: str | Path, name: str = "run") -> tuple[subprocess.Popen[bytes], Path]:
    """`seatrial run` in the background; its output goes to `where/name.out`."""
    out = where / name
    with (where / f"{name}.out").open("wb") as sink:
        process = subprocess.Popen([SEATRIAL, "run", "--out", out, *words], cwd=where, env=environ(), stdout=sink, stderr=sink)
    return process, out


def wait_for(what: str, happened: Callable[[], bool], seconds: float = 300) -> None:
    """Poll until something is so; fail with its name when it is not in time."""
    stops = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < stops, f"after {seconds:.0f} s still not: {what}"
        time.sleep(0.02)


def says(log: Path, text: str) -> bool:
    """Whether a log that may not be there yet holds the text."""
    return log.is_file() and text in read_text(log)


def processes_of(run_dir: Path) -> list[int]:
    """Every process on this machine that belongs to a level of this run directory, whoever its parent is."""
    found = []
    for process in psutil.process_iter():
        try:
            given = process.environ()
            # Trials of tests that run beside this one have the same name, but not the same place.
            mine = given.get(MARKER, "").startswith(f"{run_dir.name}-") and any(str(run_dir) in value for value in given.values())
            if mine and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except psutil.Error:
            continue  # it ended meanwhile, or belongs to somebody else
    return found


def hashes(directory: Path) -> dict[str, str]:
    """The content of every file below a directory."""
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
