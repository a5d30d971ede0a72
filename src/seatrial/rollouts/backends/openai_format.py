"""Requests to OpenAI-compatible servers (responses or chat completions), and their answers as Responses objects.

- The campaign's sampling wins over a row's own parameters, as in Gym. Records use the names of the Responses interface; parameters that it
  lacks (top_k, seed) stand in `metadata.extra_body` as JSON text. Chat completions get them beside the others; vLLM's Responses interface
  takes only the seed there. A parameter that chat completions cannot express is an error, never dropped.
- One turn: tools are passed on, and an answer that calls them is the rollout. Reasoning is an item of its own.
- An answer without content is empty, not broken; a broken promise of the interface is a failure of class `parse`. Unknown token counts and
  finish reasons are null, never zero.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import orjson

from seatrial.core.errors import UserError
from seatrial.core.guarded import BadValue
from seatrial.rollouts.campaign import RESPONSES_KEYS
from seatrial.rollouts.fast_json import parse_json_fast
from seatrial.rollouts.manifest import NO_SEED
from seatrial.rollouts.rollout_record import FailureKind, RolloutError

_SAME = ("temperature", "top_p", "parallel_tool_calls", "service_tier", "store", "user")
_HANDLED = frozenset({*_SAME, "input", "instructions", "max_output_tokens", "tools", "tool_choice", "reasoning", "text", "top_logprobs"})
_PARTS = {"input_text": "text", "text": "text", "output_text": "text"}


def chat_body(params: Mapping[str, Any], *, limit: str) -> dict[str, Any]:
    """The body, without model and metadata; `limit` is what max_output_tokens is called. A ValueError names what has no counterpart."""
    if foreign := sorted(key for key in params if key not in _HANDLED):
        raise ValueError(f'chat completions have no {", ".join(foreign)}: say policy.api = "responses"')
    body: dict[str, Any] = {"messages": _messages(params.get("input", []), params.get("instructions"))}
    body.update((key, params[key]) for key in _SAME if key in params)
    if "max_output_tokens" in params:
        body[limit] = params["max_output_tokens"]
    if "top_logprobs" in params:
        body.update(logprobs=True, top_logprobs=params["top_logprobs"])
    if tools := params.get("tools"):
        body["tools"] = [_tool(tool) for tool in tools]
        if (choice := params.get("tool_choice")) is not None:
            named = isinstance(choice, Mapping) and "name" in choice
            body["tool_choice"] = {"type": "function", "function": {"name": choice["name"]}} if named else choice
    elif "parallel_tool_calls" in body:
        # Servers refuse it where there are no tools; rows that Gym filled with defaults have it all the same.
        del body["parallel_tool_calls"]
    if effort := (params.get("reasoning") or {}).get("effort"):
        body["reasoning_effort"] = effort
    if (form := (params.get("text") or {}).get("format")) and form.get("type") != "text":
        named_form = {"type": "json_schema", "json_schema": {key: value for key, value in form.items() if key != "type"}}
        body["response_format"] = named_form if form.get("type") == "json_schema" else form
    return body


def _messages(items: Any, instructions: str | None) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = [{"role": "system", "content": instructions}] if instructions else []
    if isinstance(items, str):
        return [*messages, {"role": "user", "content": items}]
    assistant: dict[str, Any] | None = None
    for item in items:
        kind = item.get("type") or "message"
        if kind == "message" and item.get("role") != "assistant":
            assistant = None
            messages.append(_message(item))
        elif kind == "function_call_output":
            assistant = None
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": item["output"]})
        else:
            # Reasoning, text and calls of one turn are items of their own here, and one message there.
            if assistant is None:
                assistant = {"role": "assistant", "content": None}
                messages.append(assistant)
            _add(assistant, kind, item)
    return messages


def _message(item: Mapping[str, Any]) -> dict[str, Any]:
    content = item.get("content")
    if isinstance(content, list):
        content = [_part(part) for part in content]
    # Chat-shaped fields that a plain row's message may have (name, tool_call_id) stay.
    return {**{key: value for key, value in item.items() if key not in ("type", "status", "id")}, "content": content}


def _part(part: Mapping[str, Any]) -> Mapping[str, Any]:
    kind = part.get("type")
    if kind in _PARTS:
        return {"type": "text", "text": part["text"]}
    if kind == "input_image":
        return {"type": "image_url", "image_url": {"url": part.get("image_url", ""), "detail": part.get("detail") or "auto"}}
    if kind in ("image_url", "input_audio", "audio_url", "video_url"):
        return part
    raise ValueError(f"chat completions have no content of type {kind}")


def _add(message: dict[str, Any], kind: str, item: Mapping[str, Any]) -> None:
    if kind == "message":
        content = item.get("content") or ""
        text = content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
        message["content"] = (message["content"] or "") + text
        if item.get("tool_calls"):
            message["tool_calls"] = [*message.get("tool_calls", []), *item["tool_calls"]]
    elif kind == "function_call":
        function = {"name": item["name"], "arguments": item["arguments"]}
        message.setdefault("tool_calls", []).append({"id": item["call_id"], "type": "function", "function": function})
    elif kind == "reasoning":
        thought = "".join(part.get("text", "") for part in (item.get("summary") or item.get("content") or ()))
        message["reasoning_content"] = message.get("reasoning_content", "") + thought
    else:
        raise ValueError(f"chat completions have no input item of type {kind}")


def _tool(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    if tool.get("type", "function") != "function":
        raise ValueError(f'chat completions have no tool of type {tool["type"]}: say policy.api = "responses"')
    if "function" in tool:
        return tool
    return {"type": "function", "function": {key: value for key, value in tool.items() if key != "type" and value is not None}}


PARAMETERS = frozenset(
    {
        *RESPONSES_KEYS,
        *("stop", "stop_token_ids", "logprobs", "ignore_eos", "skip_special_tokens", "include_stop_str_in_output", "bad_words"),
        *("logit_bias", "reasoning_effort", "response_format", "chat_template_kwargs", "guided_json", "guided_regex", "guided_choice"),
        *("structured_outputs", "allowed_token_ids", "return_token_ids", "add_generation_prompt", "spaces_between_special_tokens"),
    }
)
"""What servers are known to take, besides numbers; any other is passed on as well."""
_LIMITS = ("max_output_tokens", "max_tokens", "max_completion_tokens")
_REFUSED = {
    "model": "say policy.model",
    "input": "prompts come from the datasets",
    "messages": "prompts come from the datasets",
    "seed": "say work.seed: each unit has a seed of its own",
    "n": "say work.repeats: each rollout is a request of its own",
    "stream": "answers are read whole",
}


class PolicyRequest(NamedTuple):
    """A request, and how it is recorded."""

    body: bytes
    params: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Sampling:
    """The campaign's parameters, sorted once for all requests."""

    known: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    """Those that only some servers know."""
    limit: str = "max_tokens"
    """What a chat server is told for max_output_tokens."""


def sort_sampling(sampling: Mapping[str, Any]) -> Sampling:
    """Sort [sampling]; a UserError names a key that cannot stand there."""
    for key, fix in _REFUSED.items():
        if key in sampling:
            raise UserError(f"campaign: sampling.{key} cannot be said", fix)
    said = [name for name in _LIMITS if sampling.get(name) is not None]
    if len(said) > 1:
        raise UserError(f"campaign: sampling.{said[0]} and sampling.{said[1]} are the same thing", "keep one of them")
    if said and not (type(limit := sampling[said[0]]) is int and limit >= 1):
        raise UserError(f"campaign: sampling.{said[0]} is {limit!r}", "say a whole number of tokens, at least 1")
    known = {key: value for key, value in sampling.items() if key in RESPONSES_KEYS and value is not None}
    if said:
        known["max_output_tokens"] = sampling[said[0]]
    extra = {key: value for key, value in sampling.items() if key not in RESPONSES_KEYS and key not in _LIMITS and value is not None}
    return Sampling(known, extra, said[0] if said and said[0] != "max_output_tokens" else "max_tokens")


def build_request(
    own: Mapping[str, Any], sampling: Sampling, *, api: Literal["chat", "responses"], model: str, seed: int, vllm: bool = False
) -> PolicyRequest:
    """The request for a row whose own parameters, `input` among them, are `own`; `vllm`: the server is one. A ValueError says what
    cannot be asked."""
    params = {key: value for key, value in own.items() if value is not None and key not in ("stream", "model")} | sampling.known
    metadata = params.pop("metadata", None) or {}
    if not isinstance(metadata, Mapping):
        raise ValueError("responses_create_params.metadata is no object")
    extra = _loads(metadata, "extra_body") | sampling.extra
    if seed != NO_SEED:
        extra["seed"] = seed
    if api == "chat":
        template = _loads(metadata, "chat_template_kwargs")
        asked = chat_body(params, limit=sampling.limit)
        asked.update((key, value) for key, value in extra.items() if key not in asked)
        if template:
            asked["chat_template_kwargs"] = {**(asked.get("chat_template_kwargs") or {}), **template}
    else:
        asked = {**params, **{key: value for key, value in extra.items() if vllm or key != "seed"}}
    if extra:
        metadata = {**metadata, "extra_body": orjson.dumps(extra).decode()}
    if metadata:
        params["metadata"] = metadata
        if api == "responses":
            asked["metadata"] = metadata
    asked["model"] = model
    return PolicyRequest(orjson.dumps(asked), params)


def _loads(metadata: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Gym keeps objects in metadata as JSON texts."""
    text = metadata.get(key)
    if not text:
        return {}
    try:
        value = parse_json_fast(text) if isinstance(text, str) else text
    except BadValue as error:
        raise ValueError(f"responses_create_params.metadata.{key} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"responses_create_params.metadata.{key} is no object")
    return value


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
class PolicyAnswer:
    """An answer that can be scored."""

    response: dict[str, Any]
    text: str
    """What the model said last; empty when it only thought or called tools."""
    finish: str | None
    """As the server said: stop, length, tool_calls, …"""
    input_tokens: int | None
    output_tokens: int | None

    @property
    def output(self) -> Sequence[Mapping[str, Any]]:
        items: Sequence[Mapping[str, Any]] = self.response["output"]
        return items


def read(body: bytes, api: Literal["chat", "responses"], number: int) -> PolicyAnswer:
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
    texts = [_answer_text(item["content"]) for item in output if item["type"] == "message"]
    return texts[-1] if texts else ""


def _from_chat(data: dict[str, Any], number: int) -> PolicyAnswer:
    choice = data["choices"][0]
    message, finish = choice["message"], choice.get("finish_reason")
    if data.get("error") or finish in _BROKEN_OFF:
        raise _failed(data.get("error") or f"finish_reason is {finish}")
    output: list[dict[str, Any]] = []
    if thought := message.get("reasoning_content") or message.get("reasoning"):
        summary = [{"text": thought, "type": "summary_text"}]
        output.append({"id": f"rs_{number}", "type": "reasoning", "summary": summary, "status": "completed"})
    text = _answer_text(message.get("content"))
    calls = message.get("tool_calls") or ()
    if text or not (output or calls):
        part = {"annotations": [], "text": text, "type": "output_text"}
        output.append({"id": f"msg_{number}", "content": [part], "role": "assistant", "status": "completed", "type": "message"})
    for call in calls:
        function = call["function"]
        item = {"name": function["name"], "arguments": function["arguments"], "call_id": call["id"], "type": "function_call"}
        output.append({**item, "id": call["id"], "status": "completed"})
    usage = _chat_usage(data["usage"]) if data.get("usage") else {}
    response = {
        "id": data.get("id") or f"resp_{number}",
        "created_at": data.get("created"),
        "model": data.get("model"),
        "object": "response",
        "output": output,
        "status": "incomplete" if finish == "length" else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if finish == "length" else None,
        "usage": usage or None,
    }
    return PolicyAnswer(response, text, _reason(finish), count_of(usage.get("input_tokens")), count_of(usage.get("output_tokens")))


def _answer_text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part["text"] for part in content if part.get("type") in ("text", "output_text"))


def _chat_usage(usage: dict[str, Any]) -> dict[str, Any]:
    thought = (usage.get("completion_tokens_details") or {}).get("reasoning_tokens") or 0
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return {
        "input_tokens": usage.get("prompt_tokens"),
        "input_tokens_details": {"cached_tokens": cached},
        "output_tokens": usage.get("completion_tokens"),
        "output_tokens_details": {"reasoning_tokens": thought},
        "total_tokens": usage.get("total_tokens"),
    }


def _from_responses(data: dict[str, Any]) -> PolicyAnswer:
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
    return PolicyAnswer(data, text, _reason(finish), count_of(usage.get("input_tokens")), count_of(usage.get("output_tokens")))


def count_of(value: Any) -> int | None:
    """A number of tokens; None for what is none."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MOST_TOKENS else None


def _reason(value: Any) -> str | None:
    return value if isinstance(value, str) and len(value) <= _LONGEST_REASON else None


def _failed(error: Any) -> RolloutError:
    """What the server itself calls a failure is none of the model: never a reward, and another try may mend it."""
    said = error.get("message", error) if isinstance(error, dict) else error
    return RolloutError(FailureKind.HTTP_5XX, f"the server says that the response failed: {said}")


def _unreadable(message: str, body: bytes) -> RolloutError:
    return RolloutError(FailureKind.PARSE, message, heals=True, row={"answer": body[:_KEPT].decode("utf-8", "replace")})
