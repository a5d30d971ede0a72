"""The collector over a backend that does as it is told: everything once, and failures as records."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

import pytest

from seatrial.rollouts import collect_engine
from seatrial.rollouts.rollout_record import FailureKind, RolloutError, RolloutOutcome, Unit
from tests.rollouts.collecting import Told, failing, fine, heads, make, prompts, rows, run


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collect_engine, "_LOOK_S", 0.01)
    monkeypatch.setattr(collect_engine, "_KEEP_S", 0.02)
    monkeypatch.setattr("os.fsync", lambda handle: None)


def test_every_unit_is_rolled_out_once_and_a_second_run_has_nothing_to_do(tmp_path: Path) -> None:
    place, campaign = make(tmp_path, prompts(10), work={"shards": 3, "repeats": 2})
    backend = Told(fine)
    ended = run(place, campaign, backend, shards=range(3))
    assert (ended.reason, ended.ok, ended.failed, ended.owed) == ("done", 20, 0, 0)
    assert sorted(backend.rolled) == list(range(20))
    assert sorted(rows(place)) == list(range(20))
    assert {head.reward for head in heads(place)} == {float(number) for number in range(20)}
    again = Told(fine)
    assert run(place, campaign, again, shards=range(3)).reason == "done"
    assert (again.opened, again.rolled) == (0, []), "no server is started where nothing is owed"
    assert (backend.opened, backend.closed) == (1, 1)


def test_the_head_says_what_the_rollout_was(tmp_path: Path) -> None:
    place, campaign = make(tmp_path, prompts(1))
    run(place, campaign, Told(fine))
    (head,) = heads(place)
    assert (head.outcome, head.answer, head.input_tokens, head.output_tokens, head.turns, head.finish) == ("ok", "C", 1, 2, 1, "stop")
    assert head.tries == 1
    assert head.latency_s is not None
    assert head.task


def test_at_most_the_asked_number_is_in_memory_and_open(tmp_path: Path) -> None:
    async def act(unit: Unit) -> RolloutOutcome:
        await asyncio.sleep(0.001)
        return await fine(unit)

    place, campaign = make(tmp_path, prompts(60), requests={"concurrency": 5})
    backend = Told(act)
    assert run(place, campaign, backend).ok == 60
    assert backend.most_open == 5


@pytest.mark.parametrize("kind", [FailureKind.HTTP_4XX, FailureKind.CONTEXT_LENGTH, FailureKind.REWARD, FailureKind.SANDBOX])
def test_what_cannot_heal_is_tried_once_and_final(tmp_path: Path, kind: FailureKind) -> None:
    place, campaign = make(tmp_path, prompts(5))
    backend = failing(kind, 3)
    ended = run(place, campaign, backend)
    assert (ended.reason, ended.ok, ended.failed, ended.owed) == ("done", 4, 1, 0)
    (failed,) = [head for head in heads(place) if not head.ok]
    assert (failed.unit, failed.kind, failed.final, failed.tries, failed.message) == (3, kind.value, True, 1, "made to fail 3")
    row, source = rows(place)[3], f"{tmp_path}/rows.jsonl:4"
    assert (row["kept"], row["dataset"], row["source"], row["task_id"]) == (3, "rows", source, failed.task)
    assert (row["_ng_task_index"], row["_ng_rollout_index"]) == (3, 0)
    assert backend.rolled.count(3) == 1


def test_what_can_heal_is_tried_again_and_then_owed_until_the_attempts_are_over(tmp_path: Path) -> None:
    place, campaign = make(tmp_path, prompts(4), requests={"tries": 3, "attempts": 2})
    backend = failing(FailureKind.HTTP_5XX, 1)
    ended = run(place, campaign, backend)
    assert (ended.reason, ended.ok, ended.failed, ended.owed) == ("done", 3, 0, 1)
    assert backend.rolled.count(1) == 3
    (failed,) = [head for head in heads(place) if not head.ok]
    assert (failed.final, failed.tries) == (False, 3)
    ended = run(place, campaign, failing(FailureKind.HTTP_5XX, 1))
    assert (ended.ok, ended.failed, ended.owed) == (3, 1, 0)


def test_a_failure_that_heals_leaves_a_rollout_and_its_number_of_tries(tmp_path: Path) -> None:
    place, campaign = make(tmp_path, prompts(2))
    assert run(place, campaign, failing(FailureKind.HTTP_5XX, 0, times=2)).ok == 2
    assert {head.unit: head.tries for head in heads(place)} == {0: 3, 1: 1}


def test_an_unreadable_answer_is_final_after_its_tries(tmp_path: Path) -> None:
    place, campaign = make(tmp_path, prompts(2), requests={"tries": 2})
    backend = failing(FailureKind.PARSE, 0, heals=True)
    assert run(place, campaign, backend).failed == 1
    assert backend.rolled.count(0) == 2


def test_refusals_cost_more_patience_and_the_asked_wait(tmp_path: Path) -> None:
    waits: list[float] = []

    async def act(unit: Unit) -> RolloutOutcome:
        waits.append(asyncio.get_running_loop().time())
        if len(waits) <= 6:
            raise RolloutError(FailureKind.RATE_LIMIT, "busy", after_s=0.02)
        return await fine(unit)

    place, campaign = make(tmp_path, prompts(1), requests={"tries": 2})
    assert run(place, campaign, Told(act)).ok == 1
    assert all(later - sooner >= 0.019 for sooner, later in itertools.pairwise(waits))


def test_a_rollout_that_takes_too_long_is_a_timeout(tmp_path: Path) -> None:
    async def act(unit: Unit) -> RolloutOutcome:
        if unit.number == 0:
            await asyncio.sleep(60)
        return await fine(unit)

    place, campaign = make(tmp_path, prompts(3), requests={"timeout_s": 0.05, "tries": 2})
    assert run(place, campaign, Told(act)).owed == 1
    (failed,) = [head for head in heads(place) if not head.ok]
    assert (failed.kind, failed.tries, failed.message) == ("timeout", 2, "no answer within 0.05 s")


def test_a_bug_costs_the_row_that_meets_it(tmp_path: Path) -> None:
    async def act(unit: Unit) -> RolloutOutcome:
        return await fine(unit) if unit.number else RolloutOutcome({}, unit.row.data["no such key"])

    place, campaign = make(tmp_path, prompts(3), requests={"tries": 1})
    ended = run(place, campaign, Told(act))
    assert (ended.ok, ended.owed) == (2, 1)
    (failed,) = [head for head in heads(place) if not head.ok]
    assert failed.kind == "agent"
    assert "KeyError" in failed.message
    assert "test_collect_engine.py:" in failed.message


@pytest.mark.parametrize("row", [{"reward": 1.0, "what": object()}, {"huge": 1 << 70}])
def test_a_rollout_that_cannot_be_stored_is_a_failure(tmp_path: Path, row: dict[str, object]) -> None:
    async def act(unit: Unit) -> RolloutOutcome:
        return RolloutOutcome(row, 1.0)

    place, campaign = make(tmp_path, prompts(1))
    assert run(place, campaign, Told(act)).failed == 1
    assert heads(place)[0].kind == "reward"


def test_a_metric_that_is_not_finite_is_a_failure(tmp_path: Path) -> None:
    async def act(unit: Unit) -> RolloutOutcome:
        return RolloutOutcome({}, 1.0, metrics={"score": float("nan")})

    place, campaign = make(tmp_path, prompts(1))
    assert run(place, campaign, Told(act)).failed == 1


def test_long_answers_stay_apart_and_short_in_the_head(tmp_path: Path) -> None:
    async def act(unit: Unit) -> RolloutOutcome:
        return RolloutOutcome({}, 1.0, "x" * 100_000 + str(unit.number))

    place, campaign = make(tmp_path, prompts(2))
    run(place, campaign, Told(act))
    answers = {head.answer for head in heads(place)}
    assert len(answers) == 2
    assert all(answer and len(answer) < 600 for answer in answers)


def test_messages_are_short_and_without_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", "a-value-that-only-the-variable-knows")

    async def act(unit: Unit) -> RolloutOutcome:
        raise RolloutError(FailureKind.HTTP_4XX, "sent a-value-that-only-the-variable-knows, " + "and so on " * 100)

    place, campaign = make(tmp_path, prompts(1))
    run(place, campaign, Told(act))
    (head,) = heads(place)
    assert head.message.startswith("sent [redacted:MY_API_KEY], and so on")
    assert len(head.message) == 500
