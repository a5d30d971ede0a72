"""stop.json: the first reason stays, and `resume` puts it aside."""

from __future__ import annotations

from pathlib import Path

import pytest

from seatrial.core.errors import UserError
from seatrial.rollouts.campaign_dir import CampaignDir, read_stop_file, set_stop_file_aside, write_stop_file


def test_the_first_reason_stays_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    place = CampaignDir(tmp_path)
    assert read_stop_file(place) is None
    write_stop_file(place, "too many failures", "attempt 3 of shard 0")
    write_stop_file(place, "another reason", "attempt 1 of shard 1")
    found = read_stop_file(place)
    assert found is not None
    assert (found.reason, found.by) == ("too many failures", "attempt 3 of shard 0")
    assert [path.name for path in tmp_path.iterdir()] == ["stop.json"]


def test_a_reason_that_was_put_aside_is_kept(tmp_path: Path) -> None:
    place = CampaignDir(tmp_path)
    set_stop_file_aside(place)
    write_stop_file(place, "too many failures", "somebody")
    set_stop_file_aside(place)
    assert read_stop_file(place) is None
    (kept,) = tmp_path.glob("stop-*.json")
    assert "too many failures" in kept.read_text()


def test_a_torn_reason_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    CampaignDir(tmp_path).stop.write_text('{"reason"')
    with pytest.raises(UserError, match=r"stop\.json"):
        read_stop_file(CampaignDir(tmp_path))
