"""Plans and prepared steps for tests, without a repository: the tree of a step is an empty directory."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from seatrial.regress.bisect.environments.cache import Ready
from seatrial.regress.bisect.record import EnvironmentPlan, Pin, Plan, Point, Repo
from seatrial.regress.bisect.running.steps import Prepared, Step, prepare

GOOD, BAD = "a" * 40, "b" * 40


def plan_of(*command: str, **more: Any) -> Plan:
    """A plan that runs a command in the caller's own environment."""
    repo = Repo(name="main", path="/nowhere", good=GOOD, bad=BAD)
    return Plan(created="2026-11-16T00:00:00Z", repos=(repo,), command=command, environment=EnvironmentPlan(kind="none"), **more)


def step_of(root: Path, number: int = 1, subject: str = "Change it") -> Step:
    """A step in the bisect directory `root`, with its tree."""
    commit = f"{number:040x}"
    point = Point(repo="main", commit=commit, subject=subject, time=0, pins=(Pin(repo="main", commit=commit),), contents=commit)
    step = Step(number=number, point=point, stage="search", round=1, directory=root / "steps" / f"{number:04d}-{commit[:12]}")
    step.tree.mkdir(parents=True)
    return step


def ready_of(python: Path | None = None, **variables: str) -> Ready:
    """An environment that is there."""
    return Ready(python=python, variables=variables, key="", built=False)


def prepared_of(plan: Plan, root: Path, number: int = 1, base: Mapping[str, str] | None = None) -> Prepared:
    """A step that can be run."""
    return prepare(plan, step_of(root, number), ready_of(), os.environ if base is None else base)
