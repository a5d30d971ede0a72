"""Every way in which a collector ends: stopped, out of budget, without servers, fenced off; and what is owed then."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from seatrial.core.errors import BlockedError
from seatrial.core.files import read_model
from seatrial.core.verdict import Boundary
from seatrial.rollouts import collect_engine
from seatrial.rollouts.campaign import Failures
from seatrial.rollouts.campaign_dir import (
    CampaignDir,
    ShardState,
    Stop,
    newest_states,
    read_stop_file,
    set_stop_file_aside,
    write_stop_file,
)
from seatrial.rollouts.collect_engine import FailureBudget
from seatrial.rollouts.rollout_record import FailureKind, RolloutError, RolloutOutcome, ServersGoneError, Unit
from tests.rollouts.collecting import Told, failing, fine, heads, make, prompts, rows, run


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collect_engine, "_LOOK_S", 0.01)
    monkeypatch.setattr(collect_engine, "_KEEP_S", 0.02)
    monkeypatch.setattr("os.fsync", lambda handle: None)


def test_asked_to_stop_it_drains_what_is_open_and_leaves_the_rest_owed(tmp_path: Path) -> None:
    gate = asyncio.Event()
    asked: list[str] = []

    async def act(unit: Unit) -> RolloutOutcome:
        asked.append("stop now")
        await gate.wait()
        return await fine(unit)

    async def beside() -> None:
        await asyncio.sleep(0.15)
        gate.set()

    place, campaign = make(tmp_path, prompts(30), requests={"concurrency": 4})
    ended = run(place, campaign, Told(act), stop=lambda: asked[0] if asked else None, beside=beside)
    assert (ended.reason, ended.message, ended.ok, ended.owed) == ("stopped", "stop now", 4, 26)
    assert run(place, campaign, Told(fine)).ok == 30
    assert len(rows(place)) == 30


def test_the_drain_has_a_deadline_and_units_that_wait_do_not_hold_it_up(tmp_path: Path) -> None:
    async def act(unit: Unit) -> RolloutOutcome:
        if unit.number:
            raise RolloutError(FailureKind.HTTP_5XX, "later", after_s=60)
        await asyncio.sleep(60)
        return await fine(unit)

    place, campaign = make(tmp_path, prompts(3))
    ended = run(place, campaign, Told(act), stop=lambda: "time is up", drain_s=0.05)
    assert (ended.reason, ended.owed) == ("stopped", 3)
    assert heads(place) == []


def test_too_many_failures_stop_the_campaign_for_everybody(tmp_path: Path) -> None:
    failures = {"max_share": 0.5, "after": 4}
    place, campaign = make(tmp_path, prompts(40), work={"shards": 2}, failures=failures, requests={"concurrency": 1})
    ended = run(place, campaign, failing(FailureKind.HTTP_4XX, *range(40)))
    assert (ended.reason, ended.failed) == ("budget", 4)
    assert "4 of 4 units failed (100%); failures.max_share is 0.5" in ended.message
    assert "shard 0" in read_model(place.stop, Stop).by
    backend = Told(fine)
    assert run(place, campaign, backend, shards=[1]).reason == "budget"
    assert backend.opened == 0
    set_stop_file_aside(place)
    assert run(place, campaign, Told(fine), shards=[1]).reason == "done", "4 of 24 is within the budget"


def test_failures_of_other_shards_count(tmp_path: Path) -> None:
    limits = {"max_count": 5, "after": 1000}
    place, campaign = make(tmp_path, prompts(12), work={"shards": 2}, failures=limits, requests={"concurrency": 1})
    assert run(place, campaign, failing(FailureKind.HTTP_4XX, 0, 2, 4, 6)).failed == 4

    async def act(unit: Unit) -> RolloutOutcome:
        await asyncio.sleep(0.03)
        raise RolloutError(FailureKind.HTTP_4XX, "no")

    ended = run(place, campaign, Told(act), shards=[1])
    assert (ended.reason, ended.failed) == ("budget", 2)
    assert "6 of 8 units failed; failures.max_count is 5" in ended.message


def test_units_given_up_for_now_count_while_their_attempt_runs_and_not_after_it(tmp_path: Path) -> None:
    limits = {"max_count": 3}
    place, campaign = make(tmp_path, prompts(8), work={"shards": 2}, failures=limits, requests={"concurrency": 1, "tries": 1})
    ended = run(place, campaign, failing(FailureKind.HTTP_5XX, *range(8)))
    assert (ended.reason, ended.owed) == ("budget", 4)
    set_stop_file_aside(place)
    assert run(place, campaign, Told(fine), shards=[0, 1]).ok == 8


def test_somebody_else_stops_the_campaign_while_we_collect(tmp_path: Path) -> None:
    place, campaign = make(tmp_path, prompts(50), requests={"concurrency": 1})

    async def act(unit: Unit) -> RolloutOutcome:
        write_stop_file(place, "enough", "a test")
        await asyncio.sleep(0.02)
        return await fine(unit)

    ended = run(place, campaign, Told(act))
    assert (ended.reason, ended.message) == ("budget", "enough")
    assert 0 < ended.ok < 50
    assert read_stop_file(place) is not None


def test_a_dead_endpoint_ends_the_shard_within_its_deadline_and_costs_no_unit_a_try(tmp_path: Path) -> None:
    place, campaign = make(tmp_path, prompts(5))
    said: list[str] = []

    async def act(unit: Unit) -> RolloutOutcome:
        raise RolloutError(FailureKind.CONNECTION, "refused")

    ended = run(place, campaign, Told(act, dead=lambda: "refused"), said=said)
    assert (ended.reason, ended.owed) == ("servers", 5)
    assert ended.message == "nobody answered for 0.2 s: refused"
    assert heads(place) == []
    assert any("nobody answers, waiting up to 0.2 s" in line for line in said)


def test_a_server_that_comes_back_within_the_deadline_goes_on(tmp_path: Path) -> None:
    dead: list[bool] = []

    async def act(unit: Unit) -> RolloutOutcome:
        if unit.number == 2 and not dead:
            dead.append(True)
        if dead and dead[0]:
            raise RolloutError(FailureKind.CONNECTION, "reset")
        return await fine(unit)

    async def beside() -> None:
        await asyncio.sleep(0.15)
        dead[0] = False

    place, campaign = make(tmp_path, prompts(10), requests={"tries": 2})
    backend = Told(act, dead=lambda: "refused" if dead and dead[0] else None)
    ended = run(place, campaign, backend, beside=beside)
    assert (ended.reason, ended.ok) == ("done", 10)


def test_a_connection_that_one_prompt_loses_costs_that_row(tmp_path: Path) -> None:
    place, campaign = make(tmp_path, prompts(10), requests={"tries": 3})
    backend = failing(FailureKind.CONNECTION, 4)
    ended = run(place, campaign, backend)
    assert (ended.reason, ended.ok, ended.owed) == ("done", 9, 1)
    assert backend.rolled.count(4) == 3


def test_a_prompt_that_kills_the_server_each_time_is_given_up(tmp_path: Path) -> None:
    down: list[int] = []

    async def act(unit: Unit) -> RolloutOutcome:
        if unit.number == 1:
            down.append(2)
            raise RolloutError(FailureKind.CONNECTION, "the server went away")
        return await fine(unit)

    def dead() -> str | None:
        if down and down[-1]:
            down[-1] -= 1
            return "refused"
        return None

    place, campaign = make(tmp_path, prompts(3), requests={"tries": 2})
    ended = run(place, campaign, Told(act, dead=dead))
    assert (ended.reason, ended.ok, ended.owed, len(down)) == ("done", 2, 1, 3)


def test_a_server_that_hangs_is_noticed_without_a_lost_connection(tmp_path: Path) -> None:
    async def act(unit: Unit) -> RolloutOutcome:
        await asyncio.sleep(60)
        return await fine(unit)

    place, campaign = make(tmp_path, prompts(2))
    assert run(place, campaign, Told(act, dead=lambda: "no answer")).reason == "servers"


def test_a_backend_that_knows_ends_it_at_once(tmp_path: Path) -> None:
    async def act(unit: Unit) -> RolloutOutcome:
        raise ServersGoneError("the policy's process ended with 1")

    place, campaign = make(tmp_path, prompts(2))
    backend = Told(act)
    ended = run(place, campaign, backend)
    assert (ended.reason, ended.message, ended.owed) == ("servers", "the policy's process ended with 1", 2)
    assert backend.closed == 1


def test_what_blocks_is_raised_and_everything_is_closed(tmp_path: Path) -> None:
    async def act(unit: Unit) -> RolloutOutcome:
        raise BlockedError(Boundary.ENVIRONMENT, "no sandbox here", "install bubblewrap")

    place, campaign = make(tmp_path, prompts(2))
    backend = Told(act)
    with pytest.raises(BlockedError, match="no sandbox here"):
        run(place, campaign, backend)
    assert backend.closed == 1
    assert state(place).ended == "error"
    assert run(place, campaign, Told(fine)).ok == 2, "the lease was let go"


def test_a_newer_attempt_fences_this_one_off(tmp_path: Path) -> None:
    place, campaign = make(tmp_path, prompts(20), requests={"concurrency": 1})

    async def act(unit: Unit) -> RolloutOutcome:
        if unit.number == 3:
            (place.shard(0) / "lease-0007.json").write_text("{}")
            await asyncio.sleep(0.1)
        return await fine(unit)

    ended = run(place, campaign, Told(act))
    assert ended.reason == "fenced"
    assert "shard 0 was taken over" in ended.message
    assert (ended.ok, ended.owed) == (3, 17)
    assert state(place).ended == "fenced"


def test_a_shard_that_somebody_holds_is_left_to_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from seatrial.rollouts import dispatcher
    from seatrial.rollouts.journal.attempts import Lease, LeaseHolder

    monkeypatch.setattr(dispatcher, "WAIT_S", 0.05)
    place, campaign = make(tmp_path, prompts(6), work={"shards": 2})
    with Lease.acquire(place.shard(0), LeaseHolder.here(), 1):
        ended = run(place, campaign, Told(fine), shards=[0, 1])
    assert (ended.reason, ended.ok, ended.owed) == ("fenced", 3, 3)
    assert "holds the lease" in ended.message


def test_a_wait_for_a_lease_ends_when_asked_to_stop(tmp_path: Path) -> None:
    from seatrial.rollouts.journal.attempts import Lease, LeaseHolder

    place, campaign = make(tmp_path, prompts(2))
    with Lease.acquire(place.shard(0), LeaseHolder.here(), 1):
        backend = Told(fine)
        assert run(place, campaign, backend, stop=lambda: "now").reason == "stopped"
    assert backend.opened == 0


def test_only_some_units_can_be_done(tmp_path: Path) -> None:
    place, campaign = make(tmp_path, prompts(6))
    ended = run(place, campaign, Told(fine), only=lambda number: number % 2 == 0)
    assert (ended.reason, ended.ok, ended.owed) == ("done", 3, 3)


def test_the_state_says_how_it_stands(tmp_path: Path) -> None:
    place, campaign = make(tmp_path, prompts(6), failures={"max_count": 10}, requests={"tries": 1})
    run(place, campaign, failing(FailureKind.HTTP_5XX, 1))
    run(place, campaign, failing(FailureKind.CONTEXT_LENGTH, 1))
    last = state(place)
    assert (last.attempt, last.ended, last.units, last.owed, last.ok, last.failed) == (2, "done", 6, 0, 5, 1)
    assert (last.kinds, last.collected, last.reward_sum) == ({"context-length": 1}, 0, 14.0)
    assert last.message == "made to fail 1"
    assert last.pid
    assert last.host


def state(place: CampaignDir) -> ShardState:
    return newest_states(place, [0])[0][0]


def strangers(*numbers: int) -> Told:
    """A backend in which these units meet somebody who does not know what they ask for."""
    return failing(FailureKind.HTTP_4XX, *numbers, heals=True)


@pytest.mark.parametrize("count", [1, 2, 30])
def test_when_nobody_knows_what_we_ask_for_it_ends_at_once(tmp_path: Path, count: int) -> None:
    place, campaign = make(tmp_path, prompts(count), requests={"tries": 2})
    backend = strangers(*range(count))
    ended = run(place, campaign, backend)
    assert (ended.reason, ended.ok, ended.failed, ended.owed) == ("servers", 0, 0, count)
    assert ended.message.startswith("no request was answered in any other way than: made to fail")
    assert len(backend.rolled) <= max(campaign.requests.concurrency, 4)


@pytest.mark.parametrize("other", [0, 29])
def test_one_poisoned_row_is_no_wrong_address(tmp_path: Path, other: int) -> None:
    place, campaign = make(tmp_path, prompts(30), requests={"tries": 3, "concurrency": 1})
    ended = run(place, campaign, strangers(other))
    assert (ended.reason, ended.ok, ended.owed) == ("done", 29, 1)
    assert ended.message == f"What is owed failed, and may heal; the last message: made to fail {other}"


def test_nor_are_those_that_are_left_of_a_shard_that_worked(tmp_path: Path) -> None:
    place, campaign = make(tmp_path, prompts(4), requests={"tries": 1, "attempts": 2})
    assert run(place, campaign, strangers(1, 2, 3)).owed == 3
    ended = run(place, campaign, strangers(1, 2, 3))
    assert (ended.reason, ended.ok, ended.failed) == ("done", 1, 3)


@pytest.mark.parametrize(
    ("limits", "failed", "known", "setting"),
    [
        (Failures(max_share=0.2), 40, 100, "failures.max_share=0.6"),
        (Failures(max_share=0.2), 99, 100, "failures.max_share=1"),
        (Failures(max_count=2), 3, 10, "failures.max_count=6"),
        (Failures(max_share=0.2), 20, 100, None),
    ],
)
def test_what_would_accept_so_many_failures(limits: Failures, failed: int, known: int, setting: str | None, tmp_path: Path) -> None:
    found = FailureBudget(limits, CampaignDir(tmp_path), 1, frozenset({0})).exceeded(known - failed, failed)
    assert (found[1] if found else None) == setting
