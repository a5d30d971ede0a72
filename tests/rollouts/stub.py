"""A stub model server: raw asyncio, chat completions and responses, deterministic by the hash of prompt and seed.

What goes wrong is asked for by a marker in the prompt, so that one row of many can be poisoned:
`[[status=500]]`, `[[status=500 times=2]]` (then fine), `[[context]]`, `[[drop]]`, `[[hang]]`, `[[garbage]]`, `[[nochoices]]`, `[[null]]`,
`[[redirect]]`, `[[echo]]` (an error that shows the Authorization header), `[[length]]`, `[[think]]`, `[[tool]]`.
A prompt with `[[gold=X p=0.3]]` is answered with X in three of ten seeds, else with another letter.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections import Counter
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import orjson

MODEL = "stub"
_GOLD = re.compile(r"\[\[gold=(\w+) p=([\d.]+)\]\]")
_STATUS = re.compile(r"\[\[status=(\d+)(?: times=(\d+))?\]\]")
_CONTEXT = "This model's maximum context length is 4096 tokens. However, you requested 5000 tokens in the messages."


@dataclass
class Stub:
    """Options, what was seen, and the server itself (`async with`)."""

    latency_s: float = 0.0
    capacity: int | None = None
    """More open requests than these are refused with 429."""
    retry_after: str | None = None
    padding: int = 0
    """Characters of filler in each answer."""
    models: tuple[str, ...] = (MODEL,)
    owner: str = "stub"
    """Who the listing says that the models belong to."""
    key: str | None = None
    """Refuse requests without it."""
    port: int = 0
    calls: int = 0
    open: int = 0
    most_open: int = 0
    refused: int = 0
    prompts: Counter[str] = field(default_factory=Counter)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    """The last few requests."""
    keep_bodies: bool = True
    connections: set[asyncio.Transport] = field(default_factory=set)
    _server: asyncio.Server | None = None

    @property
    def url(self) -> str:
        """Base URL."""
        return f"http://127.0.0.1:{self.port}/v1"

    async def start(self) -> None:
        """Listen, again on the same port after `die`."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Connection(self), "127.0.0.1", self.port, reuse_address=True)
        self.port = self._server.sockets[0].getsockname()[1]

    async def die(self) -> None:
        """Go away in the middle of everything."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for transport in list(self.connections):
            transport.abort()
        self.open = 0
        await asyncio.sleep(0)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.die()


class _Connection(asyncio.Protocol):
    def __init__(self, stub: Stub) -> None:
        self.stub = stub
        self.data = b""
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.stub.connections.add(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        assert self.transport is not None
        self.stub.connections.discard(self.transport)

    def data_received(self, data: bytes) -> None:
        self.data += data
        while (end := self.data.find(b"\r\n\r\n")) >= 0:
            head = self.data[:end]
            at = head.lower().find(b"content-length:")
            length = int(head[at + 15 : (head + b"\r\n").find(b"\r\n", at)]) if at >= 0 else 0
            if len(self.data) < end + 4 + length:
                return
            body, self.data = self.data[end + 4 : end + 4 + length], self.data[end + 4 + length :]
            self.take(head, body)

    def take(self, head: bytes, body: bytes) -> None:
        """One request."""
        stub = self.stub
        if stub.key is not None and f"authorization: bearer {stub.key}".encode().lower() not in head.lower():
            return self.answer(401, {"error": {"message": "no such key"}})
        if head.startswith(b"GET"):
            return self.answer(200, {"object": "list", "data": [{"id": name, "owned_by": stub.owner} for name in stub.models]})
        stub.calls += 1
        if stub.capacity is not None and stub.open >= stub.capacity:
            stub.refused += 1
            wait = {"Retry-After": stub.retry_after} if stub.retry_after else {}
            return self.answer(429, {"error": {"message": "too many requests"}}, wait)
        stub.open += 1
        stub.most_open = max(stub.most_open, stub.open)
        if stub.latency_s:
            asyncio.get_running_loop().call_later(stub.latency_s, self.respond, head, body)
            return None
        return self.respond(head, body)

    def respond(self, head: bytes, body: bytes) -> None:
        """The answer, or what the prompt's marker asks for."""
        stub, asked = self.stub, orjson.loads(body)
        if stub.keep_bodies:
            stub.bodies = [*stub.bodies[-20:], asked]
        prompt = _prompt(asked)
        if "[[hang]]" in prompt:
            return None
        stub.open = max(stub.open - 1, 0)
        trouble = self.trouble(prompt, head) if "[[" in prompt else None
        if trouble is not None:
            return self.answer(*trouble)
        if "[[drop]]" in prompt:
            assert self.transport is not None
            return self.transport.abort()
        responses = head.split(b" ", 2)[1].endswith(b"/responses")
        return self.answer(200, (_responses if responses else _chat)(asked, prompt, stub.padding))

    def trouble(self, prompt: str, head: bytes) -> tuple[int, Any, dict[str, str]] | None:
        """Status, body and headers of what goes wrong."""
        self.stub.prompts[prompt] += 1
        if match := _STATUS.search(prompt):
            if match[2] and self.stub.prompts[prompt] > int(match[2]):
                return None
            return int(match[1]), {"error": {"message": f"made to answer {match[1]}"}}, {}
        if "[[context]]" in prompt:
            return 400, {"object": "error", "message": _CONTEXT, "type": "BadRequestError", "code": 400}, {}
        if "[[echo]]" in prompt:
            return 500, {"error": {"message": "headers were " + head.decode().replace("\r\n", " | ")}}, {}
        if "[[redirect]]" in prompt:
            return 307, b"", {"Location": "http://127.0.0.1:1/elsewhere"}
        if "[[garbage]]" in prompt:
            return 200, b"<html>bad gateway</html>", {}
        return (200, {"object": "chat.completion"}, {}) if "[[nochoices]]" in prompt else None

    def answer(self, status: int, body: Any, headers: dict[str, str] | None = None) -> None:
        """Write one."""
        data = body if isinstance(body, bytes) else orjson.dumps(body)
        more = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
        if self.transport is not None and not self.transport.is_closing():
            head = f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\n{more}Content-Length: {len(data)}\r\n\r\n"
            self.transport.write(head.encode() + data)


def _prompt(asked: dict[str, Any]) -> str:
    said = asked.get("messages") or asked.get("input") or ""
    content = said if isinstance(said, str) else said[-1].get("content")
    return content if isinstance(content, str) else orjson.dumps(content).decode()


def reply(prompt: str, seed: Any) -> str:
    """What the stub says to a prompt and a seed."""
    digest = hashlib.sha256(f"{prompt}|{seed}".encode()).digest()
    gold = _GOLD.search(prompt)
    right = gold is not None and int.from_bytes(digest[:4], "big") / 2**32 < float(gold[2])
    letter = gold[1] if gold and right else "WXYZ"[digest[4] % 4]
    return f"The final answer is \\boxed{{{letter}}}"


def _chat(asked: dict[str, Any], prompt: str, padding: int) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": "x" * padding + reply(prompt, asked.get("seed"))}
    finish = "stop"
    if "[[" in prompt:
        if "[[null]]" in prompt:
            message["content"] = None
        if "[[think]]" in prompt:
            message["reasoning_content"] = "let me think"
        if "[[tool]]" in prompt:
            message.update(content=None, tool_calls=[{"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}])
            finish = "tool_calls"
        finish = "length" if "[[length]]" in prompt else finish
    usage = {"prompt_tokens": 40, "completion_tokens": 12, "total_tokens": 52}
    choice = {"index": 0, "message": message, "finish_reason": finish}
    return {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": MODEL, "choices": [choice], "usage": usage}


def _responses(asked: dict[str, Any], prompt: str, padding: int) -> dict[str, Any]:
    extra = orjson.loads((asked.get("metadata") or {}).get("extra_body", "{}"))
    text = "x" * padding + reply(prompt, extra.get("seed"))
    part = {"type": "output_text", "text": text, "annotations": []}
    item = {"id": "msg_1", "type": "message", "role": "assistant", "status": "completed", "content": [part]}
    usage = {"input_tokens": 40, "output_tokens": 12, "total_tokens": 52}
    short = "[[length]]" in prompt
    why = {"reason": "max_output_tokens"} if short else None
    status = "incomplete" if short else "completed"
    return {"id": "resp_1", "object": "response", "status": status, "incomplete_details": why, "output": [item], "usage": usage}
