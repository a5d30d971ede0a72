"""Bisects over several repositories or submodules, through the command line, for tests.

What fails is a file called `broken` in any of the places that `check.sh` looks at, or `uses` in the first repository together with
`renamed` in the second, and with `third` in the third if `uses` asks for it. Every failure looks the same.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from seatrial.bisect import bisect_dir
from seatrial.bisect.bisect_records import BisectRun
from seatrial.bisect.bisect_report import BisectReport
from seatrial.core.files import read_model
from tests.bisect.repos import START, STEP, Commit, Entry, Script, build
from tests.cli.command import Answer, environ, inside

Changes = Mapping[int, Mapping[str, Entry]]
"""What some commits of a line do, by their places."""
CHECK = """#!/bin/sh
fail() { echo "AssertionError: the answer is wrong" >&2; exit 1; }
for tree in . lib lib/core other plugins/b "$SEATRIAL_TREE_B" "$SEATRIAL_TREE_C"; do
    if [ -n "$tree" ] && [ -e "$tree/broken" ]; then fail; fi
done
if [ -e needs-fix ] && [ ! -e lib/fix ]; then fail; fi
if [ -e uses ] && [ -e "$SEATRIAL_TREE_B/renamed" ]; then
    if [ "$(cat uses)" = two ] || [ -e "$SEATRIAL_TREE_C/third" ]; then fail; fi
fi
exit 0
"""


def line(count: int, changes: Changes | None = None, shift: int = 0, name: str = "") -> list[Commit]:
    """`count` commits a minute apart, the first at `shift` seconds; some of them make changes."""
    made = []
    for index in range(count):
        files: dict[str, Entry] = {"number.txt": f"{name}{index}\n", **(changes or {}).get(index, {})}
        made.append(Commit(files, subject=f"{name} commit {index}".strip(), time=START + STEP * index + shift))
    return made


def main_line(count: int, changes: Changes | None = None) -> list[Commit]:
    """The same for the repository where the command runs."""
    first: dict[str, Entry] = {"check.sh": Script(CHECK)}
    return line(count, {**(changes or {}), 0: {**first, **(changes or {}).get(0, {})}}, name="a")


@dataclass(frozen=True)
class Repository:
    """A checkout with its commits, oldest first."""

    path: Path
    ids: list[str]


def repository(path: Path, commits: list[Commit]) -> Repository:
    """Make it."""
    return Repository(path, build(path, commits))


@dataclass(frozen=True)
class Bisect:
    """A bisect directory, and what the last call said."""

    path: Path
    said: Answer

    @property
    def report(self) -> BisectReport:
        return read_model(self.path / "report.json", BisectReport)

    @property
    def rows(self) -> tuple[BisectRun, ...]:
        return bisect_dir.read_runs(self.path / "runs.jsonl").rows

    @property
    def headline(self) -> str:
        """The first line of summary.md."""
        return (self.path / "summary.md").read_text().splitlines()[0]

    @property
    def verdicts(self) -> dict[str, tuple[str, str | None]]:
        """Of each repository: the verdict, and the commit."""
        return {one.repo: (one.verdict, one.commit) for one in self.report.answer.standings}

    @property
    def found(self) -> str:
        """The first bad commit."""
        assert self.report.answer.state == "found", self.said
        return self.report.answer.suspects[0].commit

    def reproduced(self) -> tuple[int, str]:
        """What the commands of the report give, run as they stand. They add worktrees to the repositories, as they say."""
        settings = {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "protocol.file.allow", "GIT_CONFIG_VALUE_0": "always"}
        script = "set -e\n" + "\n".join(self.report.reproduce)
        done = subprocess.run(["bash", "-c", script], env=environ() | settings, capture_output=True, text=True, timeout=60, check=False)
        return done.returncode, done.stderr.splitlines()[-1] if done.stderr else ""

    def again(self, word: str) -> Bisect:
        """`resume` or `report`."""
        return Bisect(self.path, inside("bisect", word, self.path, cwd=self.path.parent))


def bisect(root: Path, repos: Mapping[str, Repository], *flags: str, command: tuple[str, ...] = ("sh", "check.sh")) -> Bisect:
    """Between the first and the last commit of every repository."""
    words = [
        word
        for name, repo in repos.items()
        for word in ("--repo", f"{name}={repo.path}", "--good", f"{name}={repo.ids[0]}", "--bad", f"{name}={repo.ids[-1]}")
    ]
    out = root / "bisect"
    return Bisect(out, inside("bisect", *words, "--jobs", "2", *flags, "--out", out, "--", *command, cwd=root))
