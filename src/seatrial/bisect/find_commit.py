"""A bisect of one repository from Python: the plan is made as the command line makes it, run here, and its answer returned."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from seatrial.bisect import bisect_dir
from seatrial.bisect.bisect_records import BisectAnswer, BisectPlan, Repo
from seatrial.bisect.bisect_runner import read_histories, run_bisect
from seatrial.bisect.commit_history import resolve_commit, uncommitted
from seatrial.bisect.environment_cache import detect_environment
from seatrial.core.errors import UserError
from seatrial.evidence.git import top_level
from seatrial.evidence.redact import Redactor
from seatrial.metrics.checks import parse
from seatrial.trial.run_dir import now

METRIC_REPEAT = 10
"""Runs of one commit at most, when a metric is measured and nothing is said."""


@dataclass(frozen=True, slots=True)
class BisectResult:
    """What a bisect found, and where its journal, logs and reports are."""

    answer: BisectAnswer
    directory: Path

    @property
    def commit(self) -> str | None:
        """The commit that broke it; None when only a range was found."""
        return self.answer.suspects[0].commit if self.answer.state == "found" and self.answer.suspects else None


def _silent(_: str) -> None:
    """Nobody listens."""


def find_commit(
    command: Sequence[str],
    *,
    good: str,
    bad: str = "HEAD",
    repo: str | Path = ".",
    check: str | None = None,
    failure: str | None = None,
    any_failure: bool = False,
    env: str | None = None,
    jobs: int = 1,
    repeat: int | None = None,
    confidence: float = 0.99,
    minutes: float = 60.0,
    retries: int = 2,
    first_parent: bool = False,
    descend: bool = True,
    out: str | Path | None = None,
    tell: Callable[[str], None] = _silent,
) -> BisectResult:
    """Find the commit that broke a command, or moved a metric (`seatrial bisect`). Your checkout is never touched.

    With `check` the command leaves its metrics in the directory $SEATRIAL_OUTPUT. `tell` is called with lines on the progress.
    Interrupted, it raises a KeyboardInterrupt; `seatrial bisect resume` goes on.
    """
    if isinstance(command, str):
        raise UserError(f"bisect: the command {command!r} is one text", f"give it word by word: {shlex.split(command)}")
    if not command:
        raise UserError("no command to run", 'bisect(["pytest", "tests/test_x.py"], good=REV)')
    if check is not None:
        parse(check)
    if any_failure and failure is not None:
        raise UserError("--any-failure and --failure contradict each other", "give one of them")
    try:
        re.compile(failure or "")
    except re.error as error:
        raise UserError(
            f"--failure {failure!r} is not a regular expression: {error}", "correct it; special characters need a backslash"
        ) from error
    path = top_level(Path(repo))
    ends = resolve_commit(path, good, "--good"), resolve_commit(path, bad, "--bad")
    plan = BisectPlan(
        created=now(),
        repos=(Repo(name=path.name, path=str(path), good=ends[0], bad=ends[1]),),
        first_parent=first_parent,
        command=tuple(command),
        check=check,
        failure=failure,
        any_failure=any_failure,
        environment=detect_environment(path, ends[1], env),
        jobs=jobs,
        repeat=repeat or (METRIC_REPEAT if check else 1),
        confidence=confidence,
        minutes=minutes,
        retries=retries,
        descend=descend,
        notes=uncommitted(path),
    )
    redactor = Redactor(os.environ)
    words = [*command, *(text for text in (check, failure) if text)]
    if (shown := redactor.value(words)) != words:
        raise UserError(
            f"what is to be run holds a secret, which would be stored with the bisect: {shlex.join(shown)}",
            "export it, and let a shell put it in: sh -c 'exec COMMAND --token \"$TOKEN\"'",
        )
    read_histories(plan)  # what cannot work is refused before anything is written
    directory = bisect_dir.create_bisect(Path("bisects"), None if out is None else Path(out), plan)
    return BisectResult(run_bisect(directory, redactor, tell), directory)
