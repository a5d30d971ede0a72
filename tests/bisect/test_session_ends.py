"""What a sitting leaves behind when a preparation ends it."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest

from seatrial.bisect import bisect_session as sitting
from seatrial.bisect.bisect_session import BisectSession, Runner
from seatrial.bisect.step_preparer import BisectStep, PreparedStep, StepPreparer
from seatrial.core.errors import UserError
from seatrial.evidence.redact import Redactor
from tests.bisect.bisects import history
from tests.bisect.prepared import plan_of


class Burnt:
    """A preparer that makes one tree and then refuses."""

    def __init__(self) -> None:
        self.cleared: list[int] = []

    def prepare(self, step: BisectStep) -> PreparedStep:
        if step.number > 1:
            raise UserError("a clause of sed is wrong", "correct it")
        step.tree.mkdir(parents=True)
        return PreparedStep(step)

    again = prepare

    def clear(self, step: BisectStep) -> None:
        self.cleared.append(step.number)


def execute(root: Path, preparer: Burnt) -> None:
    session = BisectSession(root, plan_of("true", jobs=2), cast(StepPreparer, preparer), cast(Runner, None), Redactor({}), lambda _: None)
    with pytest.raises(UserError, match="a clause of sed"):
        session.execute([BisectStep(point, "search", 1) for point in history(2).points])


def test_trees_are_removed_when_a_preparation_raises(tmp_path: Path) -> None:
    preparer = Burnt()
    execute(tmp_path, preparer)
    assert preparer.cleared == [1, 2]


def test_the_tree_of_a_job_in_the_queue_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody has cancelled it yet."""
    monkeypatch.setattr(sitting, "is_queued", lambda directory: directory.name.startswith("0001"))
    preparer = Burnt()
    execute(tmp_path, preparer)
    assert preparer.cleared == [2]
