"""The collector with the direct backend over real connections: overload, poison, a server that dies."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from seatrial.rollouts import collect_engine
from seatrial.rollouts.backends.direct_backend import DirectBackend
from seatrial.rollouts.campaign import Campaign
from seatrial.rollouts.campaign_dir import CampaignDir
from seatrial.rollouts.collect_engine import CollectEnd, Collector
from seatrial.rollouts.manifest import Units, load_manifest
from tests.rollouts.collecting import Boxed, heads, make, rows
from tests.rollouts.stub import Stub, reply


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collect_engine, "_LOOK_S", 0.01)
    monkeypatch.setattr("os.fsync", lambda handle: None)


def gather(place: CampaignDir, campaign: Campaign, stub: Stub, beside: Callable[[], Awaitable[Any]] | None = None) -> CollectEnd:
    """Collect from a stub that runs in the same loop."""

    async def main() -> CollectEnd:
        async with stub:
            backend = DirectBackend(campaign, [stub.url], {"rows": Boxed()}, None)
            other = asyncio.ensure_future(beside()) if beside else None
            with Units(place, load_manifest(place)) as units:
                run = Collector(place, campaign, units, [0], backend, stop=lambda: None, progress=lambda _: None).run()
                ended = await asyncio.wait_for(run, 20)
            if other is not None:
                await other
            return ended

    return asyncio.run(main())


def test_what_is_written_is_what_the_server_said(tmp_path: Path) -> None:
    prompts = [f"{number} [[gold=C p=0.5]]" for number in range(8)]
    place, campaign = make(tmp_path, prompts, work={"shards": 1, "repeats": 4})
    assert gather(place, campaign, Stub()).ok == 32
    written = {head.unit: head for head in heads(place)}
    for number, row in rows(place).items():
        text = reply(prompts[row["_ng_task_index"]], written[number].seed)
        assert row["response"]["output"][0]["content"][0]["text"] == text
        assert row["reward"] == written[number].reward == float(text.endswith("{C}"))
    assert len({head.seed for head in written.values()}) == 32


@pytest.mark.parametrize("marker", ["[[status=500]]", "[[drop]]", "[[garbage]]", "[[context]]", "[[hang]]"])
def test_one_poisoned_prompt_costs_one_row(tmp_path: Path, marker: str) -> None:
    prompts = [f"fine {number}" for number in range(9)]
    place, campaign = make(tmp_path, [*prompts, f"poison {marker}"], requests={"tries": 2, "timeout_s": 0.15})
    ended = gather(place, campaign, Stub())
    assert (ended.reason, ended.ok, ended.failed + ended.owed) == ("done", 9, 1)
    (failed,) = [head for head in heads(place) if not head.ok]
    assert failed.unit == 9


def test_two_failures_of_a_server_heal(tmp_path: Path) -> None:
    place, campaign = make(tmp_path, ["a [[status=500 times=2]]", "b [[status=503 times=2]]"])
    assert gather(place, campaign, Stub()).ok == 2
    assert {head.tries for head in heads(place)} == {3}


def test_a_server_that_does_four_at_a_time_loses_nothing_and_is_kept_busy(tmp_path: Path) -> None:
    place, campaign = make(tmp_path, [f"q {number}" for number in range(150)], requests={"concurrency": 48, "backoff_s": 0.005})
    stub = Stub(capacity=4, latency_s=0.002)
    ended = gather(place, campaign, stub)
    assert (ended.reason, ended.ok) == ("done", 150)
    assert stub.most_open == 4
    assert stub.refused < 150, "most requests are taken the first time"


def test_a_server_that_dies_and_comes_back_costs_nobody_a_try(tmp_path: Path) -> None:
    place, campaign = make(tmp_path, [f"q {number}" for number in range(60)], requests={"concurrency": 4, "tries": 1, "dead_s": 5.0})
    stub = Stub(latency_s=0.01)

    async def beside() -> None:
        while stub.calls < 20:
            await asyncio.sleep(0.005)
        await stub.die()
        await asyncio.sleep(0.3)
        await stub.start()

    ended = gather(place, campaign, stub, beside)
    assert (ended.reason, ended.ok) == ("done", 60), "one try is all that a unit has here"


def test_a_server_that_stays_dead_ends_the_shard_in_time(tmp_path: Path) -> None:
    place, campaign = make(tmp_path, [f"q {number}" for number in range(60)], requests={"concurrency": 4})
    stub = Stub(latency_s=0.01)

    async def beside() -> float:
        while stub.calls < 20:
            await asyncio.sleep(0.005)
        await stub.die()
        return asyncio.get_running_loop().time()

    ended = gather(place, campaign, stub, beside)
    assert ended.reason == "servers"
    assert "nobody answered for 0.2 s" in ended.message
    assert ended.ok + ended.owed == 60
    assert all(head.ok for head in heads(place))
    assert gather(place, campaign, Stub()).ok == 60
    assert len(rows(place)) == 60
