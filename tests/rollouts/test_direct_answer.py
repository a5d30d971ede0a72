"""What the policy answered, and what its refusals mean."""

from __future__ import annotations

from typing import Any

import aiohttp
import orjson
import pytest

from seatrial.rollouts.backends.direct_backend import error_of_exception, error_of_status, retry_after
from seatrial.rollouts.backends.openai_format import read
from seatrial.rollouts.rollout_record import FailureKind, RolloutError


def chat(message: dict[str, Any], **more: Any) -> bytes:
    return orjson.dumps({"id": "c", "created": 5, "model": "m", "choices": [{"message": message, "finish_reason": "stop"}], **more})


def test_a_chat_answer_becomes_a_responses_object() -> None:
    usage = {"prompt_tokens": 4, "completion_tokens": 6, "total_tokens": 10, "completion_tokens_details": {"reasoning_tokens": 2}}
    answer = read(chat({"content": "yes"}, usage=usage), "chat", 3)
    part = {"annotations": [], "text": "yes", "type": "output_text"}
    assert answer.output == [{"id": "msg_3", "content": [part], "role": "assistant", "status": "completed", "type": "message"}]
    assert (answer.text, answer.finish, answer.input_tokens, answer.output_tokens) == ("yes", "stop", 4, 6)
    assert answer.response["object"] == "response"
    assert answer.response["status"] == "completed"
    assert answer.response["usage"]["output_tokens_details"] == {"reasoning_tokens": 2}


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning"])
def test_reasoning_is_an_item_and_no_part_of_the_text(key: str) -> None:
    answer = read(chat({"content": "4", key: "2 + 2"}), "chat", 0)
    assert [item["type"] for item in answer.output] == ["reasoning", "message"]
    assert answer.output[0]["summary"] == [{"text": "2 + 2", "type": "summary_text"}]
    assert answer.text == "4"


def test_thinking_until_the_limit_is_an_empty_answer_and_not_a_broken_one() -> None:
    choice = {"message": {"content": None, "reasoning": "hm"}, "finish_reason": "length"}
    answer = read(orjson.dumps({"choices": [choice]}), "chat", 0)
    assert (answer.text, answer.finish, answer.input_tokens) == ("", "length", None)
    assert answer.response["status"] == "incomplete"
    assert answer.response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert answer.response["usage"] is None


def test_no_content_at_all_is_an_empty_message() -> None:
    answer = read(chat({"content": None}), "chat", 0)
    assert answer.text == ""
    assert answer.output[0]["content"][0]["text"] == ""


def test_calls_of_tools_are_items() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    answer = read(chat({"content": None, "tool_calls": [call]}), "chat", 0)
    assert answer.output == [{"name": "f", "arguments": "{}", "call_id": "c1", "type": "function_call", "id": "c1", "status": "completed"}]


def test_content_may_come_in_parts() -> None:
    assert (
        read(chat({"content": [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": "b"}]}), "chat", 0).text == "ab"
    )


def message(text: str) -> dict[str, Any]:
    return {"type": "message", "content": [{"type": "output_text", "text": text}]}


def test_a_responses_answer_stays_as_it_is() -> None:
    data = {"status": "completed", "output": [message("a"), message("b")], "usage": {"input_tokens": 1, "output_tokens": 2}}
    answer = read(orjson.dumps(data), "responses", 0)
    assert answer.response == data
    assert (answer.text, answer.finish, answer.input_tokens, answer.output_tokens) == ("b", "stop", 1, 2)


@pytest.mark.parametrize(
    ("data", "finish"),
    [
        ({"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}, "output": []}, "length"),
        ({"status": "incomplete", "incomplete_details": {"reason": "content_filter"}, "output": []}, "content_filter"),
        ({"status": "completed", "output": [{"type": "function_call"}]}, "tool_calls"),
    ],
)
def test_how_a_response_finished(data: dict[str, Any], finish: str) -> None:
    assert read(orjson.dumps(data), "responses", 0).finish == finish


def test_a_response_that_failed_may_heal() -> None:
    with pytest.raises(RolloutError, match="engine died") as caught:
        read(orjson.dumps({"status": "failed", "error": {"message": "engine died"}, "output": []}), "responses", 0)
    assert caught.value.kind is FailureKind.HTTP_5XX


@pytest.mark.parametrize("body", [b"<html>", b"", b"[]", b"{}", b'{"choices":[]}', b'{"choices":[{}]}', b'{"choices":[{"message":null}]}'])
def test_what_cannot_be_read_is_a_parse_failure_that_another_try_may_heal(body: bytes) -> None:
    with pytest.raises(RolloutError) as caught:
        read(body, "chat", 0)
    assert (caught.value.kind, caught.value.heals) == (FailureKind.PARSE, True)
    assert caught.value.row["answer"] == body.decode()


def test_little_is_kept_of_a_long_unreadable_answer() -> None:
    with pytest.raises(RolloutError) as caught:
        read(b"<" * 100_000, "responses", 0)
    assert len(caught.value.row["answer"]) == 2000


@pytest.mark.parametrize(
    "body",
    [
        # vLLM, old and new; SGLang; OpenAI, both interfaces
        {"object": "error", "message": "This model's maximum context length is 4096 tokens. However, you requested 5000", "code": 400},
        {"error": {"message": "'max_tokens' is too large: 9. This model's maximum context length is 4096 tokens", "code": 400}},
        {"error": {"message": "The decoder prompt (length 9) is longer than the maximum model length of 4.", "type": "BadRequestError"}},
        # vLLM 0.32, measured: too long, no room for the answer, and filled to the last token
        {
            "error": {
                "message": "This model's maximum context length is 64 tokens. However, your prompt contains at least 65 input tokens, which"
            }
        },
        {"error": {"message": "max_output_tokens=1000 cannot be greater than max_model_len=64. Please request fewer output tokens."}},
        {"error": {"message": "max_tokens must be at least 1, got 0. (parameter=max_tokens, value=0)", "type": "BadRequestError"}},
        {"object": "error", "message": "The input (9 tokens) is longer than the model's context length (4 tokens)."},
        {"object": "error", "message": "Requested token count exceeds the model's maximum context length of 4 tokens."},
        {"error": {"message": "too long", "type": "invalid_request_error", "code": "context_length_exceeded"}},
        {"error": {"message": "Your input exceeds the context window of this model."}},
    ],
)
def test_a_prompt_that_does_not_fit_is_told_by_its_words(body: dict[str, Any]) -> None:
    error = error_of_status(400, orjson.dumps(body), {})
    assert (error.kind, error.heals) == (FailureKind.CONTEXT_LENGTH, False)


@pytest.mark.parametrize(
    ("status", "kind", "heals"),
    [
        (400, FailureKind.HTTP_4XX, False),
        (422, FailureKind.HTTP_4XX, False),
        (401, FailureKind.HTTP_4XX, True),
        (404, FailureKind.HTTP_4XX, True),
        (302, FailureKind.HTTP_4XX, True),
        (408, FailureKind.TIMEOUT, True),
        (429, FailureKind.RATE_LIMIT, True),
        (503, FailureKind.RATE_LIMIT, True),
        (500, FailureKind.HTTP_5XX, True),
        (502, FailureKind.HTTP_5XX, True),
    ],
)
def test_classes_of_status(status: int, kind: FailureKind, heals: bool) -> None:
    error = error_of_status(status, b'{"error":{"message":"why"}}', {"Retry-After": "3"})
    assert (error.kind, error.heals) == (kind, heals)
    assert str(error).startswith(f"HTTP {status}: ")
    assert error.after_s == (3.0 if kind is FailureKind.RATE_LIMIT else None)


def test_a_context_that_a_500_mentions_is_no_context_failure() -> None:
    assert error_of_status(500, b"maximum context length", {}).kind is FailureKind.HTTP_5XX


@pytest.mark.parametrize("body", [b"", b"plain words", b'{"detail":[1]}', b'["x"]', b"\xff\xfe"])
def test_error_bodies_of_any_shape_are_words(body: bytes) -> None:
    assert str(error_of_status(500, body, {})).startswith("HTTP 500")


def test_retry_after_is_seconds_or_a_date_and_bounded() -> None:
    assert retry_after("2.5") == 2.5
    assert retry_after("99999") == 300
    assert retry_after("-1") == 0
    assert retry_after("nan") == 0
    assert retry_after("Wed, 21 Oct 2015 07:28:00 GMT") == 0
    assert retry_after("soon") is None
    assert retry_after(None) is None


def test_exceptions_of_the_client() -> None:
    assert error_of_exception(aiohttp.ServerDisconnectedError(), "http://a").kind is FailureKind.CONNECTION
    refused = error_of_exception(ConnectionRefusedError(111, "refused"), "http://a")
    assert (refused.kind, "http://a" in str(refused)) == (FailureKind.CONNECTION, True)
    assert "TimeoutError" in str(error_of_exception(TimeoutError(), "http://a"))
