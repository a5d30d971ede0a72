"""What is sent to the policy, in both interfaces, and what is recorded of it."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from seatrial.core.errors import UserError
from seatrial.rollouts.backends.openai_format import PolicyRequest, build_request, sort_sampling
from seatrial.rollouts.manifest import NO_SEED

HI = [{"role": "user", "content": "hi"}]


def ask(
    own: dict[str, Any], sampling: dict[str, Any] | None = None, *, api: Any = "chat", seed: int = 7
) -> tuple[dict[str, Any], PolicyRequest]:
    asked = build_request({"input": HI, **own}, sort_sampling(sampling or {}), api=api, model="m", seed=seed)
    return orjson.loads(asked.body), asked


def test_chat_gets_messages_sampling_and_the_seed() -> None:
    body, asked = ask({}, {"temperature": 0.7, "max_output_tokens": 9, "top_k": 5})
    assert body == {"model": "m", "messages": HI, "temperature": 0.7, "max_tokens": 9, "top_k": 5, "seed": 7}
    assert asked.params == {"input": HI, "temperature": 0.7, "max_output_tokens": 9, "metadata": {"extra_body": '{"top_k":5,"seed":7}'}}


def test_responses_get_the_seed_as_gym_sends_it() -> None:
    body, asked = ask({}, {"temperature": 0.7, "max_tokens": 9, "top_k": 5}, api="responses")
    metadata = {"extra_body": '{"top_k":5,"seed":7}'}
    assert body == {"model": "m", "input": HI, "temperature": 0.7, "max_output_tokens": 9, "top_k": 5, "metadata": metadata}
    assert asked.params["metadata"] == metadata


def test_responses_of_vllm_get_the_seed_beside_the_others_too() -> None:
    """vLLM 0.32 ignores metadata: without this, rollouts had a recorded seed that nobody used."""
    for seed, sent in ((7, 7), (NO_SEED, None)):
        asked = build_request({"input": HI}, sort_sampling({}), api="responses", model="m", seed=seed, vllm=True)
        assert orjson.loads(asked.body).get("seed") == sent
        assert "seed" not in asked.params  # recorded as Gym writes it


def test_no_seed_is_sent_when_the_rule_is_none() -> None:
    body, asked = ask({}, seed=NO_SEED)
    assert body == {"model": "m", "messages": HI}
    assert asked.params == {"input": HI}


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_the_limit_keeps_the_name_that_the_campaign_uses(name: str) -> None:
    body, asked = ask({}, {name: 9})
    assert body[name] == 9
    assert asked.params["max_output_tokens"] == 9


def test_the_campaigns_sampling_wins_and_nulls_say_nothing() -> None:
    own = {"temperature": 0.1, "max_output_tokens": 3, "top_p": None, "model": "another", "stream": True}
    body, _ = ask(own, {"temperature": 0.7, "max_completion_tokens": 9, "top_p": 0.5})
    assert body == {"model": "m", "messages": HI, "temperature": 0.7, "max_completion_tokens": 9, "top_p": 0.5, "seed": 7}


def test_a_rows_extra_body_is_sent_but_its_seed_is_the_units() -> None:
    own = {"metadata": {"extra_body": '{"seed": 1, "min_p": 0.1}', "chat_template_kwargs": '{"enable_thinking": false}', "note": "x"}}
    body, asked = ask(own, {"chat_template_kwargs": {"a": 1}})
    assert (body["seed"], body["min_p"]) == (7, 0.1)
    assert ask(own, {"min_p": 0.9})[0]["min_p"] == 0.9
    assert body["chat_template_kwargs"] == {"a": 1, "enable_thinking": False}
    assert "metadata" not in body
    assert asked.params["metadata"]["note"] == "x"


def test_tools_and_their_choice_take_the_shape_of_chat() -> None:
    tool = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": None}
    body, asked = ask({"tools": [tool], "tool_choice": {"type": "function", "name": "f"}, "parallel_tool_calls": False})
    assert body["tools"] == [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    assert body["tool_choice"] == {"type": "function", "function": {"name": "f"}}
    assert body["parallel_tool_calls"] is False
    assert asked.params["tools"] == [tool]


def test_defaults_that_gym_fills_in_are_harmless() -> None:
    body, _ = ask({"parallel_tool_calls": True, "tool_choice": "auto", "tools": [], "background": None, "user": None}, seed=NO_SEED)
    assert body == {"model": "m", "messages": HI}


def test_items_of_one_turn_become_one_message() -> None:
    items = [
        {"role": "developer", "content": [{"type": "input_text", "text": "be brief"}]},
        {"role": "user", "content": [{"type": "input_image", "image_url": "data:x"}], "type": "message"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "calling"}]},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "42"},
    ]
    body, _ = ask({"input": items, "instructions": "first"})
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    assert body["messages"] == [
        {"role": "system", "content": "first"},
        {"role": "developer", "content": [{"type": "text", "text": "be brief"}]},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:x", "detail": "auto"}}]},
        {"role": "assistant", "content": "calling", "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "42"},
    ]


def test_a_prompt_may_be_a_text_and_messages_may_be_of_chat() -> None:
    assert ask({"input": "hi"})[0]["messages"] == HI
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    plain = [*HI, {"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "tool_call_id": "c", "content": "1"}]
    messages = ask({"input": plain})[0]["messages"]
    assert messages[1] == {"role": "assistant", "content": "", "tool_calls": [call]}
    assert messages[2] == plain[2]


def test_reasoning_effort_and_formats_are_told() -> None:
    form = {"type": "json_schema", "name": "n", "schema": {}}
    body, _ = ask({"reasoning": {"effort": "low"}, "text": {"format": form}, "top_logprobs": 3})
    assert body["reasoning_effort"] == "low"
    assert body["response_format"] == {"type": "json_schema", "json_schema": {"name": "n", "schema": {}}}
    assert (body["logprobs"], body["top_logprobs"]) == (True, 3)
    assert "response_format" not in ask({"text": {"format": {"type": "text"}}})[0]


@pytest.mark.parametrize(
    ("own", "words"),
    [
        ({"previous_response_id": "r", "truncation": "auto"}, 'no previous_response_id, truncation: say policy.api = "responses"'),
        ({"input": [{"type": "computer_call"}]}, "no input item of type computer_call"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "no content of type input_file"),
        ({"tools": [{"type": "web_search"}]}, "no tool of type web_search"),
        ({"metadata": {"extra_body": "{"}}, "metadata.extra_body is not JSON"),
        ({"metadata": {"extra_body": "[]"}}, "metadata.extra_body is no object"),
    ],
)
def test_what_chat_cannot_say_is_refused_and_not_left_out(own: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words.replace(".", r"\.")):
        ask(own)


def test_responses_are_sent_what_chat_cannot_say() -> None:
    assert ask({"previous_response_id": "r"}, api="responses")[0]["previous_response_id"] == "r"


@pytest.mark.parametrize("key", ["seed", "n", "stream", "model", "messages"])
def test_sampling_that_the_campaign_says_elsewhere_is_refused(key: str) -> None:
    with pytest.raises(UserError, match=f"sampling.{key} cannot be said"):
        sort_sampling({key: 1})


@pytest.mark.parametrize("limit", [0, -1, "8", 8.0, True])
def test_a_limit_of_tokens_that_no_answer_fits_is_refused(limit: Any) -> None:
    with pytest.raises(UserError, match=r"sampling.max_tokens is "):
        sort_sampling({"max_tokens": limit})


def test_two_names_for_one_limit_are_refused() -> None:
    with pytest.raises(UserError, match=r"sampling.max_output_tokens and sampling.max_tokens are the same thing"):
        sort_sampling({"max_tokens": 1, "max_output_tokens": 1})
