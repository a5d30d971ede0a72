"""Rows as Gym's collector sends and writes them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from seatrial.rollouts.backends.gym_backend import body_of, outcome_of, readable, result_of
from seatrial.rollouts.backends.openai_format import sort_sampling
from seatrial.rollouts.manifest import NO_SEED
from seatrial.rollouts.rollout_record import FailureKind, InputRow, RolloutError, Unit
from tests.rollouts.gym_instance import campaign, row, unit

ABOUT = campaign("http://h/v1")


def sent(given: Unit, **sampling: Any) -> dict[str, Any]:
    return body_of(given, ABOUT, sort_sampling(sampling))


def with_params(**params: Any) -> Unit:
    data = {"responses_create_params": {"input": "q", **params}, "agent_ref": {"name": "own"}}
    return Unit(5, InputRow(2, "t", "d", data, agent="own", source="d.jsonl:3"), 1, 77)


def test_a_row_gets_global_indices_its_agent_and_its_seed_where_gym_puts_them() -> None:
    body = sent(unit(5, repeats=2), temperature=0.7)
    assert (body["_ng_task_index"], body["_ng_rollout_index"], body["agent_ref"]) == (2, 1, {"name": "mcqa_simple_agent"})
    assert body["responses_create_params"]["temperature"] == 0.7
    assert body["responses_create_params"]["metadata"] == {"extra_body": '{"seed": 1}'}
    assert list(body) == [*row(2).data, "agent_ref", "_ng_task_index", "_ng_rollout_index"]


def test_the_campaigns_sampling_wins_as_in_gym_and_the_row_is_not_touched() -> None:
    given = with_params(temperature=0.1, metadata={"extra_body": '{"top_k": 3}', "note": "x"})
    body = sent(given, temperature=0.7, top_p=0.9, min_p=0.05, max_tokens=8)
    params = body["responses_create_params"]
    assert (params["temperature"], params["top_p"], params["max_output_tokens"]) == (0.7, 0.9, 8)
    assert json.loads(params["metadata"]["extra_body"]) == {"min_p": 0.05, "top_k": 3, "seed": 77}
    assert params["metadata"]["note"] == "x"
    assert body["agent_ref"] == {"name": "own"}
    assert given.row.data["responses_create_params"]["metadata"]["extra_body"] == '{"top_k": 3}'


def test_without_a_seed_nothing_is_added() -> None:
    body = sent(Unit(0, row(0), 0, NO_SEED))
    assert "metadata" not in body["responses_create_params"]


def test_a_plain_row_becomes_gyms() -> None:
    body = sent(Unit(0, InputRow(0, "t", "d", {"prompt": "2+2?", "answer": "4"}, agent="a"), 0, 1))
    assert body["responses_create_params"]["input"] == [{"role": "user", "content": "2+2?"}]
    assert body["expected_answer"] == "4"


def test_an_extra_body_that_is_none_is_a_failure_of_the_row() -> None:
    with pytest.raises(RolloutError, match=r"d.jsonl:3.*extra_body") as caught:
        sent(with_params(metadata={"extra_body": "[1]{"}))
    assert not caught.value.heals


def test_the_row_that_is_written_has_our_indices_behind_the_agents_answer() -> None:
    result = result_of({**sent(with_params()), "skills_ref": {"hash": "h"}}, {"reward": 1, "agent_ref": "mine"})
    assert result == {"reward": 1, "agent_ref": {"name": "own"}, "_ng_task_index": 2, "_ng_rollout_index": 1, "skills_ref": {"hash": "h"}}


@pytest.mark.parametrize(
    ("answer", "kind", "heals"),
    [
        ("text", FailureKind.PARSE, True),
        ({"reward": 0.0, "_ng_no_persist": True}, FailureKind.AGENT, True),
        ({"reward": 0.0, "_ng_failure_class": "tool"}, FailureKind.AGENT, True),
        ({"reward": 0.0, "_ng_failure_class": "timeout_exceeded", "_ng_failure_terminal": True}, FailureKind.AGENT, False),
        ({"reward": float("nan")}, FailureKind.REWARD, False),
        ({"reward": True}, FailureKind.REWARD, False),
        ({"response": {}}, FailureKind.REWARD, False),
    ],
)
def test_what_is_no_reward_is_a_failure(answer: Any, kind: FailureKind, heals: bool) -> None:
    with pytest.raises(RolloutError) as caught:
        outcome_of(result_of(sent(unit(0)), answer))
    assert (caught.value.kind, caught.value.heals) == (kind, heals)


def test_the_head_takes_answer_tokens_turns_finish_and_numbers() -> None:
    output = [{"type": "message", "role": "assistant"}, {"type": "function_call"}, {"type": "message", "role": "assistant"}]
    response = {"output": output, "usage": {"input_tokens": 4, "output_tokens": 9}, "incomplete_details": {"reason": "max_output_tokens"}}
    found = outcome_of(
        {"response": response, "reward": 1, "extracted_answer": "C", "steps": 3, "ok": True, "_ng_task_index": 7, "why": "x"}
    )
    assert (found.reward, found.answer, found.input_tokens, found.output_tokens) == (1.0, "C", 4, 9)
    assert (found.turns, found.finish, found.metrics) == (2, "length", {"steps": 3.0, "ok": 1.0})
    bare = outcome_of({"response": None, "reward": 0.5, "predicted_answer": 12})
    assert (bare.answer, bare.turns, bare.finish, bare.input_tokens) == ("12", 0, "stop", None)


def test_an_error_that_went_through_many_servers_can_be_read() -> None:
    inner = 'Hit an exception in VLLMModel___policy_model calling an inner server: b\'{\\"detail\\": \\"no luck\\"}\''
    told = f'HTTP 500: "Hit an exception in SimpleAgent___a calling an inner server: b\'\\"{inner}\\"\'"'
    assert readable(told) == 'HTTP 500: SimpleAgent___a -> VLLMModel___policy_model: {"detail": "no luck"}'
    inner = "Hit an exception in B___b calling an inner server: b'no \\\\\\\\boxed{} in \\\\\\'x\\\\\\' of C:\\\\temp'"
    assert readable(f"HTTP 500: {inner}") == r"HTTP 500: B___b: no \boxed{} in 'x' of C:\temp"
    assert readable("HTTP 500: other") == "HTTP 500: other"
    assert readable("Hit an exception in A___a calling an inner server: b''").endswith("A___a: it said no more")
