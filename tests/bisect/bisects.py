"""Plans, histories, rows and answers for tests of what a bisect writes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from seatrial.bisect.bisect_records import (
    BisectAnswer,
    BisectPlan,
    BisectRun,
    EnvironmentPlan,
    Failure,
    History,
    Mark,
    Pin,
    Point,
    Repo,
    SkipKind,
    Suspect,
)
from seatrial.bisect.bisect_view import BisectView

PLAN = BisectPlan(
    created="2025-01-01T00:00:00Z",
    repos=(Repo(name="loop", path="/src/loop", good="0" * 40, bad="9" * 40),),
    command=("bash", "tests/nightly.sh", "--seed", "{commit}"),
    environment=EnvironmentPlan(kind="pip", lock="requirements.lock"),
)
TWO = PLAN.model_copy(
    update={"repos": (*PLAN.repos, Repo(name="bridge", path="/src/bridge", good="a" * 40, bad="b" * 40, place="third/bridge"))}
)


def sha(index: int) -> str:
    """A hash that a reader of a failed test can tell from others."""
    return f"{index:04d}" + "c" * 36


def history(count: int, commits: Sequence[str] = (), subject: str = "commit {}", repos: int = 1) -> History:
    """Points in a row."""
    points = []
    for index in range(count):
        commit = commits[index] if commits else sha(index)
        pins = (Pin(repo="loop", commit=commit), Pin(repo="bridge", commit="b" * 40, place="third/bridge"))[:repos]
        parents = (index - 1,) if index else ()
        points.append(
            Point(repo="loop", commit=commit, subject=subject.format(index), time=index, parents=parents, pins=pins, contents=f"t{index}")
        )
    return History(tuple(points))


def run(past: History, number: int, index: int, mark: Mark, **more: Any) -> BisectRun:
    """A row of a point."""
    if mark is Mark.SKIP:
        more.setdefault("skip", SkipKind.BUILD)
    if mark is Mark.BAD:
        more.setdefault("failure", Failure(kind="exit", cause="AssertionError", exit_code=1))
    point = past.points[index]
    base: dict[str, Any] = {"stage": "search", "round": number, "seconds": 2.0, "directory": f"steps/{number:04d}-{point.commit[:12]}"}
    return BisectRun(number=number, point=point.id, commit=point.commit, mark=mark, **(base | more))


def runs(past: History, *marks: tuple[int, Mark] | tuple[int, Mark, float]) -> tuple[BisectRun, ...]:
    """Rows in a row, each with a value if it is given one."""
    made = []
    for number, (index, mark, *value) in enumerate(marks, start=1):
        more = {"value": value[0], "passed": mark is Mark.GOOD} if value else {}
        made.append(run(past, number, index, mark, **more))
    return tuple(made)


def answer(past: History, *suspects: int, **more: Any) -> BisectAnswer:
    """One commit, or a range of them."""
    found = tuple(
        Suspect(
            point=past.points[index].id,
            repo="loop",
            commit=past.points[index].commit,
            subject=past.points[index].subject,
            probability=1 / len(suspects),
        )
        for index in suspects
    )
    base: dict[str, Any] = {"state": "found" if len(suspects) == 1 else "range", "suspects": found, "confidence": 1.0}
    if suspects:
        base |= {"last_good": past.points[min(suspects) - 1].id, "first_bad": past.points[max(suspects)].id}
    return BisectAnswer(**(base | more))


def view(past: History, rows: Sequence[BisectRun], found: BisectAnswer, plan: BisectPlan = PLAN) -> BisectView:
    """What the reports are made of."""
    return BisectView(Path("/work/bisects/one"), plan, past, tuple(rows), found, 0.5 if plan.check else None)
