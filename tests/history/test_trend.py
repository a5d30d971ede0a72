"""Trends over the store: changes with the runs they lie between."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from seatrial.core.errors import UserError
from seatrial.history.compare import trend
from seatrial.history.store import Kind, Store, StoredRun, point


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store(tmp_path / "history.sqlite", write=True) as opened:
        yield opened


def fill(store: Store, values: Sequence[object], machine: str = "m") -> None:
    for time, value in enumerate(values):
        run = StoredRun(
            project="p", kind=Kind.BENCHMARK, name="", commit=f"{time:040x}", time=time, machine=machine, digest=f"{machine}{time}"
        )
        store.add(run, [point("speed", value)])


def test_a_step_names_the_two_commits_it_lies_between(store: Store) -> None:
    fill(store, [1.0] * 10 + [2.0] * 10)
    (series,) = trend(store, ["speed"]).series
    assert [change.kind for change in series.changes] == ["step"]
    line = next(line for line in series.lines() if "step  " in line)
    assert "between run 10 (0000000000) and run 11 (0000000000)" in line


def test_machines_are_series_of_their_own(store: Store) -> None:
    fill(store, [1.0] * 10)
    fill(store, [5.0] * 10, machine="other")
    found = trend(store, ["speed"])
    assert [series.changes for series in found.series] == [(), ()]
    assert "no change" in found.lines()[0]


def test_a_short_series_cannot_tell(store: Store) -> None:
    fill(store, [1.0] * 7)
    (line, _) = trend(store, ["speed"]).lines()
    assert "cannot tell" in line
    assert "no change" not in line


def test_values_that_are_no_numbers_are_told(store: Store) -> None:
    fill(store, [*[1.0] * 10, math.nan, "text", 1.0])
    text = "\n".join(trend(store, ["speed"]).lines())
    assert "run 11: nan, run 12: text" in text


def test_poisoned_runs_are_left_out_unless_asked_for(store: Store) -> None:
    fill(store, [1.0] * 12 + [50.0])
    store.mark(13, "wrong machine")
    assert trend(store, ["speed"]).series[0].changes == ()
    assert [change.kind for change in trend(store, ["speed"], every=True).series[0].changes] == ["outlier"]


def test_a_drift_says_from_where_to_where(store: Store) -> None:
    source = random.Random(3)
    fill(store, [source.gauss(6 * index / 100, 1) for index in range(100)])
    assert any("drift" in line and "to run 100" in line for line in trend(store, ["sp*"]).lines())


def test_a_metric_that_is_not_there_is_an_error(store: Store) -> None:
    fill(store, [1.0])
    with pytest.raises(UserError, match="sped"):
        trend(store, ["sped"])
    with pytest.raises(UserError, match="no run"):
        trend(store, ["speed"], machine="nowhere")


@pytest.mark.parametrize("alarm", [0.0, 1.0, math.nan])
def test_an_alarm_rate_that_is_none_is_an_error(store: Store, alarm: float) -> None:
    with pytest.raises(UserError, match="--alarm"):
        trend(store, ["speed"], alarm=alarm)
