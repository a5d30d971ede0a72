"""Plans and prepared steps for tests, without a repository: the tree of a step is an empty directory."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from seatrial.bisect.bisect_records import BisectPlan, EnvironmentPlan, Pin, Point, Repo
from seatrial.bisect.environment_cache import ReadyEnvironment
from seatrial.bisect.step_preparer import BisectStep, PreparedStep, write_step

GOOD, BAD = "a" * 40, "b" * 40


def plan_of(*command: str, **more: Any) -> BisectPlan:
    """A plan that runs a command in the caller's own environment."""
    repo = Repo(name="main", path="/nowhere", good=GOOD, bad=BAD)
    return BisectPlan(created="2026-11-16T00:00:00Z", repos=(repo,), command=command, environment=EnvironmentPlan(kind="none"), **more)


def step_of(root: Path, number: int = 1, subject: str = "Change it") -> BisectStep:
    """A step in the bisect directory `root`, with its tree."""
    commit = f"{number:040x}"
    point = Point(repo="main", commit=commit, subject=subject, time=0, pins=(Pin(repo="main", commit=commit),), contents=commit)
    step = BisectStep(number=number, point=point, stage="search", round=1, directory=root / "steps" / f"{number:04d}-{commit[:12]}")
    step.tree.mkdir(parents=True)
    return step


def ready_of(python: Path | None = None, **variables: str) -> ReadyEnvironment:
    """An environment that is there."""
    return ReadyEnvironment(python=python, variables=variables, key="", built=False)


def prepared_of(plan: BisectPlan, root: Path, number: int = 1, base: Mapping[str, str] | None = None) -> PreparedStep:
    """A step that can be run."""
    return write_step(plan, step_of(root, number), ready_of(), os.environ if base is None else base)
