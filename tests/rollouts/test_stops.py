"""stop.json: the first reason stays, and `resume` puts it aside."""

from __future__ import annotations

from pathlib import Path

import pytest

from seatrial.model.errors import UserError
from seatrial.rollouts.collect.stops import go_on, stop, stopped
from seatrial.rollouts.place import Place


def test_the_first_reason_stays_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    place = Place(tmp_path)
    assert stopped(place) is None
    stop(place, "too many failures", "attempt 3 of shard 0")
    stop(place, "another reason", "attempt 1 of shard 1")
    found = stopped(place)
    assert found is not None
    assert (found.reason, found.by) == ("too many failures", "attempt 3 of shard 0")
    assert [path.name for path in tmp_path.iterdir()] == ["stop.json"]


def test_a_reason_that_was_put_aside_is_kept(tmp_path: Path) -> None:
    place = Place(tmp_path)
    go_on(place)
    stop(place, "too many failures", "somebody")
    go_on(place)
    assert stopped(place) is None
    (kept,) = tmp_path.glob("stop-*.json")
    assert "too many failures" in kept.read_text()


def test_a_torn_reason_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    Place(tmp_path).stop.write_text('{"reason"')
    with pytest.raises(UserError, match=r"stop\.json"):
        stopped(Place(tmp_path))
