"""What the runs of an end say together."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import cast

import pytest

from seatrial.bisect import search_loop
from seatrial.bisect.bisect_records import BisectRun, Failure, Mark
from seatrial.bisect.bisect_session import BisectSession
from seatrial.bisect.judge_run import threshold
from seatrial.bisect.search_loop import side
from seatrial.core.errors import UserError
from tests.bisect.bisects import history


def row(mark: Mark, value: float | None = None, point: str = "p", exit_code: int = 0, failure: Failure | None = None) -> BisectRun:
    return BisectRun(
        number=1, stage="ends", round=0, point=point, commit="c", mark=mark, value=value, exit_code=exit_code, failure=failure, reason="why"
    )


@pytest.mark.parametrize(
    ("check", "mark"),
    [
        ('data["errors"]["1"] <= 0', Mark.GOOD),
        ('data["errors"]["1"] < 0', Mark.BAD),
        ('data["ok"]["1"] >= 0', Mark.GOOD),
        ('data["ok"]["1"] > 0', Mark.BAD),
    ],
)
@pytest.mark.parametrize("count", [1, 3])
def test_a_value_on_the_limit_has_the_mark_of_its_runs(check: str, mark: Mark, count: int) -> None:
    assert side([row(mark, 0.0)] * count, threshold(check)) is mark


@pytest.mark.parametrize(("check", "mark"), [('data["a"]["1"] <= 0', Mark.GOOD), ('data["a"]["1"] < 0', Mark.BAD)])
def test_runs_that_disagree_go_by_their_mean(check: str, mark: Mark) -> None:
    assert side([row(Mark.BAD, 1.0), row(Mark.GOOD, -1.0)], threshold(check)) is mark
    assert side([row(Mark.BAD, 3.0), row(Mark.GOOD, -1.0)], threshold(check)) is Mark.BAD


def test_without_a_limit_the_larger_number_counts() -> None:
    assert side([row(Mark.BAD), row(Mark.BAD), row(Mark.GOOD)], None) is Mark.BAD
    assert side([row(Mark.BAD), row(Mark.GOOD)], None) is Mark.GOOD


def session(rows: Sequence[BisectRun], tmp: str = "/nowhere") -> BisectSession:
    from pathlib import Path

    return cast(BisectSession, SimpleNamespace(evidence=lambda number: rows, directory=Path(tmp)))


def test_a_good_end_that_fails_with_passing_metrics_counts_only_if_the_bad_end_fails_so() -> None:
    good, bad = history(2).points
    missed = Failure(kind="check", missed=True, cause="the check is missed, and it ends with 1: x", exit_code=1)
    passing = row(Mark.GOOD, 0.0, good.id, exit_code=1)
    search_loop._refuse_failing_good(session([passing, row(Mark.BAD, 1.0, bad.id, 1, missed)]), good, bad, 0)
    clean = missed.model_copy(update={"exit_code": 0})
    with pytest.raises(UserError, match="cannot be judged"):
        search_loop._refuse_failing_good(session([passing, row(Mark.BAD, 1.0, bad.id, 0, clean)]), good, bad, 0)
