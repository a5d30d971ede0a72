"""Gym's own collector, played by a stand-in, through the seam: a row that ends it costs that row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from seatrial.core.errors import BlockedError
from seatrial.rollouts.backends import gym_backend, gym_install
from seatrial.rollouts.backends.gym_backend import GymBackend, collect_with_gym
from seatrial.rollouts.rollout_record import FailureKind, RolloutError, RolloutOutcome, Unit
from tests.rollouts.gym_instance import KEY, Loop, campaign, fake_installation, hurry, unit
from tests.rollouts.stub import Stub

pytestmark = pytest.mark.slow

__all__ = ["hurry"]


class Collecting:
    """An open backend; calling it collects."""

    def __init__(self, loop: Loop, backend: GymBackend) -> None:
        self.loop, self.backend = loop, backend

    def __call__(self, units: Sequence[Unit], directory: Path) -> dict[int, RolloutOutcome | RolloutError]:
        async def collect() -> list[tuple[Unit, RolloutOutcome | RolloutError]]:
            return [done async for done in collect_with_gym(self.backend, units, directory)]

        done = self.loop(collect())
        assert len({one.number for one, _ in done}) == len(done)
        return {one.number: outcome for one, outcome in done}


@pytest.fixture(scope="module")
def collecting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Collecting]:
    root, loop, stub = tmp_path_factory.mktemp("collect"), Loop(), Stub()
    loop(stub.start())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gym_install, "find_gym", lambda _: fake_installation(root / "gym"))
        about = campaign(stub.url, gym={"driver": "collector"}, requests={"timeout_s": 20, "concurrency": 2})
        backend = GymBackend(about, [stub.url], KEY, root / "logs")
        loop(backend.open())
    yield Collecting(loop, backend)
    loop(backend.close())
    loop(stub.die())
    loop.close()


def failures(found: dict[int, RolloutOutcome | RolloutError]) -> dict[int, FailureKind]:
    return {number: outcome.kind for number, outcome in found.items() if isinstance(outcome, RolloutError)}


def test_every_row_comes_out_once_and_the_one_that_ends_the_collector_is_found(collecting: Collecting, tmp_path: Path) -> None:
    found = collecting([unit(number, "boom" if number == 5 else "") for number in range(8)], tmp_path)
    assert found.keys() == set(range(8))
    assert failures(found) == {5: FailureKind.HTTP_5XX}
    assert "ClientResponseError: 500" in str(found[5])
    assert isinstance(found[0], RolloutOutcome)
    assert found[0].row["_ng_task_index"] == 0
    assert [path.name for path in tmp_path.iterdir()] == ["gym-collect.log"]


def test_failures_of_agents_and_rows_that_leave_no_trace_are_failures(collecting: Collecting, tmp_path: Path) -> None:
    found = collecting([unit(0), unit(1, "class"), unit(2, "lost"), unit(3, "lost")], tmp_path)
    assert failures(found) == dict.fromkeys((1, 2, 3), FailureKind.AGENT)
    assert all(outcome.heals for outcome in found.values() if isinstance(outcome, RolloutError))


def test_a_row_that_cannot_be_sent_starts_nothing(collecting: Collecting, tmp_path: Path) -> None:
    sound = unit(0)
    params = {"input": "q", "metadata": {"extra_body": "no object"}}
    found = collecting([replace(sound, row=replace(sound.row, data={"responses_create_params": params}))], tmp_path)
    assert failures(found) == {0: FailureKind.PARSE}
    assert list(tmp_path.iterdir()) == []


def test_a_row_that_never_ends_costs_its_deadline(collecting: Collecting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = collecting.backend.campaign
    hurried = given.model_copy(update={"requests": given.requests.model_copy(update={"timeout_s": 2.0})})
    monkeypatch.setattr(collecting.backend, "campaign", hurried)
    found = collecting([unit(0), unit(1, "hang")], tmp_path)
    assert failures(found) == {1: FailureKind.TIMEOUT}


def test_a_collector_that_fails_whatever_it_is_given_is_no_rows_fault(
    collecting: Collecting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collecting.backend.servers, "environment", {**collecting.backend.servers.environment, "FAKE_GYM": "broken"})
    with pytest.raises(BlockedError, match="5 times without a single rollout: no such option"):
        collecting([unit(number) for number in range(64)], tmp_path)


def test_a_collector_that_never_gets_to_its_rows_is_no_rows_fault(
    collecting: Collecting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gym_backend, "_START_S", 0.2)
    monkeypatch.setattr(collecting.backend.servers, "environment", {**collecting.backend.servers.environment, "FAKE_GYM": "asleep"})
    with pytest.raises(BlockedError, match=r"sent no row within 0.2 s of its start"):
        collecting([unit(0)], tmp_path)


def test_nothing_to_do_starts_nothing(collecting: Collecting, tmp_path: Path) -> None:
    assert collecting([], tmp_path) == {}
    assert list(tmp_path.iterdir()) == []


def test_a_consumer_that_leaves_early_ends_the_collector(collecting: Collecting, tmp_path: Path) -> None:
    async def first() -> int:
        rows = collect_with_gym(collecting.backend, [unit(0), unit(1, "hang")], tmp_path)
        async for done, _ in rows:
            await rows.aclose()
            return done.number
        return -1

    assert collecting.loop(first()) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["gym-collect.log"]
