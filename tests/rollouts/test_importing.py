"""Rollouts of Gym and of Skills as a campaign that can be merged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from seatrial.core.errors import UserError
from seatrial.rollouts.campaign_dir import CampaignDir
from seatrial.rollouts.manifest import NO_SEED, Units, load_campaign, load_manifest
from seatrial.rollouts.results.campaign_import import import_rollouts
from seatrial.rollouts.results.campaign_merge import MergeRefusedError
from seatrial.rollouts.rollout_record import Head, check, head_of
from tests.rollouts.imports_made import KEYS, gym_files, materialized, rollout, skills
from tests.rollouts.inputs_made import gym, jsonl, merged

SAMPLE = Path(__file__).parent.parent / "data" / "rollouts" / "gym_rollouts.jsonl"


def heads(place: CampaignDir, name: str = "rollouts") -> list[Head]:
    """Of the merged records."""
    return [head_of(line, check(line)) for line in (place.merged / f"{name}.jsonl").read_bytes().splitlines(keepends=True)]


def refusal(*arguments: Any, **options: Any) -> str:
    with pytest.raises(UserError) as caught:
        import_rollouts(*arguments, **options)
    return str(caught.value)


def test_gym_with_its_inputs(tmp_path: Path) -> None:
    rollouts, inputs = gym_files(tmp_path, t1_0=0.5)
    place = CampaignDir(tmp_path / "c")
    manifest = import_rollouts("gym", [rollouts], place, inputs=[inputs], name="mine")
    assert load_manifest(place) == manifest
    assert (manifest.name, manifest.rows, manifest.units, manifest.repeats) == ("mine", 3, 6, {"solver": (0, 1)})
    result = merged(place)
    assert (result.ok, result.missing, result.duplicates, result.foreign, result.torn) == (6, 0, 0, 0, 0)
    found = heads(place)
    assert [(head.unit, head.repeat, head.reward) for head in found] == [
        *((0, 0, 1.0), (1, 1, 1.0), (2, 0, 0.5)),
        *((3, 1, 1.0), (4, 0, 1.0), (5, 1, 1.0)),
    ]
    first = found[2]
    assert (first.answer, first.input_tokens, first.output_tokens, first.turns, first.finish) == ("A", 11, 20, 1, "stop")
    assert (first.metrics, first.seed) == ({"steps": 3.0}, NO_SEED)
    with Units(place, manifest) as units:
        row = units.row(1)
        assert (row.agent, row.dataset, row.id) == ("solver", "solver", first.task)
        # The row is the one that was given to Gym: neither its indices nor the seed of one repetition are part of it.
        assert row.data == gym(1, agent_ref={"name": "solver"})
    with pytest.raises(UserError, match="imported: there is nothing to collect"):
        load_campaign(place)


def test_gym_alone_owes_what_any_task_of_the_agent_has(tmp_path: Path) -> None:
    rows = [rollout(0, 0), rollout(0, 1), rollout(7, 1), rollout(3, 0, "other")]
    place = CampaignDir(tmp_path / "c")
    manifest = import_rollouts("gym", [jsonl(tmp_path / "out.jsonl", rows)], place)
    assert (manifest.rows, manifest.units, manifest.repeats) == (3, 5, {"solver": (0, 1), "other": (0,)})
    with Units(place, manifest) as units:
        assert units.row(1).data == {
            "responses_create_params": gym(7)["responses_create_params"] | {"tools": []},
            "expected_answer": "A",
            "agent_ref": {"name": "solver"},
        }
    with pytest.raises(MergeRefusedError, match="1 of 5 units have no result"):
        merged(place)
    assert merged(place, partial=True).missing == 1


def test_tasks_with_other_repetitions_are_a_dataset_of_their_own(tmp_path: Path) -> None:
    keys = [(0, 0), (0, 1), (1, 0), (2, 0), (2, 1)]
    rollouts = jsonl(tmp_path / "out.jsonl", [rollout(*key) for key in keys])
    inputs = jsonl(tmp_path / "in.jsonl", [materialized(*key) for key in keys])
    place = CampaignDir(tmp_path / "c")
    manifest = import_rollouts("gym", [rollouts], place, inputs=[inputs])
    assert (manifest.units, manifest.repeats) == (5, {"solver": (0, 1), "solver.2": (0,)})
    assert merged(place).ok == 5


def test_what_gym_really_wrote(tmp_path: Path) -> None:
    place = CampaignDir(tmp_path / "c")
    import_rollouts("gym", [SAMPLE], place)
    merged(place, partial=True)
    rows = {(row["_ng_task_index"], row["_ng_rollout_index"]): row for row in map(json.loads, SAMPLE.read_text().splitlines())}
    found = heads(place)
    assert sorted(head.reward or 0.0 for head in found) == sorted(row["reward"] for row in rows.values())
    assert {head.output_tokens for head in found} == {row["response"]["usage"]["output_tokens"] for row in rows.values()}


def test_a_torn_line_is_refused_or_kept_in_the_manifest(tmp_path: Path) -> None:
    rollouts, inputs = gym_files(tmp_path)
    rollouts.write_bytes(rollouts.read_bytes()[:-300])
    place = CampaignDir(tmp_path / "c")
    said = refusal("gym", [rollouts], place, inputs=[inputs])
    assert said.startswith("1 bad row; nothing was started:\n" + f"{rollouts}:6: not JSON")
    assert not place.root.exists()
    manifest = import_rollouts("gym", [rollouts], place, inputs=[inputs], partial=True)
    assert manifest.imported is not None
    assert (manifest.imported.bad, manifest.imported.bad_lines[0].partition(": ")[0]) == (1, f"{rollouts}:6")
    assert (manifest.imported.files[0].rollouts, merged(place, partial=True).missing) == (5, 1)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (rollout(0, 0, reward=None), "no reward: reward is missing"),
        (rollout(0, 0, reward="1"), "no reward: reward is no number"),
        (gym(0, reward=1.0), "no _ng_task_index"),
        (gym(0, reward=1.0, _ng_task_index=0), "no _ng_rollout_index"),
        (gym(0, reward=1.0, _ng_task_index=0, _ng_rollout_index=-1), "_ng_rollout_index is -1"),
        (rollout(5, 0), "task 5, repetition 0 is not in the inputs"),
        (rollout(0, 9), "task 0, repetition 9 is not in the inputs"),
    ],
)
def test_bad_rollouts_are_named(tmp_path: Path, row: dict[str, Any], said: str) -> None:
    rollouts, inputs = gym_files(tmp_path)
    with rollouts.open("a") as stream:
        stream.write(json.dumps(row) + "\n")
    assert f"{rollouts}:7: {said}" in refusal("gym", [rollouts], CampaignDir(tmp_path / "c"), inputs=[inputs])


def test_failures_stay_failures_and_a_rollout_beats_them(tmp_path: Path) -> None:
    rollouts, inputs = gym_files(tmp_path)
    rollouts.write_text("".join(rollouts.read_text().splitlines(keepends=True)[1:]))
    failures = jsonl(
        tmp_path / "out_failures.jsonl",
        [{"_ng_task_index": task, "_ng_rollout_index": 1, "_ng_failure_class": "judge", "error": "no answer"} for task in (1, 2)],
    )
    place = CampaignDir(tmp_path / "c")
    manifest = import_rollouts("gym", [failures, rollouts], place, inputs=[inputs])
    assert manifest.imported is not None
    assert [(file.rollouts, file.failures) for file in manifest.imported.files] == [(0, 2), (5, 0)]
    result = merged(place)
    assert (result.ok, result.failed, result.missing) == (5, 1, 0)
    ((failed),) = heads(place, "failures")
    assert (failed.unit, failed.kind, failed.final, failed.message) == (5, "agent", True, "judge: no answer")


def test_a_key_that_comes_twice_is_counted(tmp_path: Path) -> None:
    rollouts, inputs = gym_files(tmp_path)
    again = jsonl(tmp_path / "again.jsonl", [rollout(0, 0), rollout(1, 1, reward=0.0)])
    import_rollouts("gym", [rollouts, again], CampaignDir(tmp_path / "c"), inputs=[inputs])
    result = merged(CampaignDir(tmp_path / "c"))
    assert (result.ok, result.duplicates, result.conflicts) == (6, 2, 1)
    assert {head.reward for head in heads(CampaignDir(tmp_path / "c"))} == {1.0}


def test_skills_files_are_seeds_in_numeric_order(tmp_path: Path) -> None:
    files = [jsonl(tmp_path / f"output-rs{seed}.jsonl", [skills(0, correct=seed == 2), skills(1)]) for seed in (10, 2)]
    place = CampaignDir(tmp_path / "c")
    manifest = import_rollouts("skills", files, place, name="aime")
    assert (manifest.rows, manifest.repeats) == (2, {"aime": (2, 10)})
    assert manifest.imported is not None
    assert manifest.imported.reward_key == "symbolic_correct"
    assert merged(place).ok == 4
    found = heads(place)
    assert [(head.repeat, head.reward, head.answer, head.output_tokens) for head in found] == [
        *((2, 1.0, "0", 7), (10, 0.0, None, 7)),
        *((2, 1.0, "1", 7), (10, 1.0, "1", 7)),
    ]
    line = json.loads((place.merged / "rollouts.jsonl").read_text().splitlines()[1])
    assert (line["reward"], line["generation"]) == (0.0, "It is no idea.")
    with Units(place, manifest) as units:
        assert units.row(0).data == {"problem": "Problem 0", "expected_answer": "0"}


def test_skills_files_that_are_not_aligned_are_refused(tmp_path: Path) -> None:
    first = jsonl(tmp_path / "output-rs0.jsonl", [skills(0), skills(1)])
    second = jsonl(tmp_path / "output-rs1.jsonl", [skills(1), skills(0)])
    said = refusal("skills", [first, second], CampaignDir(tmp_path / "c"))
    assert f"{second}:1: another problem than line 1 of {first}: the files are not aligned" in said


def test_a_shorter_skills_file_leaves_units_missing(tmp_path: Path) -> None:
    files = [jsonl(tmp_path / f"output-rs{seed}.jsonl", [skills(line) for line in range(2 - seed)]) for seed in (0, 1)]
    import_rollouts("skills", files, CampaignDir(tmp_path / "c"))
    assert merged(CampaignDir(tmp_path / "c"), partial=True).missing == 1


def test_the_reward_of_skills_is_one_column(tmp_path: Path) -> None:
    rows = [skills(0, judge_correct=False), skills(1, judge_correct=False)]
    file = jsonl(tmp_path / "output-rs0.jsonl", rows)
    import_rollouts("skills", [file], CampaignDir(tmp_path / "c"), reward_key="judge_correct")
    merged(CampaignDir(tmp_path / "c"))
    assert [(head.reward, head.metrics["symbolic_correct"]) for head in heads(CampaignDir(tmp_path / "c"))] == [(0.0, 1.0)] * 2
    mixed = jsonl(tmp_path / "output-rs1.jsonl", [skills(0), {"problem": "x", "generation": "y", "is_correct": True}])
    assert f"{mixed}:2: no reward: symbolic_correct is missing" in refusal("skills", [mixed], CampaignDir(tmp_path / "d"))


def test_rollouts_of_one_seed_per_file_have_gyms_index(tmp_path: Path) -> None:
    files = [jsonl(tmp_path / f"rollouts-rs{seed}.jsonl", [rollout(task, 0) for task in (2, 0, 1)]) for seed in (0, 1)]
    manifest = import_rollouts("skills", files, CampaignDir(tmp_path / "c"))
    assert (manifest.rows, manifest.repeats, merged(CampaignDir(tmp_path / "c")).ok) == (3, {"solver": (0, 1)}, 6)


def test_what_cannot_be_imported_is_told(tmp_path: Path) -> None:
    place = CampaignDir(tmp_path / "c")
    rollouts, inputs = gym_files(tmp_path)
    empty = jsonl(tmp_path / "empty.jsonl", [])
    for folder in ("x", "y"):
        jsonl(tmp_path / folder / "output-rs3.jsonl", [skills(0)])
    unfinished = jsonl(tmp_path / "output-rs0.jsonl-async", [skills(0)])
    assert "no file was named" in refusal("gym", [], place)
    assert "no such file" in refusal("gym", [tmp_path / "none.jsonl"], place)
    assert "there is no rollout in it" in refusal("gym", [empty], place)
    assert "still writing it" in refusal("skills", [unfinished], place)
    assert "two files of seed 3" in refusal("skills", [tmp_path / folder / "output-rs3.jsonl" for folder in ("x", "y")], place)
    assert "inputs are Gym's" in refusal("skills", [rollouts], place, inputs=[inputs])
    inputs.write_text(inputs.read_text() + "{torn")
    assert f"{inputs}:{len(KEYS) + 1}: not JSON" in refusal("gym", [rollouts], place, inputs=[inputs], partial=True)
    assert not place.root.exists()


def fix_of(*arguments: Any, **options: Any) -> str:
    with pytest.raises(UserError) as caught:
        import_rollouts(*arguments, **options)
    return caught.value.fix


def test_what_to_do_about_rollouts_without_key_or_reward(tmp_path: Path) -> None:
    keyless = jsonl(tmp_path / "example.jsonl", [gym(number, reward=1.0) for number in range(2)])
    assert "import skills FILE" in fix_of("gym", [keyless], CampaignDir(tmp_path / "c"))
    assert import_rollouts("skills", [keyless], CampaignDir(tmp_path / "k")).units == 2
    scored = jsonl(tmp_path / "scored.jsonl", [{"problem": "q", "generation": "a", "score": 0.5}])
    assert "--reward COLUMN (numbers stand in score)" in fix_of("skills", [scored], CampaignDir(tmp_path / "c"))
    assert import_rollouts("skills", [scored], CampaignDir(tmp_path / "s"), reward_key="score").units == 1
    torn = jsonl(tmp_path / "torn.jsonl", [rollout(0, 0), "{torn"])
    assert fix_of("gym", [torn], CampaignDir(tmp_path / "c")) == "mend these lines, or import the others with --partial"


def test_an_incomplete_import_is_not_to_be_resumed(tmp_path: Path) -> None:
    rollouts, inputs = gym_files(tmp_path)
    rollouts.write_text("".join(rollouts.read_text().splitlines(keepends=True)[1:]))
    place = CampaignDir(tmp_path / "c")
    import_rollouts("gym", [rollouts], place, inputs=[inputs])
    with pytest.raises(MergeRefusedError) as refused:
        merged(place)
    assert "resume" not in refused.value.fix
    assert f"seatrial rollouts merge {place.root} --partial" in refused.value.fix
