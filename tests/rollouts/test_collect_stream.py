"""A streaming backend: many units at once, whatever comes out is written down, the rest is owed."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

import pytest

from seatrial.rollouts import collect_engine
from seatrial.rollouts.rollout_record import FailureKind, RolloutError, RolloutOutcome, ServersGoneError, Streaming, Unit
from tests.rollouts.collecting import Told, fine, heads, make, prompts, run


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collect_engine, "_LOOK_S", 0.01)
    monkeypatch.setattr(collect_engine, "_BATCH", 4)
    monkeypatch.setattr("os.fsync", lambda handle: None)


class Streams(Told):
    """Hands units on backwards; some fail, some never come, and at last the servers go."""

    def __init__(self, poisoned: Sequence[int] = (), lost: Sequence[int] = (), gone_after: int = 10**9) -> None:
        super().__init__(fine)
        self.poisoned, self.lost, self.gone_after = poisoned, lost, gone_after
        self.batches: list[int] = []

    async def stream(self, units: Sequence[Unit]) -> AsyncGenerator[tuple[Unit, RolloutOutcome | RolloutError], None]:
        self.batches.append(len(units))
        for unit in reversed(units):
            if self.gone_after == 0:
                raise ServersGoneError("nobody answers")
            self.gone_after -= 1
            if unit.number in self.poisoned:
                yield unit, RolloutError(FailureKind.HTTP_5XX, "poisoned")
            elif unit.number not in self.lost:
                yield unit, await fine(unit)


def test_all_units_in_batches(tmp_path: Path) -> None:
    place, campaign = make(tmp_path, prompts(10), work={"shards": 2})
    backend = Streams()
    assert isinstance(backend, Streaming)
    ended = run(place, campaign, backend, shards=range(2))
    assert (ended.reason, ended.ok, ended.owed) == ("done", 10, 0)
    assert backend.batches == [4, 4, 2]
    assert all(head.latency_s is None for head in heads(place)), "nobody knows how long one took"


def test_a_poisoned_row_costs_itself_and_is_final_after_its_attempts(tmp_path: Path) -> None:
    place, campaign = make(tmp_path, prompts(5), requests={"attempts": 2})
    first = run(place, campaign, Streams(poisoned=[3]))
    assert (first.ok, first.failed, first.owed) == (4, 0, 1)
    second = run(place, campaign, Streams(poisoned=[3]))
    assert (second.ok, second.failed, second.owed) == (4, 1, 0)


def test_what_never_comes_out_is_owed_and_not_waited_for(tmp_path: Path) -> None:
    place, campaign = make(tmp_path, prompts(6))
    ended = run(place, campaign, Streams(lost=[1, 5]))
    assert (ended.ok, ended.failed, ended.owed) == (4, 0, 2)
    assert run(place, campaign, Streams()).owed == 0


def test_servers_that_go_away_end_the_attempt(tmp_path: Path) -> None:
    place, campaign = make(tmp_path, prompts(6))
    ended = run(place, campaign, Streams(gone_after=3))
    assert (ended.reason, ended.ok, ended.owed) == ("servers", 3, 3)
