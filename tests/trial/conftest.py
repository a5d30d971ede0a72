"""Trials of the fake loop, in this process; and small git repositories as changes."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from seatrial.core.loop import Context, SideTests
from seatrial.core.records import Baseline, Finding, LevelResult, Plan, RepoState, Trial
from seatrial.evidence.repos import repo_states
from seatrial.runtime import process
from seatrial.trial import runner
from seatrial.trial.level import Limits
from seatrial.trial.plan import make_plan, requested
from seatrial.trial.progress import Event
from seatrial.trial.staging import environment_record
from seatrial.trial.trial_request import checkouts
from tests.runtime.children import wait_until
from tests.trial.fake import FakeLoop


def git(repo: Path, *arguments: str) -> str:
    """Run git for a test."""
    settings = ("user.name=T", "user.email=t@example.org", "protocol.file.allow=always", "init.defaultBranch=main")
    words = [word for setting in settings for word in ("-c", setting)]
    done = subprocess.run(["git", *words, "-C", os.fspath(repo), *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def commit(repo: Path, files: Mapping[str, str]) -> str:
    """Write files and commit everything."""
    for name, content in files.items():
        (repo / name).parent.mkdir(parents=True, exist_ok=True)
        (repo / name).write_text(content, encoding="utf-8")
    git(repo, "add", "-A")
    git(repo, "commit", "-q", "--allow-empty", "-m", "change")
    return git(repo, "rev-parse", "HEAD")


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    """A checkout with a package, in a directory with a space and a letter beyond ASCII."""
    root = tmp_path / "my checkout ü"
    root.mkdir()
    git(root, "init", "-q")
    commit(root, {"pkg/__init__.py": "", "pkg/smoke.py": "a = 1\n", ".gitignore": "ignored\n"})
    return root


asked_once = functools.cache(environment_record)


@dataclass
class Bench:
    """Runs trials of the fake loop in one run directory."""

    out: Path
    monkeypatch: pytest.MonkeyPatch
    words: dict[int, str] = field(default_factory=dict)
    finding: Finding | None = None
    python: Path = Path(sys.executable)
    arguments: tuple[str, ...] = ()
    limits: Limits = field(default_factory=Limits)
    changes: tuple[Path, ...] = ()
    base: str | None = None
    """The base of the changes, where it is known."""
    sides: Callable[[Context], tuple[SideTests, ...]] = lambda _: ()
    baseline: Baseline | None = None
    events: list[Event] = field(default_factory=list)
    meddle: Callable[[Event], None] | None = None
    """Called with every event: what the world does meanwhile."""

    def _listen(self, event: Event) -> None:
        self.events.append(event)
        if self.meddle:
            self.meddle(event)

    def _loop(self, _: Plan) -> FakeLoop:
        return FakeLoop(self.words, self.finding, self.sides)

    def request(self, *levels: int) -> runner.Request:
        self.monkeypatch.setattr(runner, "loop_of", self._loop)
        loop = FakeLoop(self.words)
        plan = make_plan(loop, requested(loop, levels), None, self._states(), arguments=self.arguments)
        config = {"run.arguments": {"value": list(self.arguments)}}
        return runner.Request(plan, self.out, self.python, self.limits, config=config, baseline=self.baseline)

    def _states(self) -> tuple[RepoState, ...]:
        if self.base is None:
            return repo_states(self.changes)
        return checkouts([str(path) for path in self.changes], self.base)[0]

    def start(self, *levels: int) -> Trial:
        return runner.start(self.request(*levels), self._listen)

    def resume(self) -> Trial:
        self.monkeypatch.setattr(runner, "loop_of", self._loop)
        return runner.resume(self.out, self._listen)

    def patient(self, started: Callable[[], bool]) -> None:
        """From now on a process counts as started when this is true: a short deadline does not pass before that."""
        start = process._start

        def waits(spec: process.ProcessSpec) -> subprocess.Popen[bytes]:
            child = start(spec)
            wait_until(started, "the process has started")
            return child

        self.monkeypatch.setattr(process, "_start", waits)

    def level(self, number: int) -> Path:
        return next(self.out.glob(f"levels/{number}-*"))


def result(trial: Trial, number: int) -> LevelResult:
    return next(level for level in trial.levels if level.number == number)


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """A bench that saves the time that no test here is about: ticks, syncs, and asking this interpreter for its packages."""
    monkeypatch.setattr("seatrial.runtime.process._TICK_S", 0.05)
    monkeypatch.setattr(os, "fsync", lambda _: None)
    monkeypatch.setattr(runner, "environment_record", asked_once)
    out = tmp_path / "run"
    out.mkdir()
    return Bench(out, monkeypatch)
