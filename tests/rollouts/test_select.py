"""Tasks by pass rate, with the user's own rows."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from seatrial.core.errors import UserError
from seatrial.rollouts.campaign_dir import CampaignDir
from seatrial.rollouts.results.campaign_export import select_tasks
from tests.rollouts.profiled import Result, campaign, collected, failed, ok, questions


@pytest.fixture
def place(tmp_path: Path) -> CampaignDir:
    """Pass rates 0, 1/4, 3/4, 1, and one of a single rollout."""
    rows = {"one": questions(3), "two": [{"prompt": "last — ü", "answer": "x", "extra": {"b": 1, "a": [None, 1.5]}}, *questions(1)]}
    made = campaign(tmp_path, rows, one={"tags": ["t"]})
    wrong, right = ok(0), ok(1)
    rates: list[list[Result]] = [[wrong] * 4, [right] + [wrong] * 3, [right] * 3 + [wrong], [right] * 4, [right, failed(), None, None]]
    return collected(made, rates)


def rows_of(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_both_bounds_belong_to_the_band(place: CampaignDir, tmp_path: Path) -> None:
    out = tmp_path / "chosen" / "rows.jsonl"
    found = select_tasks(place, low=0.25, high=0.75, out=out)
    assert rows_of(out) == questions(3)[1:]
    assert (found.rows, found.tasks, dict(found.left_out)) == (2, 5, {"below 0.25": 1, "above 0.75": 2})
    assert [path.name for path in out.parent.iterdir()] == ["rows.jsonl"]


def test_rows_are_the_users_own(place: CampaignDir, tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    select_tasks(place, low=1, high=1, out=out, min_n=4)
    assert out.read_text() == '{"prompt":"last — ü","answer":"x","extra":{"b":1,"a":[null,1.5]}}\n'


def test_few_rollouts_say_too_little(place: CampaignDir, tmp_path: Path) -> None:
    found = select_tasks(place, low=0, high=1, out=tmp_path / "rows.jsonl", min_n=2)
    assert (found.rows, dict(found.left_out)) == (4, {"with fewer than 2 rollouts": 1})


def test_a_curriculum_begins_with_the_easiest(place: CampaignDir, tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    select_tasks(place, low=0, high=1, out=out, min_n=4, sort="pass-rate", with_rate=True)
    assert [row["pass_rate"] for row in rows_of(out)] == [1.0, 0.75, 0.25, 0.0]
    assert [row["prompt"] for row in rows_of(out)] == ["last — ü", "question 2", "question 1", "question 0"]


def test_by_dataset_and_tag(place: CampaignDir, tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    assert dict(select_tasks(place, low=0, high=1, out=out, dataset="two").left_out) == {"of another dataset": 3}
    assert dict(select_tasks(place, low=0, high=0.5, out=out, tag="t").left_out) == {"above 0.5": 1, "without the tag t": 2}
    assert len(rows_of(out)) == 2


def test_a_threshold_for_graded_rewards(tmp_path: Path) -> None:
    graded = collected(campaign(tmp_path, {"d": questions(2)}, repeats=1), [[ok(0.6)], [ok(0.4)]])
    select_tasks(graded, low=1, high=1, out=tmp_path / "rows.jsonl", pass_at=0.5)
    assert rows_of(tmp_path / "rows.jsonl") == questions(1)


def test_nothing_left_is_an_error_and_no_file(place: CampaignDir, tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    with pytest.raises(UserError, match=r"none of 5 tasks is left: 2 below 0\.4, 2 above 0\.5, 1 with fewer than 2 rollouts"):
        select_tasks(place, low=0.4, high=0.5, out=out, min_n=2)
    assert not out.exists()


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"low": 0.5, "high": 0.4}, "a band from 0.5 to 0.4"),
        ({"low": -0.1, "high": 1}, "a band from -0.1 to 1"),
        ({"low": 0, "high": float("nan")}, "a band"),
        ({"low": 0, "high": 1, "dataset": "three"}, "no dataset is called three"),
        ({"low": 0, "high": 1, "tag": "nope"}, "no task has the tag nope"),
        ({"low": 0, "high": 1, "min_n": 5}, "tasks have up to 4"),
        ({"low": 0, "high": 1, "min_n": 0}, "tasks have up to 4"),
    ],
)
def test_what_cannot_be_is_refused(said: dict[str, Any], message: str, place: CampaignDir, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        select_tasks(place, out=tmp_path / "rows.jsonl", **said)
    assert not (tmp_path / "rows.jsonl").exists()


def test_an_unknown_tag_is_answered_with_the_known_ones(place: CampaignDir, tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        select_tasks(place, low=0, high=1, out=tmp_path / "rows.jsonl", tag="nope")
    assert caught.value.fix == "there are: t"
    bare = collected(campaign(tmp_path / "bare", {"d": questions(1)}, repeats=1), [[ok(1)]])
    with pytest.raises(UserError) as caught:
        select_tasks(bare, low=0, high=1, out=tmp_path / "rows.jsonl", tag="nope")
    assert caught.value.fix == "leave it out: no task has any"


def test_inputs_are_never_overwritten(place: CampaignDir, tmp_path: Path) -> None:
    before = (tmp_path / "one.jsonl").read_bytes()
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "one.jsonl")
    os.link(tmp_path / "two.jsonl", tmp_path / "hard.jsonl")
    (tmp_path / "sub").mkdir()
    (tmp_path / "moved.jsonl").write_bytes(before)
    spellings = [
        "one.jsonl",
        "link.jsonl",
        "hard.jsonl",
        "moved.jsonl",
        "sub/../two.jsonl",
        "campaign/inputs.jsonl",
        "campaign/manifest.json",
    ]
    for name in [*spellings, "campaign/merged/rollouts.jsonl", "sub"]:
        with pytest.raises(UserError):
            select_tasks(place, low=0, high=1, out=tmp_path / name)
    assert (tmp_path / "one.jsonl").read_bytes() == before


def test_a_rate_of_its_own_is_not_replaced(tmp_path: Path) -> None:
    made = collected(campaign(tmp_path, {"d": questions(1, pass_rate=0.1)}, repeats=1), [[ok(1)]])
    out = tmp_path / "rows.jsonl"
    with pytest.raises(UserError, match="has a pass_rate of its own"):
        select_tasks(made, low=0, high=1, out=out, with_rate=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["campaign", "d.jsonl"]
    select_tasks(made, low=0, high=1, out=out)
    assert rows_of(out)[0]["pass_rate"] == 0.1
