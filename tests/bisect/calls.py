"""`seatrial bisect` called as a user does, on small repositories, with what it answered and what it left behind."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from seatrial.bisect import bisect_dir
from seatrial.bisect.bisect_records import BisectRun, SkipKind
from tests.bisect.repos import Commit, Entry, build, linear
from tests.cli.command import SEATRIAL, environ, inside

DEADLINE_S = 120.0
CHECK = "number = int(open('number.txt').read())\nassert number < {first}, 'the loss is not finite'\n"
"""Python that is bad from commit `first` on."""


@dataclass(frozen=True)
class Bisected:
    """A call that has ended."""

    ids: list[str]
    code: int
    out: str
    err: str
    directory: Path

    @property
    def rows(self) -> tuple[BisectRun, ...]:
        """The journal."""
        return bisect_dir.read_runs(self.directory / "runs.jsonl").rows

    @property
    def marks(self) -> dict[int, str]:
        """The last mark of each commit, by its place in the history."""
        return {self.ids.index(row.commit): row.mark.value for row in self.rows}

    def row(self, index: int) -> BisectRun:
        """The last row of a commit."""
        return [row for row in self.rows if row.commit == self.ids[index]][-1]

    def skips(self) -> dict[int, SkipKind | None]:
        """The commits that were skipped, and why."""
        return {self.ids.index(row.commit): row.skip for row in self.rows if row.mark == "skip"}

    @property
    def report(self) -> dict[str, Any]:
        """report.json."""
        found: dict[str, Any] = json.loads((self.directory / "report.json").read_text(encoding="utf-8"))
        return found

    @property
    def suspects(self) -> list[int]:
        """The places of those that may be the first bad one, in order."""
        return sorted(self.ids.index(suspect["commit"]) for suspect in self.report["answer"]["suspects"])

    @property
    def summary(self) -> str:
        """summary.md."""
        return (self.directory / "summary.md").read_text(encoding="utf-8")

    def found(self, index: int) -> bool:
        """Whether exactly this commit is the answer, everywhere where it is given."""
        assert self.code == 0, f"{self.code}: {self.out}{self.err}"
        commit = self.ids[index]
        first, log = self.summary.splitlines()[0], (self.directory / "bisect.log").read_text(encoding="utf-8")
        named = commit[:12] in first and f"# first bad commit: [{commit}]" in log
        return named and commit[:12] in (self.directory / "report.html").read_text(encoding="utf-8") and self.suspects == [index]


class Place:
    """A repository, and bisects of it."""

    def __init__(self, root: Path, commits: Iterable[Commit]) -> None:
        self.root, self.repo = root, root / "the löop"
        self.ids = build(self.repo, list(commits))

    def words(self, *words: str | Path, command: tuple[str, ...] = ("python", "check.py"), out: str = "out") -> list[str]:
        """From the first commit to the last."""
        return [str(SEATRIAL), "bisect", "--good", self.ids[0], "--out", str(self.root / out), *map(str, words), "--", *command]

    def bisect(self, *words: str | Path, command: tuple[str, ...] = ("python", "check.py"), out: str = "out", **variables: str) -> Bisected:
        """`seatrial bisect --good FIRST --out OUT WORDS -- COMMAND` in the checkout."""
        return self.call(self.words(*words, command=command, out=out), out, variables)

    def go_on(self, verb: str = "resume", out: str = "out", **variables: str) -> Bisected:
        """`seatrial bisect VERB OUT`."""
        return self.call([str(SEATRIAL), "bisect", verb, str(self.root / out)], out, variables)

    def call(self, words: list[str], out: str, variables: Mapping[str, str]) -> Bisected:
        """Any call; in this process, where only what it says and leaves matters."""
        done = inside(*words[1:], cwd=self.repo, **variables)
        return Bisected(self.ids, done.code, done.out, done.err, self.root / out)

    def start(self, words: list[str], **variables: str) -> subprocess.Popen[bytes]:
        """A call in the background; what it says goes nowhere."""
        null = subprocess.DEVNULL
        return subprocess.Popen(words, cwd=self.repo, env=environ(**variables), stdin=null, stdout=null, stderr=null)


def numbers(count: int, check: str, **more: Mapping[str, Entry]) -> list[Commit]:
    """Commits in a row whose `number.txt` counts, with the program `check.py`; `at_3={...}` are further changes of commit 3."""
    commits = linear(count, {"check.py": check})
    for name, files in more.items():
        index = int(name.removeprefix("at_"))
        commits[index] = Commit({**commits[index].files, **files})
    return commits


def wait_for(what: str, happened: Callable[[], bool]) -> None:
    """Poll until something is so."""
    stops = time.monotonic() + DEADLINE_S
    while not happened():
        assert time.monotonic() < stops, f"after {DEADLINE_S:.0f} s still not: {what}"
        time.sleep(0.02)
