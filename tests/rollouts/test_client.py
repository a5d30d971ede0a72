"""What runs in a task: its shards, from the backend and with the verifiers that the campaign names."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import orjson
import pytest

from seatrial.core.errors import BlockedError, UserError
from seatrial.rollouts import campaign_rounds, manifest
from seatrial.rollouts.campaign import Campaign, Verify
from seatrial.rollouts.campaign_dir import CampaignDir
from seatrial.rollouts.campaign_rounds import agents_of, base_url, collect_task, make_verifiers
from seatrial.rollouts.rollout_record import RolloutOutcome, Unit
from tests.rollouts.collecting import Told, fine, make, prompts
from tests.rollouts.collecting import run as collect_here
from tests.rollouts.served import halves, serving
from tests.rollouts.test_campaign import made


@pytest.mark.parametrize(
    ("said", "base"),
    [
        ("http://node-3:8123", "http://node-3:8123/v1"),
        ("http://node-3:8123/", "http://node-3:8123/v1"),
        ("https://host/v1", "https://host/v1"),
        ("https://host/v1/", "https://host/v1"),
        ("https://host/openai/deployments/x", "https://host/openai/deployments/x"),
    ],
)
def test_a_server_in_the_job_is_known_by_host_and_port(said: str, base: str) -> None:
    assert base_url(said) == base


def planned(place: CampaignDir, tasks: dict[int, int], parallel: int) -> None:
    campaign_rounds.save_round(place, campaign_rounds.plan_round(place, tasks, 10, "local", parallel))


def test_a_task_collects_its_own_shards_and_says_what_they_owe(tmp_path: Path) -> None:
    place, _ = make(tmp_path, halves(4), verifier="choice", work={"repeats": 2, "shards": 2})
    planned(place, {0: 4, 1: 4}, 2)
    with serving() as stub:
        first = collect_task(place, 1, 0, [f"http://127.0.0.1:{stub.port}"], None, lambda _: None)
        assert (first.reason, first.ok, first.owed, stub.calls) == ("done", 4, 0, 4)
        again = collect_task(place, 1, 0, [stub.url], None, lambda _: None)
        assert (again.ok, stub.calls) == (4, 4)
    assert not place.shard(1).exists()


def test_a_task_that_the_round_does_not_have_is_refused(tmp_path: Path) -> None:
    place, _ = make(tmp_path, prompts(2))
    planned(place, {0: 2}, 1)
    with pytest.raises(UserError, match="round 1 has 1 tasks, and no task 1"):
        collect_task(place, 1, 1, (), None, lambda _: None)
    with pytest.raises(UserError, match=r"0002/plan\.json"):
        collect_task(place, 2, 0, (), None, lambda _: None)


def test_a_pre_hosted_policy_that_nobody_serves_blocks_within_its_deadline(tmp_path: Path) -> None:
    place, _ = make(tmp_path, prompts(2))
    planned(place, {0: 2}, 1)
    with pytest.raises(BlockedError, match="no server of the policy answered within"):
        collect_task(place, 1, 0, (), None, lambda _: None)


def test_all_slots_work_on_in_the_next_shard(tmp_path: Path) -> None:
    place, campaign = make(tmp_path, prompts(24), work={"shards": 6}, requests={"concurrency": 4})
    open_at: list[int] = []

    async def act(unit: Unit) -> RolloutOutcome:
        await asyncio.sleep(0.01)
        open_at.append(backend.open_now)
        return await fine(unit)

    backend = Told(act)
    ended = collect_here(place, campaign, backend, shards=range(6))
    assert (ended.reason, ended.ok, ended.owed) == ("done", 24, 0)
    # The limit may halve; a worker that left for good would leave one slot for all that follows.
    assert max(open_at[-8:]) == 4


def test_agents_are_those_of_the_rows_of_the_task(tmp_path: Path) -> None:
    rows = [{"responses_create_params": {"input": "hi"}, "agent_ref": {"name": name}, "n": number} for number, name in enumerate("abc")]
    (tmp_path / "rows.jsonl").write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    said = {"name": "g", "datasets": [{"name": "rows", "path": "rows.jsonl"}], "policy": {"url": "http://h/v1"}, "work": {"shards": 3}}
    place = CampaignDir(tmp_path / "campaign")
    manifest.create_campaign(Campaign.model_validate({**said, "gym": {"resources": ["mcqa"]}}), tmp_path, place)
    assert agents_of(place, [0, 2]) == {"a", "c"}


def verifiers(**more: Any) -> dict[str, Any]:
    datasets = [{"name": "a", "path": "a"}, {"name": "b", "path": "b"}, {"name": "c", "path": "c", "verifier": "choice"}]
    return dict(make_verifiers(made(datasets=datasets, **more), ["http://p/v1"]))


def test_datasets_that_are_scored_alike_share_a_verifier() -> None:
    found = verifiers(verifier="exact")
    assert found["a"] is found["b"]
    assert found["a"] is not found["c"]


def test_a_judge_without_an_address_is_the_policy_with_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Verify] = []
    monkeypatch.setattr("seatrial.rollouts.verifiers.make_verifier", lambda verify, *_: seen.append(verify))
    verifiers(verifier="judge", policy={"url": "http://p/v1", "model": "m", "key_env": "K"})
    judge = next(verify for verify in seen if verify.kind == "judge")
    assert (judge.url, judge.model, judge.key_env) == ("http://p/v1", "m", "K")
