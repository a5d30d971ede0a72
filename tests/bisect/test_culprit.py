"""Verdicts on repositories, with states that are looked up instead of run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import pytest

from seatrial.bisect.bisect_records import BisectAnswer, BisectPlan, BisectRun, History, Mark, Pin, Point, Repo, SkipKind, Suspect
from seatrial.bisect.bisect_session import BisectSession, MissingRun, Runner
from seatrial.bisect.culprit import check_other_repositories, try_state
from seatrial.bisect.step_preparer import BisectStep, StepPreparer
from seatrial.evidence.redact import Redactor
from tests.bisect.prepared import plan_of

GOOD, BAD, SKIP = Mark.GOOD, Mark.BAD, Mark.SKIP
World = Callable[[str], Mark]
"""From the commits of a state, such as `a1 b0 c2`, to what a run of it says."""
FOUND = "a1 b1 c1"
"""The first bad point; good ends are 0, bad ends 2."""


def named(pins: Sequence[Pin]) -> str:
    return " ".join(pin.commit for pin in pins)


@dataclass
class Staged(BisectSession):
    """A sitting whose runs are looked up."""

    world: World = field(default=lambda _: GOOD)
    ran: list[str] = field(default_factory=list)

    def execute(self, wanted: Sequence[BisectStep], useless: Callable[[Sequence[BisectStep]], set[int]] | None = None) -> list[BisectRun]:
        if self.frozen:
            raise MissingRun
        self.ran += [named(one.point.pins) for one in wanted]
        marks = [(one, self.world(named(one.point.pins))) for one in wanted]
        about = {"number": 1, "stage": "conviction", "round": 0, "point": "p", "commit": "c"}
        return [self.note(one, BisectRun.model_validate(about | {"mark": mark}), "") for one, mark in marks]


def plan(**more: int) -> BisectPlan:
    repos = tuple(Repo(name=name, path=f"/{name}", good=f"{name}0", bad=f"{name}2", place="." if name == "a" else name) for name in "abc")
    return plan_of("true", **more).model_copy(update={"repos": repos})


def staged(root: Path, world: World, **more: int) -> Staged:
    return Staged(root, plan(**more), cast(StepPreparer, None), cast(Runner, None), Redactor({}), lambda _: None, world=world)


def state(text: str) -> tuple[Pin, ...]:
    return tuple(Pin(repo=commit[0], commit=commit, place="." if commit[0] == "a" else commit[0]) for commit in text.split())


def bad_when(*states: str, skips: Sequence[str] = ()) -> World:
    """Bad are the states that hold all commits of one of these, or newer ones."""

    def look(text: str) -> Mark:
        have = {word[0]: word[1] for word in text.split()}
        if text in skips:
            return SKIP
        return BAD if any(all(have[word[0]] >= word[1] for word in one.split()) for one in states) else GOOD

    return look


def judged(session: BisectSession, suspects: str = "a") -> dict[str, str]:
    point = Point(repo="a", commit="a1", subject="", time=0, pins=state(FOUND), contents="")
    found = BisectAnswer(
        state="found" if len(suspects) == 1 else "range",
        suspects=tuple(Suspect(point=point.id, repo=name, commit=f"{name}1", subject="", probability=1.0) for name in suspects),
        first_bad=point.id,
    )
    return {one.repo: one.verdict for one in check_other_repositories(session, History((point,)), found).standings}


@pytest.mark.parametrize(
    ("world", "verdicts"),
    [
        (bad_when("a1"), "convicted acquitted acquitted"),
        (bad_when("a1", "c2"), "convicted acquitted convicted"),
        (bad_when("a1 b1"), "accomplice accomplice acquitted"),
        (bad_when("a1 b1", "a1 c1"), "accomplice accomplice accomplice"),
        # What another one brought later is not why it failed then.
        (bad_when("a1 b1", "a1 c2"), "accomplice accomplice acquitted"),
        (bad_when("a1 b1 c1"), "accomplice unknown unknown"),
        (bad_when("a1 b1 c1", "b2"), "accomplice convicted unknown"),
        # What could not be tested convicts and acquits nobody.
        (bad_when("a1", skips=["a1 b0 c0"]), "unknown unknown unknown"),
        (bad_when("a1", skips=["a0 b2 c0"]), "convicted unknown acquitted"),
        (bad_when("a1 b1", skips=["a1 b1 c0"]), "accomplice unknown unknown"),
        (bad_when("a1", "c2", skips=["a1 b0 c0"]), "unknown unknown convicted"),
    ],
)
def test_verdicts(tmp_path: Path, world: World, verdicts: str) -> None:
    session = staged(tmp_path, world)
    assert list(judged(session).values()) == verdicts.split()
    # From the journal alone: the same, and nothing is run.
    session.frozen = True
    assert list(judged(session).values()) == verdicts.split()
    assert len(session.ran) == len(set(session.ran))


def test_suspects_of_several_repositories_convict_none(tmp_path: Path) -> None:
    session = staged(tmp_path, bad_when("a1"))
    assert set(judged(session, "ab").values()) == {"unknown"}
    assert session.ran == []


def test_nothing_is_run_where_only_the_journal_counts(tmp_path: Path) -> None:
    session = staged(tmp_path, bad_when("a1"))
    session.frozen = True
    with pytest.raises(MissingRun):
        judged(session)


def test_with_noise_a_state_is_run_several_times(tmp_path: Path) -> None:
    marks = iter([BAD, GOOD, BAD])
    session = staged(tmp_path, lambda _: next(marks), repeat=9, jobs=2)
    assert try_state(session, state("a1 b0 c0"), "a", "a alone") is BAD
    assert len(session.ran) == 3


def test_what_the_machine_failed_in_an_earlier_sitting_is_tried_again(tmp_path: Path) -> None:
    session = staged(tmp_path, bad_when("a1"))
    lost = BisectRun(number=1, stage="conviction", round=0, point="", commit="a1", mark=SKIP, skip=SkipKind.ENVIRONMENT)
    point = Point(repo="a", commit="a1", subject="", time=0, pins=state("a1 b0 c0"), contents="")
    session.rows.append(lost.model_copy(update={"point": point.id}))
    assert try_state(session, point.pins, "a", "a alone") is None
    session.before = 1
    assert try_state(session, point.pins, "a", "a alone") is BAD
