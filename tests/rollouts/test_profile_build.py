"""Profiles of small campaigns: what counts, what does not, and what is said of the rest."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from seatrial.core.errors import UserError
from seatrial.rollouts import manifest as manifests
from seatrial.rollouts.campaign_dir import CampaignDir
from seatrial.rollouts.manifest import Units
from seatrial.rollouts.results import profile_data
from seatrial.rollouts.results.campaign_merge import merge_campaign
from seatrial.rollouts.results.profile_build import make_profile
from seatrial.rollouts.results.profile_data import Group
from seatrial.rollouts.rollout_record import check, head_of
from tests.rollouts.profiled import Result, attempt, campaign, collected, failed, ok, questions, record


def test_a_complete_campaign(tmp_path: Path) -> None:
    place = campaign(tmp_path, {"d": questions(2)})
    done = collected(place, [[ok(1, "a"), ok(0, "b"), ok(1, "a"), ok(1, "a")], [ok(0, "x"), ok(0, "y"), ok(0, "x"), ok(0)]])
    found = make_profile(done)
    easy, hard = found.tasks
    assert (easy.n, easy.correct, easy.pass_rate, easy.coverage) == (4, 3, 0.75, 1.0)
    assert easy.pass_at == (0.75, 1.0, 1.0) == easy.best_at
    assert easy.majority_at == (1.0, 0.5, 1.0)
    assert (hard.pass_at, hard.pass_rate) == ((0.0, 0.0, 0.0), 0.0)
    assert easy.source.endswith("d.jsonl:1")
    overall = found.overall
    assert (overall.mean.value, overall.never, overall.always, overall.coverage) == (0.375, 1, 0, 1.0)
    assert found.summary.ks == (1, 2, 4)
    assert [group.by for group in found.summary.groups] == ["overall", "dataset"]
    assert found.summary.groups[1] == overall.model_copy(update={"by": "dataset", "name": "d"})


def test_a_failure_is_no_reward_and_missing_is_said(tmp_path: Path) -> None:
    place = campaign(tmp_path, {"d": questions(3)})
    results: list[list[Result]] = [
        [ok(1), failed("timeout"), failed("judge"), failed("timeout")],
        [ok(1), ok(0), None, failed(final=False)],
        [failed(), failed(), None, None],
    ]
    found = make_profile(collected(place, results))
    first, second, third = found.tasks
    assert (first.n, dict(first.failed), first.missing, first.coverage) == (1, {"timeout": 2, "judge": 1}, 0, 0.25)
    assert first.reward is not None
    assert (first.reward.mean, first.reward.std, first.pass_at) == (1.0, None, (1.0, None, None))
    # A failure that is not final leaves its unit owed.
    assert (second.n, dict(second.failed), second.missing) == (2, {}, 2)
    assert (third.reward, third.pass_rate, third.pass_low, third.majority_at) == (None, None, None, (None, None, None))
    overall = found.overall
    assert (overall.mean.value, overall.mean.tasks, overall.measured, overall.tasks) == (0.75, 2, 2, 3)
    assert overall.reward is not None
    assert overall.reward.mean == pytest.approx(2 / 3)
    assert (dict(overall.failed), overall.missing, overall.coverage) == ({"timeout": 4, "judge": 1}, 4, 0.25)
    assert [(at.k, at.tasks, at.value) for at in overall.pass_at] == [(1, 2, 0.75), (2, 1, 1.0), (4, 0, None)]


def test_a_campaign_without_any_result(tmp_path: Path) -> None:
    overall = make_profile(campaign(tmp_path, {"d": questions(2)})).overall
    assert (overall.mean.value, overall.mean.tasks, overall.reward, overall.missing, overall.coverage) == (None, 0, None, 8, 0.0)
    assert overall.truncated is None


def test_the_winner_is_a_merges(tmp_path: Path) -> None:
    """A rollout beats a failure, then the lowest attempt counts, then the first in the file."""
    place = campaign(tmp_path, {"d": questions(1)}, repeats=3, shards=1)
    lines = {unit: record(place, unit, ok(1)) for unit in range(3)}
    attempt(place, 0, [lines[0], record(place, 0, ok(0)), record(place, 1, failed())], number=2)
    attempt(place, 0, [lines[1], record(place, 0, ok(0.25)), record(place, 2, ok(0.5)), record(place, 1, failed("judge"))], number=10)
    found = make_profile(place)
    task = found.tasks[0]
    assert task.reward is not None
    assert (task.n, task.reward.total, dict(task.failed)) == (3, 2.5, {})
    # Twice: unit 0 in its file and in the later one, unit 1 after its failure, and its failure after that.
    assert (found.summary.journal.duplicates, found.summary.journal.conflicts) == (4, 1)


def test_a_profile_is_that_of_the_merged_rows(tmp_path: Path) -> None:
    """Random attempts of all shards, with failures, duplicates and torn lines."""
    source = random.Random(7)
    place = campaign(tmp_path, {"d": questions(6)}, repeats=3, shards=3)
    manifest = manifests.load_manifest(place)
    with Units(place, manifest) as units:
        for shard in range(3):
            mine = list(units.of_shard(shard))
            for number in (3, 1, 2):
                lines = [record(place, unit, failed() if source.random() < 0.4 else ok(source.randrange(9))) for unit in mine]
                source.shuffle(lines)
                attempt(place, shard, [line if source.random() < 0.9 else line[:50] + b"\n" for line in lines[:4]], number)
        result = merge_campaign(place, manifest, units, partial=True)
    rewards: dict[int, list[float]] = {}
    for line in (place.merged / "rollouts.jsonl").read_bytes().splitlines(keepends=True):
        head = head_of(line, check(line))
        rewards.setdefault(head.unit // 3, []).append(head.reward or 0.0)
    found = make_profile(place)
    assert [task.reward.total if task.reward else None for task in found.tasks] == [
        sum(rewards[index]) if index in rewards else None for index in range(6)
    ]
    overall = found.overall
    assert (overall.ok, sum(overall.failed.values()), overall.missing) == (result.ok, result.failed, 18 - result.ok - result.failed)
    assert (found.summary.journal.torn, found.summary.journal.duplicates) == (result.torn, result.duplicates)
    assert result.ok > 5
    assert result.failed > 0


def test_torn_and_foreign_records_do_not_count(tmp_path: Path) -> None:
    place = campaign(tmp_path, {"d": questions(2)}, repeats=2, shards=2)
    whole = record(place, 0, ok(1))
    attempt(place, 0, [b"garbage\n", whole, record(place, 2, ok(1)), record(place, 1, ok(1))[:-9]])
    attempt(place, 1, [record(place, 3, ok(1)).replace(b'"reward":1.0}', b'"reward":0.0}')])
    found = make_profile(place)
    assert [task.n for task in found.tasks] == [1, 0]
    journal = found.summary.journal
    assert (journal.torn, journal.tails, journal.foreign) == (2, 1, 1)


def test_groups_by_dataset_agent_and_tag(tmp_path: Path) -> None:
    more: dict[str, Any] = {
        "one": {"tags": ["easy", "all"], "agent": "a"},
        "two": {"tags": ["all"], "agent": "b", "tag_columns": ["level"]},
    }
    rows = {"one": questions(1), "two": questions(1, level="high") + questions(1, level="low", extra=1)}
    done = collected(campaign(tmp_path, rows, repeats=1, **more), [[ok(1)], [ok(0)], [failed()]])
    groups = {(group.by, group.name): group for group in make_profile(done).summary.groups}
    means = {key: group.mean.value for key, group in groups.items()}
    tags = {name: mean for (by, name), mean in means.items() if by == "tag"}
    assert means["overall", "all tasks"] == 0.5
    assert (means["dataset", "one"], means["dataset", "two"]) == (1.0, 0.0)
    assert (means["agent", "a"], means["agent", "b"]) == (1.0, 0.0)
    assert (means["dataset x agent", "one x a"], means["dataset x agent", "two x b"]) == (1.0, 0.0)
    assert (tags["easy"], tags["all"]) == (1.0, 0.5)
    assert sorted(mean is None for mean in tags.values()) == [False, False, False, True]
    assert dict(groups["dataset", "two"].failed) == {"timeout": 1}


def test_the_headline_counts_each_task_once(tmp_path: Path) -> None:
    place = campaign(tmp_path, {"many": questions(1), "few": questions(1)}, many={"repeats": 8}, few={"repeats": 1})
    overall = make_profile(collected(place, [[ok(1)] * 8, [ok(0)]])).overall
    assert overall.mean.value == 0.5
    assert overall.reward is not None
    assert overall.reward.mean == pytest.approx(8 / 9)
    assert [(at.k, at.tasks) for at in overall.pass_at] == [(1, 2), (2, 1), (4, 1), (8, 1)]


def test_intervals_end_where_rewards_do(tmp_path: Path) -> None:
    def overall(name: str, largest: float) -> Group:
        place = campaign(tmp_path / name, {"d": questions(3)}, repeats=2)
        return make_profile(collected(place, [[ok(largest, "a")] * 2, [ok(largest, "a")] * 2, [ok(0, "b")] * 2])).overall

    shares, others = overall("shares", 1), overall("others", 2)
    for found in (shares.mean, shares.best_at[0], shares.majority_at[0], shares.average_of[0], shares.pass_at[0]):
        assert (found.low, found.high) == (0.0, 1.0)
    for found in (others.mean, others.best_at[0], others.majority_at[0], others.average_of[0]):
        assert found.low is not None
        assert found.low < 0  # rewards of 2: nobody says what the least one is
    assert (others.pass_at[0].low, others.pass_at[0].high) == (0.0, 1.0)


def test_graded_rewards_need_a_threshold(tmp_path: Path) -> None:
    done = collected(campaign(tmp_path, {"d": questions(1)}, repeats=2), [[ok(0.5), ok(0.9)]])
    strict, mild = make_profile(done).tasks[0], make_profile(done, pass_at=0.5).tasks[0]
    assert (strict.correct, mild.correct) == (0, 2)
    assert strict.best_at == mild.best_at
    assert [at or 0 for at in strict.best_at] == pytest.approx([0.7, 0.9])


def test_datasets_without_answers_do_not_vote(tmp_path: Path) -> None:
    place = campaign(tmp_path, {"silent": questions(2), "said": questions(1)}, repeats=2)
    groups = make_profile(collected(place, [[ok(1), ok(1)], [ok(0), ok(0)], [ok(1, "a"), ok(0)]])).summary.groups
    voted = {group.name: [(at.value, at.tasks) for at in group.majority_at] for group in groups}
    assert voted == {"all tasks": [(1.0, 1), (1.0, 1)], "silent": [(None, 0), (None, 0)], "said": [(1.0, 1), (1.0, 1)]}


def test_tokens_turns_latency_and_endings(tmp_path: Path) -> None:
    told = ok(1, input_tokens=10, output_tokens=100, turns=2, latency_s=1.5, finish="length", metrics={"format": 1.0})
    other = ok(0, output_tokens=300, finish="stop", metrics={"format": 0.0, "rare": 4.0})
    found = make_profile(collected(campaign(tmp_path, {"d": questions(1)}), [[told, other, ok(0), failed()]]))
    task, overall = found.tasks[0], found.overall
    for one in (task, overall):
        assert one.output_tokens is not None
        assert (one.output_tokens.n, one.output_tokens.mean, one.output_tokens.total) == (2, 200.0, 400.0)
        assert one.latency_s is not None
        assert (one.latency_s.n, one.latency_s.p95, one.latency_s.std) == (1, 1.5, None)
        assert (dict(one.finish), one.truncated) == ({"length": 1, "stop": 1}, 0.5)
        assert (one.metrics["format"].mean, one.metrics["rare"].n) == (0.5, 1)


def test_a_metric_per_row_does_not_fill_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile_data, "MOST_METRICS", 2)
    place = campaign(tmp_path, {"d": questions(1)}, shards=1)
    done = collected(place, [[ok(1, metrics={f"m{number}": 1.0}) for number in range(4)]])
    found = make_profile(done)
    assert sorted(found.overall.metrics) == ["m0", "m1"]
    assert "2 further metric values were left out: more than 2 names." in found.summary.rules[-1]


def test_ending_names_beyond_a_byte_share_one(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [""]
    codes = [profile_data._code(names, f"n{number}") for number in range(300)]
    assert (codes[0], codes[253], codes[254], codes[299]) == (1, 254, 255, 255)
    assert (len(names), names[-1], profile_data._code(names, "n3")) == (256, "others", 4)


@pytest.mark.parametrize(("ks", "named"), [((), "nothing"), ((0, 1), "0"), ((1, 5), "5"), ((3, 9, 4, 7), "9, 7")])
def test_a_k_that_no_task_has_is_refused(ks: tuple[int, ...], named: str, tmp_path: Path) -> None:
    place = campaign(tmp_path, {"d": questions(1)})
    with pytest.raises(UserError, match=f"^k = {named}: tasks have up to 4 rollouts"):
        make_profile(place, ks=ks)


def test_ks_are_ordered_and_each_once(tmp_path: Path) -> None:
    done = collected(campaign(tmp_path, {"d": questions(1)}), [[ok(1), ok(0), ok(0), ok(0)]])
    said: list[str] = []
    found = make_profile(done, ks=(3, 1, 3), progress=said.append)
    assert (found.summary.ks, found.tasks[0].pass_at) == ((1, 3), (0.25, 0.75))
    assert said[-1].startswith("4 rollouts, 0 failures, 0 missing")


def test_a_directory_that_is_no_campaign(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no manifest\.json"):
        make_profile(CampaignDir(tmp_path))
