"""What a sitting leaves behind when a preparation ends it."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest

from seatrial.evidence.redact import Redactor
from seatrial.model.errors import UserError
from seatrial.regress.bisect.running import session as sitting
from seatrial.regress.bisect.running.prepare import Kitchen, Served
from seatrial.regress.bisect.running.session import Runner, Session, Wanted
from seatrial.regress.bisect.running.steps import Step

from .bisects import history
from .prepared import plan_of


class Burnt:
    """A kitchen that makes one tree and then refuses."""

    def __init__(self) -> None:
        self.cleared: list[int] = []

    def serve(self, step: Step) -> Served:
        if step.number > 1:
            raise UserError("a clause of sed is wrong", "correct it")
        step.tree.mkdir(parents=True)
        return Served(step=step, started="", began=0.0)

    again = serve

    def clear(self, step: Step) -> None:
        self.cleared.append(step.number)


def execute(root: Path, kitchen: Burnt) -> None:
    session = Session(root, plan_of("true", jobs=2), cast(Kitchen, kitchen), cast(Runner, None), Redactor({}), lambda _: None)
    with pytest.raises(UserError, match="a clause of sed"):
        session.execute([Wanted(point, "search", 1) for point in history(2).points])


def test_trees_are_removed_when_a_preparation_raises(tmp_path: Path) -> None:
    kitchen = Burnt()
    execute(tmp_path, kitchen)
    assert kitchen.cleared == [1, 2]


def test_the_tree_of_a_job_in_the_queue_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody has cancelled it yet."""
    monkeypatch.setattr(sitting, "is_queued", lambda directory: directory.name.startswith("0001"))
    kitchen = Burnt()
    execute(tmp_path, kitchen)
    assert kitchen.cleared == [2]
