"""A sceptic's server: what it calls a failure is never a reward, what is no number is no count, and its headers leak no key."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
import pytest

from seatrial.rollouts.backends import direct_backend as clients
from seatrial.rollouts.backends.direct_backend import OpenAIClient
from seatrial.rollouts.backends.openai_format import read
from seatrial.rollouts.campaign import Requests
from seatrial.rollouts.rollout_record import FailureKind, RolloutError

KEY = "no-pattern-knows-this-one"


def chat(finish: Any = "stop", **more: Any) -> bytes:
    return orjson.dumps({"choices": [{"message": {"content": "C"}, "finish_reason": finish}], **more})


def responses(**more: Any) -> bytes:
    item = {"type": "message", "content": [{"type": "output_text", "text": "C"}]}
    return orjson.dumps({"status": "completed", "output": [item], **more})


@pytest.mark.parametrize("count", ["40", 1.5, [1], {}, -1, True, 1 << 60, None])
def test_what_is_no_count_of_tokens_is_unknown(count: Any) -> None:
    answer = read(chat(usage={"prompt_tokens": count, "completion_tokens": count}), "chat", 0)
    assert (answer.input_tokens, answer.output_tokens, answer.text) == (None, None, "C")
    answer = read(responses(usage={"input_tokens": count, "output_tokens": count}), "responses", 0)
    assert (answer.input_tokens, answer.output_tokens, answer.text) == (None, None, "C")


@pytest.mark.parametrize("finish", [{"type": "stop"}, 3, ["x"], False, "x" * 101])
def test_what_is_no_finish_reason_is_unknown(finish: Any) -> None:
    assert read(chat(finish), "chat", 0).finish is None


def test_odd_incomplete_details_are_unknown() -> None:
    assert read(responses(status="incomplete", incomplete_details={"reason": {"a": 1}}), "responses", 0).finish is None


@pytest.mark.parametrize("body", [chat("abort"), chat("error"), chat(error={"message": "out of memory"}), chat(error="gone")])
def test_a_chat_answer_that_the_server_broke_off_is_no_rollout(body: bytes) -> None:
    with pytest.raises(RolloutError, match="response failed") as caught:
        read(body, "chat", 0)
    assert (caught.value.kind, caught.value.heals) == (FailureKind.HTTP_5XX, True)


@pytest.mark.parametrize("more", [{"status": "cancelled"}, {"status": "in_progress"}, {"status": "queued"}, {"error": "gone"}])
def test_a_response_that_is_not_done_is_no_rollout(more: dict[str, Any]) -> None:
    with pytest.raises(RolloutError, match="response failed") as caught:
        read(responses(**more), "responses", 0)
    assert (caught.value.kind, caught.value.heals) == (FailureKind.HTTP_5XX, True)


def asked(answer: bytes, *, ask: str = "post") -> Any:
    """What the client makes of a server that sends these bytes and closes."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()
        writer.close()

    async def main() -> Any:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        client = OpenAIClient([f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"], "chat/completions", KEY, Requests())
        await client.open()
        try:
            return await asyncio.wait_for(client.post(b"") if ask == "post" else client.alive(), 60)
        finally:
            await client.close()
            server.close()

    return asyncio.run(main())


def test_the_key_is_in_no_message_not_even_from_a_header() -> None:
    for answer in (
        f"HTTP/1.1 307 X\r\nLocation: http://elsewhere/{KEY}\r\nContent-Length: 0\r\n\r\n",
        f"HTTP/1.1 200 X\r\nX-Echo\x01: {KEY}\r\n\r\n",
        f"{KEY}\r\n\r\n",
    ):
        with pytest.raises(RolloutError) as caught:
            asked(answer.encode())
        assert KEY not in str(caught.value)
        assert KEY not in str(asked(answer.encode(), ask="alive"))


def test_an_answer_without_end_costs_its_row_and_not_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "MOST_BYTES", 1000)
    chunks = b"HTTP/1.1 200 X\r\nTransfer-Encoding: chunked\r\n\r\n" + b"64\r\n" + b" " * 100 + b"\r\n"
    with pytest.raises(RolloutError, match="longer than") as caught:
        asked(chunks + (b"64\r\n" + b" " * 100 + b"\r\n") * 50)
    assert (caught.value.kind, caught.value.heals) == (FailureKind.PARSE, True)
    assert "longer than" in asked(chunks + (b"64\r\n" + b" " * 100 + b"\r\n") * 50, ask="alive")


def test_an_answer_up_to_the_limit_is_read_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "MOST_BYTES", 1000)
    assert asked(b"HTTP/1.1 200 X\r\nContent-Length: 1000\r\n\r\n" + b"x" * 1000) == b"x" * 1000
