"""What the policy answered, as a Responses object, whichever interface was asked.

- Reasoning (`reasoning_content`, `reasoning`) is an item of its own: verifiers see only what was said.
- An answer without content is an empty answer, not a broken one: a model that thinks until its limit says nothing.
- What the interface promises and the server does not keep (no JSON object, no choices, no output) is a failure of class `parse`.
- Token counts are taken over; where the server gives none, or what is no count, they are unknown, never zero. So is a finish reason
  that is no short text: a profile adds and groups them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from seatrial.model.guarded import BadValue
from seatrial.rollouts.record import FailureKind
from seatrial.rollouts.server_json import parse_json_fast
from seatrial.rollouts.work import RolloutError

_KEPT = 2000
"""Characters of an unreadable answer that are kept in the failure's row."""
_MOST_TOKENS = 1 << 53
"""A column of a profile holds no larger number exactly."""
_LONGEST_REASON = 100
_BROKEN_OFF = ("abort", "error")
"""How chat servers say that they, not the model, ended an answer."""
_NOT_DONE = ("failed", "cancelled", "queued", "in_progress")
"""Of the Responses interface: there is no answer, or only a part of one."""


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer that can be scored."""

    response: dict[str, Any]
    """A Responses object."""
    text: str
    """What the model said last; empty when it only thought or called tools."""
    finish: str | None
    """As the server said: stop, length, tool_calls, …"""
    input_tokens: int | None
    output_tokens: int | None

    @property
    def output(self) -> Sequence[Mapping[str, Any]]:
        """The items of the response."""
        items: Sequence[Mapping[str, Any]] = self.response["output"]
        return items


def read(body: bytes, api: Literal["chat", "responses"], number: int) -> Answer:
    """Read an answer to unit `number`; raises RolloutError of class `parse`, which another try may heal."""
    try:
        data = parse_json_fast(body)
    except BadValue as error:
        raise _unreadable(f"the answer is not JSON: {error}", body) from error
    if not isinstance(data, dict):
        raise _unreadable("the answer is no JSON object", body)
    try:
        return _from_chat(data, number) if api == "chat" else _from_responses(data)
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise _unreadable(f"the answer is not what the {api} interface promises: {type(error).__name__} {error}", body) from error


def text_of(output: Sequence[Mapping[str, Any]]) -> str:
    """What the model said last, of the items of a response; empty when it said nothing."""
    texts = [_said(item["content"]) for item in output if item["type"] == "message"]
    return texts[-1] if texts else ""


def _from_chat(data: dict[str, Any], number: int) -> Answer:
    choice = data["choices"][0]
    message, finish = choice["message"], choice.get("finish_reason")
    if data.get("error") or finish in _BROKEN_OFF:
        raise _failed(data.get("error") or f"finish_reason is {finish}")
    output: list[dict[str, Any]] = []
    if thought := message.get("reasoning_content") or message.get("reasoning"):
        summary = [{"text": thought, "type": "summary_text"}]
        output.append({"id": f"rs_{number}", "type": "reasoning", "summary": summary, "status": "completed"})
    text = _said(message.get("content"))
    calls = message.get("tool_calls") or ()
    if text or not (output or calls):
        part = {"annotations": [], "text": text, "type": "output_text"}
        output.append({"id": f"msg_{number}", "content": [part], "role": "assistant", "status": "completed", "type": "message"})
    for call in calls:
        function = call["function"]
        item = {"name": function["name"], "arguments": function["arguments"], "call_id": call["id"], "type": "function_call"}
        output.append({**item, "id": call["id"], "status": "completed"})
    given, made, usage = _chat_usage(data.get("usage"))
    response = {
        "id": data.get("id") or f"resp_{number}",
        "created_at": data.get("created"),
        "model": data.get("model"),
        "object": "response",
        "output": output,
        "status": "incomplete" if finish == "length" else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if finish == "length" else None,
        "usage": usage,
    }
    return Answer(response, text, _reason(finish), count_of(given), count_of(made))


def _said(content: Any) -> str:
    """Content is a text, None, or a list of parts."""
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part["text"] for part in content if part.get("type") in ("text", "output_text"))


def _chat_usage(usage: dict[str, Any] | None) -> tuple[int | None, int | None, dict[str, Any] | None]:
    if not usage:
        return None, None, None
    given, made = usage.get("prompt_tokens"), usage.get("completion_tokens")
    thought = (usage.get("completion_tokens_details") or {}).get("reasoning_tokens") or 0
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return (
        given,
        made,
        {
            "input_tokens": given,
            "input_tokens_details": {"cached_tokens": cached},
            "output_tokens": made,
            "output_tokens_details": {"reasoning_tokens": thought},
            "total_tokens": usage.get("total_tokens"),
        },
    )


def _from_responses(data: dict[str, Any]) -> Answer:
    status = data.get("status")
    if data.get("error") or status in _NOT_DONE:
        raise _failed(data.get("error") or f"status is {status}")
    text = text_of(data["output"])
    called = any(item["type"] == "function_call" for item in data["output"])
    usage = data.get("usage") or {}
    if status == "incomplete":
        reason = (data.get("incomplete_details") or {}).get("reason")
        finish = "length" if reason == "max_output_tokens" else reason or "incomplete"
    else:
        finish = "tool_calls" if called else "stop"
    return Answer(data, text, _reason(finish), count_of(usage.get("input_tokens")), count_of(usage.get("output_tokens")))


def count_of(value: Any) -> int | None:
    """A number of tokens; None for what is none."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MOST_TOKENS else None


def _reason(value: Any) -> str | None:
    """A finish reason; None for what is none."""
    return value if isinstance(value, str) and len(value) <= _LONGEST_REASON else None


def _failed(error: Any) -> RolloutError:
    """What the server itself calls a failure is none of the model: never a reward, and another try may mend it."""
    said = error.get("message", error) if isinstance(error, dict) else error
    return RolloutError(FailureKind.HTTP_5XX, f"the server says that the response failed: {said}")


def _unreadable(message: str, body: bytes) -> RolloutError:
    return RolloutError(FailureKind.PARSE, message, heals=True, row={"answer": body[:_KEPT].decode("utf-8", "replace")})
