"""The direct backend against a stub server: rows in Gym's shape, classes of failure, and no key anywhere."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from seatrial.core.errors import BlockedError, UserError
from seatrial.rollouts.backends.direct_backend import DirectBackend
from seatrial.rollouts.campaign import Campaign
from seatrial.rollouts.collect_engine import CollectEnd
from seatrial.rollouts.rollout_record import FailureKind, InputRow, RolloutError, RolloutOutcome, Score, Unit
from seatrial.runtime.servers import free_port
from tests.rollouts.collecting import QUICK, Boxed, heads, lines, make, run
from tests.rollouts.stub import Stub, reply

KEY = "not-a-shape-that-any-pattern-knows-7f3"


def campaign(**tables: Any) -> Campaign:
    said = {
        "name": "x",
        "datasets": [{"name": "rows", "path": "rows.jsonl"}],
        "policy": {"url": "http://127.0.0.1:9/v1"},
        "verifier": "exact",
    }
    return Campaign.model_validate({**said, "requests": QUICK, **tables})


def unit(prompt: str, number: int = 4, seed: int = 11) -> Unit:
    return Unit(number, InputRow(2, "task", "rows", {"prompt": prompt, "expected_answer": "C"}, source="rows.jsonl:3"), 1, seed)


def with_backend(
    act: Callable[[DirectBackend, Stub], Awaitable[Any]], *, stub: Stub | None = None, key: str | None = None, **tables: Any
) -> Any:
    """Do something with an open backend over a running stub."""

    async def main() -> Any:
        async with stub or Stub() as server:
            backend = DirectBackend(campaign(**tables), [server.url], {"rows": Boxed()}, key)
            try:
                await backend.open()
                return await asyncio.wait_for(act(backend, server), 60)
            finally:
                await backend.close()

    return asyncio.run(main())


def fails(prompt: str, **more: Any) -> RolloutError:
    """The failure that this prompt meets."""

    async def act(backend: DirectBackend, _: Stub) -> RolloutError:
        with pytest.raises(RolloutError) as caught:
            await backend.roll(unit(prompt))
        return caught.value

    error: RolloutError = with_backend(act, **more)
    return error


@pytest.mark.parametrize("api", ["chat", "responses"])
def test_a_row_comes_out_in_gyms_shape(api: str) -> None:
    prompt = "which? [[gold=C p=1.0]]"
    policy = {"url": "http://127.0.0.1:9/v1", "api": api}
    outcome: RolloutOutcome = with_backend(lambda backend, _: backend.roll(unit(prompt)), policy=policy, sampling={"max_output_tokens": 5})
    row = outcome.row
    assert (outcome.reward, outcome.answer, outcome.input_tokens, outcome.output_tokens, outcome.turns) == (1.0, "C", 40, 12, 1)
    assert row["responses_create_params"]["input"] == [{"role": "user", "content": prompt}]
    assert row["responses_create_params"]["max_output_tokens"] == 5
    assert row["response"]["object"] == "response"
    assert row["response"]["output"][0]["content"][0]["text"] == reply(prompt, 11)
    assert {key: row[key] for key in ("reward", "_ng_task_index", "_ng_rollout_index", "agent_ref", "task_id", "dataset")} == {
        "reward": 1.0,
        "_ng_task_index": 2,
        "_ng_rollout_index": 1,
        "agent_ref": {"name": "seatrial_direct"},
        "task_id": "task",
        "dataset": "rows",
    }
    assert row["extracted_answer"] == "C"


def test_what_is_sent() -> None:
    async def act(backend: DirectBackend, server: Stub) -> dict[str, Any]:
        await backend.roll(unit("hello"))
        return server.bodies[-1]

    asked = with_backend(act, sampling={"temperature": 0.5})
    assert asked == {"model": "stub", "messages": [{"role": "user", "content": "hello"}], "temperature": 0.5, "seed": 11}


@pytest.mark.parametrize(
    ("marker", "kind", "heals"),
    [
        ("[[status=500]]", FailureKind.HTTP_5XX, True),
        ("[[status=418]]", FailureKind.HTTP_4XX, False),
        ("[[status=503]]", FailureKind.RATE_LIMIT, True),
        ("[[context]]", FailureKind.CONTEXT_LENGTH, False),
        ("[[drop]]", FailureKind.CONNECTION, True),
        ("[[garbage]]", FailureKind.PARSE, True),
        ("[[nochoices]]", FailureKind.PARSE, True),
        ("[[redirect]]", FailureKind.HTTP_4XX, True),
    ],
)
def test_classes_of_failure(marker: str, kind: FailureKind, heals: bool) -> None:
    error = fails(f"x {marker}")
    assert (error.kind, error.heals) == (kind, heals)


@pytest.mark.parametrize(("owner", "api", "sent"), [("vllm", "responses", 11), ("openai", "responses", None), ("openai", "chat", 11)])
def test_the_seed_goes_where_the_server_takes_it(owner: str, api: str, sent: int | None) -> None:
    async def act(backend: DirectBackend, server: Stub) -> Any:
        await backend.roll(unit("hi"))
        return server.bodies[-1].get("seed")

    assert with_backend(act, stub=Stub(owner=owner), policy={"url": "http://127.0.0.1:9/v1", "api": api}) == sent


def test_a_refusal_carries_the_wait_that_was_asked_for() -> None:
    assert fails("x", stub=Stub(capacity=0, retry_after="7")).after_s == 7


def test_a_redirect_is_told_and_not_followed() -> None:
    assert "leads to http://127.0.0.1:1/elsewhere; redirects are not followed" in str(fails("[[redirect]]"))


@pytest.mark.parametrize(
    ("marker", "finish", "kinds"), [("[[length]]", "length", ["message"]), ("[[tool]]", "tool_calls", ["function_call"])]
)
def test_how_it_finished(marker: str, finish: str, kinds: list[str]) -> None:
    outcome: RolloutOutcome = with_backend(lambda backend, _: backend.roll(unit(marker)))
    assert outcome.finish == finish
    assert [item["type"] for item in outcome.row["response"]["output"]] == kinds


def test_a_verifier_that_fails_keeps_the_response() -> None:
    class Broken(Boxed):
        async def score(self, *_: Any) -> Score:
            raise RolloutError(FailureKind.JUDGE, "cannot tell", row={"judge": "?"})

    async def act(backend: DirectBackend, _: Stub) -> RolloutError:
        backend._verifiers = {"rows": Broken()}
        with pytest.raises(RolloutError) as caught:
            await backend.roll(unit("x"))
        return caught.value

    error = with_backend(act)
    assert error.kind is FailureKind.JUDGE
    assert error.row.keys() == {"responses_create_params", "response", "judge"}


def test_a_reward_that_is_not_finite_is_a_failure() -> None:
    class Broken(Boxed):
        async def score(self, *_: Any) -> Score:
            return Score(float("nan"))

    async def act(backend: DirectBackend, _: Stub) -> FailureKind:
        backend._verifiers = {"rows": Broken()}
        with pytest.raises(RolloutError) as caught:
            await backend.roll(unit("x"))
        return caught.value.kind

    assert with_backend(act) is FailureKind.REWARD


def test_a_row_that_chat_cannot_ask_is_a_failure_that_names_its_place() -> None:
    async def act(backend: DirectBackend, _: Stub) -> RolloutError:
        params = {"input": "x", "previous_response_id": "r"}
        row = InputRow(0, "t", "rows", {"responses_create_params": params}, source="rows.jsonl:9")
        with pytest.raises(RolloutError) as caught:
            await backend.roll(Unit(0, row, 0, 1))
        return caught.value

    error = with_backend(act)
    assert (error.kind, error.heals) == (FailureKind.HTTP_4XX, False)
    assert "rows.jsonl:9: not asked" in str(error)


def test_the_model_is_the_servers_only_one_or_must_be_said() -> None:
    async def nothing(backend: DirectBackend, _: Stub) -> str | None:
        return backend._model

    assert with_backend(nothing) == "stub"
    with pytest.raises(UserError, match="the server lists 2: a, b"):
        with_backend(nothing, stub=Stub(models=("a", "b")))
    with pytest.raises(UserError, match="the server lists none"):
        with_backend(nothing, stub=Stub(models=()))
    policy = {"url": "http://127.0.0.1:9/v1", "model": "other"}
    with pytest.raises(UserError, match="the server has no 'other'; it has stub"):
        with_backend(nothing, policy=policy)


def test_a_wrong_key_is_refused_before_anything_is_asked() -> None:
    async def nothing(backend: DirectBackend, _: Stub) -> None:
        return None

    with pytest.raises(UserError, match="refuses the key: HTTP 401") as caught:
        with_backend(nothing, stub=Stub(key=KEY), key="another-key-that-is-wrong")
    assert "another-key" not in str(caught.value)
    assert "policy.key_env" in _fix(lambda: with_backend(nothing, stub=Stub(key=KEY)))
    with_backend(nothing, stub=Stub(key=KEY), key=KEY)


def _fix(act: Callable[[], Any]) -> str:
    with pytest.raises(UserError) as caught:
        act()
    return caught.value.fix


def test_nobody_there_blocks_within_the_deadline() -> None:
    async def main() -> None:
        backend = DirectBackend(campaign(), [f"http://user:secret@127.0.0.1:{free_port()}/v1?key=abc"], {}, None)
        try:
            await backend.open()
        finally:
            await backend.close()

    with pytest.raises(BlockedError, match=r"no server of the policy answered within 0\.2 s") as caught:
        asyncio.run(main())
    assert "secret" not in caught.value.message
    assert "abc" not in caught.value.message


def test_a_dead_replica_does_not_draw_all_requests() -> None:
    async def main() -> tuple[int, int]:
        async with Stub() as server:
            backend = DirectBackend(campaign(), [f"http://127.0.0.1:{free_port()}/v1", server.url], {"rows": Boxed()}, None)
            await backend.open()
            results = [await asyncio.gather(backend.roll(unit("x", number)), return_exceptions=True) for number in range(10)]
            lost = sum(isinstance(result, RolloutError) and result.kind is FailureKind.CONNECTION for (result,) in results)
            assert await backend.alive() is None
            await backend.close()
            return lost, server.calls

    assert asyncio.run(main()) == (1, 9)


def test_requests_go_to_the_server_with_the_fewest_open() -> None:
    async def main() -> list[int]:
        async with Stub(latency_s=0.05) as first, Stub(latency_s=0.05) as second:
            backend = DirectBackend(campaign(), [first.url, second.url], {"rows": Boxed()}, None)
            await backend.open()
            await asyncio.gather(*(backend.roll(unit("x", number)) for number in range(6)))
            await backend.close()
            return [first.calls, second.calls]

    assert asyncio.run(main()) == [3, 3]


def test_the_key_is_nowhere_but_in_the_header(tmp_path: Path) -> None:
    """A server that shows the header in its errors, and one that says it in an answer."""
    place, small = make(tmp_path, ["fine", "[[echo]]", f"say {KEY}"], requests={"tries": 1})
    said: list[str] = []

    async def main() -> tuple[CollectEnd, list[dict[str, Any]]]:
        async with Stub(key=KEY) as server:
            backend = DirectBackend(small, [server.url], {"rows": Boxed()}, KEY)
            return await asyncio.to_thread(lambda: run(place, small, _Own(backend), said=said)), server.bodies

    ended, bodies = asyncio.run(main())
    assert (ended.ok, ended.owed) == (2, 1)
    (failed,) = [head for head in heads(place) if not head.ok]
    assert "authorization: bearer [redacted" in failed.message.lower()
    assert all(KEY.encode() not in path.read_bytes() for path in tmp_path.rglob("*.json"))
    assert KEY not in "".join(said)
    assert all("Authorization" not in str(body) for body in bodies)
    told = [line for line in lines(place) if b"say " not in line]
    assert all(KEY.encode() not in line for line in told), "only the user's own prompt holds it"


class _Own:
    """A backend for another event loop than that of the server."""

    def __init__(self, backend: DirectBackend) -> None:
        self.open, self.roll, self.alive, self.close = backend.open, backend.roll, backend.alive, backend.close


def test_columns_and_tags_of_the_row_stay_where_they_do_not_collide() -> None:
    data = {"prompt": "hi", "expected_answer": "C", "level": 3, "reward": 9, "response": "mine", "extracted_answer": "mine"}
    asked = Unit(0, InputRow(0, "task", "rows", data, tags=("hard",)), 0, 1)
    outcome: RolloutOutcome = with_backend(lambda backend, _: backend.roll(asked))
    row = outcome.row
    assert (row["level"], row["expected_answer"], row["tags"], row["reward"]) == (3, "C", ["hard"], outcome.reward)
    assert row["response"]["object"] == "response"
    assert row["extracted_answer"] != "mine"
    assert "prompt" not in row
    tested = Unit(0, InputRow(0, "task", "rows", {**data, "tests": ["x"], "tags": "own"}, tags=("hard",)), 0, 1)
    coded: RolloutOutcome = with_backend(lambda backend, _: backend.roll(tested), verifier="code")
    assert "tests" not in coded.row
    assert coded.row["tags"] == "own"
