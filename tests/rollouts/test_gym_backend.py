"""Units through the agents of a stand-in for Gym: each failure is its row's, and what dies ends everything at once."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from seatrial.core.errors import UserError
from seatrial.rollouts.backends import gym_install
from seatrial.rollouts.backends.gym_backend import GymBackend
from seatrial.rollouts.rollout_record import FailureKind, RolloutError, RolloutOutcome, ServersGoneError
from tests.rollouts.gym_instance import KEY, Loop, campaign, fake_installation, hurry, unit
from tests.rollouts.stub import Stub

pytestmark = pytest.mark.slow

__all__ = ["hurry"]


class Running:
    """A backend that is open, and the policy behind it."""

    def __init__(self, tmp_path: Path, **more: Any) -> None:
        self.loop, self.stub = Loop(), Stub(models=more.pop("models", ("stub",)))
        self.loop(self.stub.start())
        agents = more.pop("agents", ("mcqa_simple_agent",))
        self.backend = GymBackend(campaign(self.stub.url, **more), [self.stub.url], KEY, tmp_path / "logs", agents=agents)

    def close(self) -> None:
        self.loop(self.backend.close())
        self.loop(self.stub.die())
        self.loop.close()


@pytest.fixture(scope="module")
def installation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[gym_install.Installation]:
    found = fake_installation(tmp_path_factory.mktemp("gym"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gym_install, "find_gym", lambda _: found)
        yield found


@pytest.fixture(scope="module")
def running(installation: gym_install.Installation, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    found = Running(tmp_path_factory.mktemp("run"), requests={"timeout_s": 0.5})
    found.loop(found.backend.open())
    yield found
    found.close()


def test_a_rollout_is_the_agents_answer_with_our_indices(running: Running) -> None:
    assert running.loop(running.backend.alive()) is None
    outcomes = [running.loop(running.backend.roll(unit(3, agent=agent))) for agent in ("mcqa_simple_agent", "other_agent")]
    assert [outcome.row["agent_ref"] for outcome in outcomes] == [{"name": "mcqa_simple_agent"}, {"name": "other_agent"}]
    assert (outcomes[0].reward, outcomes[0].row["_ng_task_index"]) == (1.0, 3)


@pytest.mark.parametrize(
    ("mark", "kind", "heals", "words"),
    [
        ("boom", FailureKind.HTTP_5XX, True, "HTTP 500: Agent___a: out of luck"),
        ("hang", FailureKind.TIMEOUT, True, "no rollout within 0.5 s"),
        ("class", FailureKind.AGENT, True, "the agent failed: tool"),
        ("class terminal", FailureKind.AGENT, False, "the agent failed: tool"),
        ("text", FailureKind.PARSE, True, "not an object"),
        ("high", FailureKind.REWARD, False, "'high'"),
    ],
)
def test_a_failure_is_its_rows_alone(running: Running, mark: str, kind: FailureKind, heals: bool, words: str) -> None:
    async def both() -> tuple[RolloutOutcome | BaseException, RolloutOutcome | BaseException]:
        return await asyncio.gather(running.backend.roll(unit(0, mark)), running.backend.roll(unit(1)), return_exceptions=True)

    failed, fine = running.loop(both())
    assert isinstance(fine, RolloutOutcome)
    assert isinstance(failed, RolloutError)
    assert (failed.kind, failed.heals) == (kind, heals)
    assert words in str(failed)


def test_an_agent_that_gym_has_not_is_told_with_those_it_has(running: Running) -> None:
    with pytest.raises(RolloutError, match="no agent 'nobody'; it has: mcqa_simple_agent, other_agent") as caught:
        running.loop(running.backend.roll(unit(0, agent="nobody")))
    assert not caught.value.heals


def test_what_is_wrong_from_the_start_starts_nothing(installation: gym_install.Installation, tmp_path: Path) -> None:
    del installation
    found = Running(tmp_path, models=("a", "b"))
    try:
        with pytest.raises(UserError, match=r"policy.model is not said, and the server lists 2: a, b"):
            found.loop(found.backend.open())
        with pytest.raises(RuntimeError, match="not open"):
            _ = found.backend.servers
    finally:
        found.close()


def test_an_agent_of_a_campaign_that_gym_has_not_is_told_before_anything_is_rolled_out(
    installation: gym_install.Installation, tmp_path: Path
) -> None:
    del installation
    found = Running(tmp_path, agents=("nobody",))
    try:
        with pytest.raises(UserError, match="no agent 'nobody'; it has: mcqa_simple_agent"):
            found.loop(found.backend.open())
        assert not (tmp_path / "logs" / "gym.log.pids").exists()
    finally:
        found.close()


def test_a_death_ends_open_requests_at_once(installation: gym_install.Installation, tmp_path: Path) -> None:
    del installation
    found = Running(tmp_path, requests={"dead_s": 0.2})

    async def killed() -> None:
        await found.backend.open()
        hanging = [asyncio.create_task(found.backend.roll(unit(number, "hang"))) for number in range(2)]
        await asyncio.sleep(0.1)
        began = time.monotonic()
        os.kill(found.backend.servers.instances[0].pid, signal.SIGKILL)
        for task in hanging:
            with pytest.raises(ServersGoneError, match="server mcqa died"):
                await task
        assert time.monotonic() - began < 15  # their own timeout is 20
        assert "server mcqa died" in str(await found.backend.alive())

    try:
        found.loop(killed())
    finally:
        found.close()


def test_a_policy_that_is_gone_ends_them_too(installation: gym_install.Installation, tmp_path: Path) -> None:
    del installation
    found = Running(tmp_path, requests={"dead_s": 0.2})

    async def deserted() -> None:
        await found.backend.open()
        await found.stub.die()
        with pytest.raises(ServersGoneError, match="nobody of the policy answered"):
            await found.backend.roll(unit(0, "hang"))

    try:
        found.loop(deserted())
    finally:
        found.close()


def test_an_opening_that_is_cancelled_leaves_nothing_behind(
    installation: gym_install.Installation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    del installation
    monkeypatch.setenv("FAKE_GYM", "deaf")
    found = Running(tmp_path)

    async def cancelled() -> Path:
        opening = asyncio.create_task(found.backend.open())
        while found.backend._servers is None:
            await asyncio.sleep(0.01)
        private = found.backend.servers.private.root
        await asyncio.sleep(0.3)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        return private

    try:
        assert not found.loop(cancelled()).exists()
    finally:
        found.close()
