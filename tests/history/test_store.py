"""The store keeps runs whole and once, and reads what it was given."""

from __future__ import annotations

import math
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from seatrial.core.errors import UserError
from seatrial.history.store import Kind, Point, Store, point
from tests.history.histories import filled, points, run


def test_values_come_back_by_time_with_the_latest_last(tmp_path: Path) -> None:
    with Store(tmp_path / "h", write=True) as store:
        for number in (3, 1, 2):
            assert store.add(run(number), [point("loss", number)])
        assert [one.value for one in store.values("loss")] == [1, 2, 3]
        assert [one.value for one in store.values("loss", limit=2)] == [2, 3]


def test_a_run_of_the_same_digest_is_kept_once(tmp_path: Path) -> None:
    with Store(tmp_path / "h", write=True) as store:
        assert store.add(run(1), [point("loss", 1)])
        assert not store.add(run(1), [point("loss", 2)])
        assert [one.value for one in store.values("loss")] == [1]


def test_a_run_that_went_on_takes_the_place_of_its_earlier_import_and_keeps_the_mark(tmp_path: Path) -> None:
    with Store(tmp_path / "h", write=True) as store:
        store.add(run(1, source="/trial"), points("loss", 1, 2), again=True)
        store.mark(1, "throttled")
        assert store.add(run(1, source="/trial", digest="later"), points("loss", 1, 2, 3), again=True)
        (only,) = store.values("loss")
        assert (only.value, only.count, only.run.poisoned) == (3, 3, "throttled")


@pytest.mark.parametrize(("take", "value"), [("first", 4), ("last", 2), ("mean", 3), ("min", 2), ("max", 4), ("count", 3)])
def test_every_way_to_take_one_value(tmp_path: Path, take: str, value: float) -> None:
    with Store(tmp_path / "h", write=True) as store:
        store.add(run(1), points("loss", 4, 3, 2))
        assert [one.value for one in store.values("loss", take=take)] == [value]  # type: ignore[arg-type]


def test_first_and_last_go_by_step_and_points_keep_their_order(tmp_path: Path) -> None:
    with Store(tmp_path / "h", write=True) as store:
        store.add(run(1), [point("loss", 9, 2), point("loss", 5, 1)])
        assert store.values("loss")[0].value == 9
        assert [one.step for one in store.points(1, "loss")] == [2, 1]


def test_a_finite_last_point_does_not_hide_a_nan_before_it(tmp_path: Path) -> None:
    with Store(tmp_path / "h", write=True) as store:
        store.add(run(1), points("loss", 1, math.nan, 3))
        (last,), (mean,) = store.values("loss"), store.values("loss", take="mean")
        assert (last.value, last.mark) == (3, "nan")
        assert (mean.value, mean.mark) == (None, "nan")


@pytest.mark.parametrize(
    ("value", "mark"), [(math.nan, "nan"), (math.inf, "inf"), (-math.inf, "-inf"), ("NaN", "nan"), (None, "null"), ("words", "text")]
)
def test_what_is_no_finite_number_is_kept_with_its_mark(tmp_path: Path, value: object, mark: str) -> None:
    with Store(tmp_path / "h", write=True) as store:
        store.add(run(1), [point("loss", value)])
        (only,) = store.values("loss")
        assert (only.value, only.mark, only.count) == (None, mark, 1)
        assert [(one.step, one.value, one.mark) for one in store.points(1, "loss")] == [(None, None, mark)]


def test_the_same_step_twice_is_kept_twice(tmp_path: Path) -> None:
    with Store(tmp_path / "h", write=True) as store:
        store.add(run(1), [point("loss", 1, 5), point("loss", 2, 5)])
        assert [(one.step, one.value) for one in store.points(1, "loss")] == [(5, 1), (5, 2)]


def test_baselines_are_trusted_and_not_marked(tmp_path: Path) -> None:
    with filled(tmp_path / "h", 3) as store:
        store.add(run(7, trusted=False, why_untrusted="branch"), [point("loss", 7)])
        assert store.mark(2, "throttled")
        assert [one.value for one in store.values("loss", trusted=True)] == [0, 2]
        assert store.mark(2, "")
        assert [one.value for one in store.values("loss", trusted=True)] == [0, 1, 2]
        assert not store.mark(99, "nobody")


def test_runs_of_another_kind_name_machine_and_project_are_told_apart(tmp_path: Path) -> None:
    with filled(tmp_path / "h", 1) as store:
        others: list[dict[str, Any]] = [{"kind": Kind.TRIAL}, {"name": "x"}, {"machine": "x"}, {"project": "x"}]
        for number, other in enumerate(others, start=1):
            store.add(run(number, **other), [point("loss", number)])
        found = store.values("loss", project="p", kind=Kind.TEST, name="unit", machine="m")
        assert [one.value for one in found] == [0]


def test_brackets_of_parametrised_tests_stand_for_themselves(tmp_path: Path) -> None:
    with Store(tmp_path / "h", write=True) as store:
        store.add(run(1), [point("t::f[a]/x", 1), point("t::fa/x", 2), point("t::f[b]/x", 3)])
        assert store.metrics(pattern="t::f[a]/x") == ["t::f[a]/x"]
        assert store.metrics(pattern="*[[]a]/x") == []
        assert store.metrics(pattern="t::f[?]/x") == ["t::f[a]/x", "t::f[b]/x"]


def test_a_transaction_that_fails_leaves_nothing(tmp_path: Path) -> None:
    with Store(tmp_path / "h", write=True) as store:
        with pytest.raises(UserError):
            store.add(run(1), [point("loss", 1), point("bad", 1, 2**70), point("bad", 2, 3)])
        assert store.runs() == []
        assert store.metrics() == []


def test_reading_makes_no_store_and_writes_nothing(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no history there"):
        Store(tmp_path / "h", write=False)
    assert not (tmp_path / "h").exists()
    filled(tmp_path / "h", 1).__exit__(None, None, None)
    with Store(tmp_path / "h", write=False) as store, pytest.raises(UserError):
        store.mark(1, "x")


def test_a_store_of_a_newer_seatrial_is_refused(tmp_path: Path) -> None:
    filled(tmp_path / "h", 1).__exit__(None, None, None)
    with sqlite3.connect(tmp_path / "h") as other:
        other.execute("UPDATE meta SET value = '99'")
    with pytest.raises(UserError, match="version 99"):
        Store(tmp_path / "h", write=True)


def test_files_that_are_no_history_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("words " * 1000, encoding="utf-8")
    with pytest.raises(UserError, match="text: history"):
        Store(tmp_path / "text", write=True)
    with sqlite3.connect(tmp_path / "other") as other:
        other.execute("CREATE TABLE theirs (x)")
    with pytest.raises(UserError, match="another program's database"):
        Store(tmp_path / "other", write=True)


def test_several_runs_at_once_are_each_kept_as_one_would_be(tmp_path: Path) -> None:
    with Store(tmp_path / "h.sqlite", write=True) as store:
        again = run(2, digest="later", source="s", time=5.0)
        items = [
            (run(1), points("loss", 1, 2), False),
            (run(1), points("loss", 9), False),
            (run(3, source="s", time=5.0, name="unit"), points("a", 1, 2), True),
        ]
        assert store.add_all([*items, (again, points("a", 7, 8, 9), True)]) == [True, False, True, True]
        assert [one.value for one in store.values("loss")] == [2.0]
        assert [one.value for one in store.values("a")] == [9.0], "an earlier import of the same run makes way, also within one batch"
        assert len(store.runs()) == 2


def test_a_batch_that_fails_leaves_nothing_and_the_store_usable(tmp_path: Path) -> None:
    with Store(tmp_path / "h.sqlite", write=True) as store:
        with pytest.raises(UserError):
            store.add_all(
                [
                    (run(1), points("new", 1, 2), False),
                    (run(2), [Point(metric="new", step=2**70, value=1.0), Point(metric="new", step=1, value=1.0)], False),
                ]
            )
        assert store.runs() == []
        assert store.add(run(3), points("new", 4, 5))
        assert [one.value for one in store.values("new")] == [5.0]
