"""A loop for tests: its processes are one small Python script, so that a whole trial takes a second.

`words` say what goes wrong in which level (see fake_process.py); everything else is as in a real loop: milestones in
the log, metrics.jsonl, imports.jsonl, proofs from facts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

from seatrial.core.loop import Context, Loop, Measures, Phase, SideTests, Vacuity
from seatrial.core.records import CheckResult, Cost, Finding
from seatrial.core.series import Metrics
from seatrial.core.specs import CheckSpec, Concern, Level, Milestone, Signals, Signature, Surface
from seatrial.core.verdict import Boundary, Verdict
from seatrial.instruments.facts import LoopFault
from tests.trial.fake_process import STEPS

PROCESS = Path(__file__).with_name("fake_process.py")
LEVELS = tuple(
    Level(
        number=number,
        name=name,
        title=f"Fake {name}",
        default=number < 2,
        required_when=(f"**/{name}*",),
        words=(f"word_{name}",),
        proves=f"{name} works",
        claims_not=("a fake",),
        steps=STEPS,
        deadline_minutes=2,
        stall_minutes=1,
        cost=Cost(minutes=0.1, disk_mb=1, memory_mb=1),
        checks=(CheckSpec(expr='max(data["train/loss"]) > 0', why="a loss"), CheckSpec(expr='len(data["train/loss"]) >= 3', why="rows")),
        skip="not part of this release" if name == "later" else None,
    )
    for number, name in enumerate(("smoke", "second", "third", "later"))
)


def vacuous(metrics: Metrics) -> Vacuity | None:
    rewards = metrics.series.get("train/reward")
    return Vacuity("vacuous: the reward never varied") if rewards and len(set(rewards.values)) == 1 else None


class FakeLoop(Loop):
    """See `seatrial.core.loop.Loop`."""

    name = "fake"
    title = "Fake"
    default_model = "tiny"
    folder = PROCESS.parent
    environment = "fake"
    measures = Measures(
        signals=Signals(loss=("train/loss",), grad_norm=("train/grad_norm",), rate=("train/lr",), reward=("train/reward",)), vacuous=vacuous
    )

    def __init__(
        self,
        words: Mapping[int, str] | None = None,
        finding: Finding | None = None,
        sides: Callable[[Context], tuple[SideTests, ...]] = lambda _: (),
    ) -> None:
        self.words, self.finding, self.sides = dict(words or {}), finding, sides

    def concerns(self) -> tuple[Concern, ...]:
        return ()

    def surfaces(self) -> tuple[Surface, ...]:
        return ()

    def levels(self) -> tuple[Level, ...]:
        return LEVELS

    def milestones(self) -> tuple[Milestone, ...]:
        return (
            Milestone(id="imports", pattern="^fake: imports", boundary=Boundary.CONFIG, verdict=Verdict.BLOCKED),
            Milestone(id="model", pattern="^fake: model", boundary=Boundary.PROVIDER),
            Milestone(id="step", pattern=r"^fake: step \d", boundary=Boundary.OPTIMIZER),
            Milestone(id="done", pattern="^fake: done", boundary=Boundary.CHECKPOINT),
        )

    def signatures(self) -> tuple[Signature, ...]:
        return ()

    def limitations(self, level: Level, context: Context) -> tuple[str, ...]:
        return ("made here",) if context.model == self.default_model else ()

    def phases(self, level: Level, context: Context, directory: Path) -> tuple[Phase, ...]:
        under_test = next((f"{repo.packages[0]}={repo.import_root}" for repo in context.changes if repo.packages), "")
        word = str(self.words.get(level.number, "fine"))
        argv = (str(context.python), str(PROCESS), str(directory / "run"), word, under_test, *context.arguments)
        return (Phase(name="run", argv=argv, env={"FAKE_LEVEL": str(level.number)}, steps=STEPS),)

    def side_tests(self, context: Context) -> tuple[SideTests, ...]:
        return self.sides(context)

    def findings(self, context: Context) -> tuple[Finding, ...]:
        return (self.finding,) if self.finding else ()

    def proofs(self, level: Level, directory: Path, metrics: Metrics) -> tuple[CheckResult, ...]:
        path = directory / "run" / "facts.jsonl"
        moved = json.loads(path.read_text())["moved"] if path.exists() else False
        return (CheckResult(name="weights changed", kind="proof", passed=moved, boundary=Boundary.OPTIMIZER),)

    def faults(self) -> dict[str, LoopFault]:
        return {"crash": LoopFault("raises", (0, 1))}
