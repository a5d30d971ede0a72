"""Rounds: what is launched, in which jobs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from seatrial.core.errors import UserError
from seatrial.core.jobs import Batch
from seatrial.rollouts import campaign_rounds
from seatrial.rollouts.campaign_dir import CampaignDir
from tests.rollouts.test_campaign import SERVER, made


def test_the_first_round_has_a_task_per_shard(tmp_path: Path) -> None:
    planned = campaign_rounds.plan_round(CampaignDir(tmp_path), {2: 5, 0: 5, 1: 5}, 5, "slurm:x")
    assert planned.tasks == ((0,), (1,), (2,))
    assert (planned.number, planned.owed) == (1, 15)


def test_on_this_machine_all_shards_are_dealt_to_the_tasks_that_run_at_a_time(tmp_path: Path) -> None:
    owed = dict.fromkeys(range(5), 10)
    assert campaign_rounds.plan_round(CampaignDir(tmp_path), owed, 10, "local").tasks == ((0, 1, 2, 3, 4),)
    assert campaign_rounds.plan_round(CampaignDir(tmp_path), owed, 10, "local", 2).tasks == ((0, 2, 4), (1, 3))
    assert campaign_rounds.plan_round(CampaignDir(tmp_path), {7: 1}, 10, "local", 3).tasks == ((7,),)


def test_where_an_array_takes_fewer_tasks_each_has_several_shards(tmp_path: Path) -> None:
    place, owed = CampaignDir(tmp_path), dict.fromkeys(range(7), 10)
    first = campaign_rounds.plan_round(place, owed, 10, "slurm:x", most=3)
    assert first.tasks == ((0, 3, 6), (1, 4), (2, 5))
    assert campaign_rounds.plan_round(place, owed, 10, "slurm:x", most=7).tasks == tuple((shard,) for shard in range(7))
    campaign_rounds.save_round(place, first)
    assert campaign_rounds.plan_round(place, {0: 5, 1: 5, 2: 10, 3: 9}, 10, "slurm:x", most=2).tasks == ((0, 1, 3), (2,))


def test_what_is_left_over_is_packed_into_tasks_of_a_full_shard(tmp_path: Path) -> None:
    place = CampaignDir(tmp_path)
    campaign_rounds.save_round(place, campaign_rounds.plan_round(place, dict.fromkeys(range(6), 10), 10, "slurm:x"))
    later = campaign_rounds.plan_round(place, {0: 4, 1: 6, 3: 1, 4: 10, 5: 2}, 10, "slurm:x")
    assert later.tasks == ((0, 1), (3,), (4,), (5,))
    assert later.number == 2
    campaign_rounds.save_round(place, later)
    assert [item.number for item in campaign_rounds.list_rounds(place)] == [1, 2]
    assert campaign_rounds.load_round(place, 2) == later


def batch(tmp_path: Path, tasks: int = 3, merge: bool = False, **changes: Any) -> Batch:
    campaign = made(**changes)
    planned = campaign_rounds.plan_round(CampaignDir(tmp_path), dict.fromkeys(range(tasks), 10), 10, "slurm:x")
    return campaign_rounds.batch_of(CampaignDir(tmp_path), campaign, planned, 8, merge=merge)


def test_a_pre_hosted_policy_needs_the_collector_alone(tmp_path: Path) -> None:
    (job,) = batch(tmp_path, work={"parallel": 2}).jobs
    assert [item.name for item in job.components] == ["client"]
    assert (job.array, job.parallel) == (3, 2)
    assert job.client.command[-6:] == ("collect", str(tmp_path), "--round", "1", "--task", "{index}")


def test_servers_stand_in_the_same_job_with_one_address_or_all_of_them(tmp_path: Path) -> None:
    (job,) = batch(tmp_path, policy={"server": {**SERVER, "replicas": 2}}).jobs
    assert [item.name for item in job.components] == ["policy", "client"]
    assert job.client.command[-2:] == ("--urls", "{urls:policy}")
    (job,) = batch(tmp_path, policy={"server": {**SERVER, "replicas": 2, "route": True, "name": "other"}}).jobs
    assert [item.name for item in job.components] == ["policy-copy", "policy", "client"]
    assert job.client.command[-2:] == ("--urls", "{url:policy}")


def test_the_sandbox_stands_beside_gym(tmp_path: Path) -> None:
    (job,) = batch(tmp_path, gym={"resources": ["code_gen"]}, verifier=None, sandbox_service=True).jobs
    assert [item.name for item in job.components] == ["sandbox", "client"]
    assert job.client.command[-2:] == ("--sandbox", "{url:sandbox}")


def test_on_a_cluster_the_merge_comes_after_the_collecting_tasks_however_they_ended(tmp_path: Path) -> None:
    collect, merge = batch(tmp_path, merge=True, collector={"minutes": 30}).jobs
    assert collect.minutes == 30
    assert [(after.job, after.when) for after in merge.after] == [("collect", "any")]
    assert merge.client.command[-2:] == ("finish", str(tmp_path))


def test_the_time_limit_of_a_shards_job_holds_for_no_task_here(tmp_path: Path) -> None:
    planned = campaign_rounds.plan_round(CampaignDir(tmp_path), {0: 1}, 1, "local")
    (job,) = campaign_rounds.batch_of(CampaignDir(tmp_path), made(collector={"minutes": 30}), planned, 8, merge=False).jobs
    assert job.minutes is None


def test_a_collector_in_a_container_sees_the_campaign(tmp_path: Path) -> None:
    (job,) = batch(tmp_path, collector={"container": "gym", "mounts": ["/data:/data"]}).jobs
    assert job.client.mounts[0] == f"{tmp_path}:{tmp_path}"
    assert "/data:/data" in job.client.mounts


def test_a_directory_with_words_in_braces_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="braces"):
        batch(tmp_path / "{index}")
