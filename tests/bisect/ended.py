"""Runs of a bisect that have ended, for tests of what they say."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from seatrial.bisect.bisect_records import BisectPlan, EnvironmentPlan, Failure, Mark, Repo
from seatrial.bisect.judge_run import observe
from seatrial.bisect.step_preparer import Observation, RunFacts
from seatrial.runtime.process import Ended

DATA = Path(__file__).parents[1] / "data" / "bisect"
STARTED = 1_000_000.0
CHECK = 'data["loss"]["3"] < 1.0'


def plan(**more: Any) -> BisectPlan:
    repo = Repo(name="main", path="/r", good="a" * 40, bad="b" * 40)
    return BisectPlan(created="", repos=(repo,), command=("x",), environment=EnvironmentPlan(kind="none"), **more)


class Runs:
    """Runs that have ended, one after the other in the same directory."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for name in ("tree", "output", "trial"):
            (root / name).mkdir()

    def facts(self, code: int | None, log: str = "", ended: Ended = "exited", scheduler: str = "") -> RunFacts:
        file = self.root / "run.log"
        file.write_text(log, encoding="utf-8")
        places = {name: self.root / name for name in ("tree", "output", "trial")}
        return RunFacts(exit_code=code, ended=ended, log=file, started=STARTED, scheduler=scheduler, **places)

    def see(self, code: int | None, log: str = "", end: Failure | None = None, **more: Any) -> Observation:
        return observe(plan(**more), self.facts(code, log), end)

    def failure(self, code: int, log: str = "", **more: Any) -> Failure:
        """How the bad end fails that ends like this."""
        seen = self.see(code, log, **more)
        assert seen.mark is Mark.BAD, seen.reason
        assert seen.failure is not None
        return seen.failure

    def metrics(self, losses: list[float], place: str = "output", age: float = 0.0) -> None:
        file = self.root / place / "metrics.jsonl"
        rows = [json.dumps({"step": step, "loss": loss}) for step, loss in enumerate(losses, 1)]
        file.write_text("\n".join(rows) + "\n", encoding="utf-8")
        os.utime(file, (STARTED + 1 - age, STARTED + 1 - age))


def text(name: str) -> str:
    return (DATA / name).read_text(encoding="utf-8")


ASSERTION, LIMIT, TESTS = text("assertion.log"), text("hub_429.log"), text("pytest_assertion.log")
