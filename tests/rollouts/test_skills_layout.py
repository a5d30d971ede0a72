"""Merged rollouts in the files of Skills and of Gym."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from seatrial.core.errors import UserError
from seatrial.rollouts.backends.direct_backend import AGENT
from seatrial.rollouts.campaign_dir import CampaignDir
from seatrial.rollouts.manifest import create_campaign
from seatrial.rollouts.results.campaign_export import DIRECT_AGENT, write_gym_layout, write_skills_layout
from seatrial.rollouts.results.campaign_import import import_rollouts
from tests.rollouts.imports_made import gym_files, rollout, skills
from tests.rollouts.inputs_made import campaign, jsonl, merged, plain
from tests.rollouts.profiled import attempt, failed, ok, record


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def keys(path: Path) -> list[tuple[int, int]]:
    return [(row["_ng_task_index"], row["_ng_rollout_index"]) for row in rows(path)]


def collected(folder: Path, results: dict[int, dict[str, Any]]) -> CampaignDir:
    """Two rows by seeds 3 and 5 (units 0-3) and one row of another dataset by 0 (unit 4), merged as far as they are there."""
    jsonl(folder / "a.jsonl", [plain(0), plain(1)])
    jsonl(folder / "b.jsonl", [plain(2)])
    place = CampaignDir(folder / "campaign")
    create_campaign(campaign({"name": "a"}, {"name": "b", "repeats": 1}, work={"seeds": "3,5", "shards": 1}), folder, place)
    attempt(place, 0, [record(place, unit, result) for unit, result in results.items()])
    merged(place, partial=True)
    return place


def test_a_file_per_seed_with_a_marker_when_it_is_complete(tmp_path: Path) -> None:
    place = collected(tmp_path, {3: ok(1.0), 0: ok(0.0), 2: ok(1.0), 4: ok(1.0)})
    made = write_skills_layout(place)
    home = place.root / "skills"
    assert {path.relative_to(home).as_posix() for path in made} == {
        *("a/rollouts-rs3.jsonl", "a/rollouts-rs3.jsonl.done", "a/rollouts-rs5.jsonl"),
        *("b/rollouts-rs0.jsonl", "b/rollouts-rs0.jsonl.done"),
    }
    assert sorted(path for path in home.rglob("*") if path.is_file()) == sorted(made)
    assert keys(home / "a" / "rollouts-rs3.jsonl") == [(0, 3), (1, 3)]
    assert keys(home / "a" / "rollouts-rs5.jsonl") == [(1, 5)]
    assert [row["reward"] for row in rows(home / "a" / "rollouts-rs3.jsonl")] == [0.0, 1.0]
    assert "_seatrial" not in rows(home / "b" / "rollouts-rs0.jsonl")[0]


def test_a_failure_leaves_its_seed_unmarked_and_an_old_marker_goes(tmp_path: Path) -> None:
    place = collected(tmp_path, {0: ok(1.0), 1: ok(1.0), 2: ok(1.0), 3: failed(), 4: ok(1.0)})
    old = tmp_path / "out" / "a" / "rollouts-rs5.jsonl.done"
    old.parent.mkdir(parents=True)
    old.touch()
    made = write_skills_layout(place, tmp_path / "out")
    assert not old.exists()
    assert old.with_name("rollouts-rs3.jsonl.done") in made


def test_it_can_be_imported_again(tmp_path: Path) -> None:
    rollouts, inputs = gym_files(tmp_path, t1_0=0.5)
    import_rollouts("gym", [rollouts], CampaignDir(tmp_path / "c"), inputs=[inputs])
    merged(CampaignDir(tmp_path / "c"))
    files = [path for path in write_skills_layout(CampaignDir(tmp_path / "c"), tmp_path / "skills") if path.suffix == ".jsonl"]
    assert [path.name for path in files] == ["rollouts-rs0.jsonl", "rollouts-rs1.jsonl"]
    again = import_rollouts("skills", files, CampaignDir(tmp_path / "d"))
    assert (again.units, merged(CampaignDir(tmp_path / "d")).ok) == (6, 6)


def test_gyms_files(tmp_path: Path) -> None:
    place = collected(tmp_path, {0: ok(1.0), 1: failed("timeout"), 2: ok(1.0), 4: ok(0.0)})
    made = write_gym_layout(place)
    inputs, rollouts, failures = made
    assert [path.name for path in made] == ["rollouts_materialized_inputs.jsonl", "rollouts.jsonl", "rollouts_failures.jsonl"]
    assert keys(inputs) == [(0, 3), (0, 5), (1, 3), (1, 5), (2, 0)]
    assert rows(inputs)[0] == {
        **plain(0),
        "responses_create_params": {"input": [{"role": "user", "content": "What is 0 + 1?"}]},
        "agent_ref": {"name": DIRECT_AGENT},
        "_ng_task_index": 0,
        "_ng_rollout_index": 3,
    }
    assert keys(rollouts) == [(0, 3), (1, 3), (2, 0)]
    assert keys(failures) == [(0, 5)]
    assert (rows(failures)[0]["_ng_failure_class"], rows(failures)[0]["_ng_failure_terminal"]) == ("timeout", True)
    assert DIRECT_AGENT == AGENT


def test_imported_rows_get_the_indices_of_the_campaign(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "out.jsonl", [rollout(task, 0) for task in (40, 7)])
    place = CampaignDir(tmp_path / "c")
    import_rollouts("gym", [file], place)
    merged(place)
    inputs, rollouts, _ = write_gym_layout(place, tmp_path / "gym", "again")
    assert inputs.name == "again_materialized_inputs.jsonl"
    assert keys(inputs) == keys(rollouts) == [(0, 0), (1, 0)]
    assert [row["response"]["id"] for row in rows(rollouts)] == ["resp_7_0", "resp_40_0"]


def test_it_needs_a_merge_that_is_as_it_was(tmp_path: Path) -> None:
    rollouts, inputs = gym_files(tmp_path)
    place = CampaignDir(tmp_path / "c")
    import_rollouts("gym", [rollouts], place, inputs=[inputs])
    for write in (write_skills_layout, write_gym_layout):
        with pytest.raises(UserError, match="not merged yet"):
            write(place, tmp_path / "out")
    merged(place)
    file = place.merged / "rollouts.jsonl"
    file.write_bytes(file.read_bytes().replace(b"resp_0_0", b"resp_9_9"))
    for write in (write_skills_layout, write_gym_layout):
        with pytest.raises(UserError, match="not what the merge wrote"):
            write(place, tmp_path / "out")
    assert list((tmp_path / "out").rglob("*")) == []


def test_rollouts_of_skills_have_nothing_for_gym(tmp_path: Path) -> None:
    place = CampaignDir(tmp_path / "c")
    import_rollouts("skills", [jsonl(tmp_path / "output-rs0.jsonl", [skills(0)])], place)
    merged(place)
    with pytest.raises(UserError, match="no responses"):
        write_gym_layout(place)
