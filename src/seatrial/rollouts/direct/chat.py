"""Parameters of the Responses interface as a body of chat completions, the way Gym's own model server turns them.

A parameter that chat completions cannot express is an error, never left out: a rollout that silently ignored part of its row would
count as one that did not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
