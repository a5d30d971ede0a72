"""The router takes no request that two readers could read differently, and waits for no client for ever. In this process, raw sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable

import pytest

from seatrial.launch.staged import router

Talk = Callable[[int, list[bytes]], Awaitable[None]]
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


def routed(talk: Talk, answer: bytes = ANSWER) -> None:
    """Talk to a router; the list is what its backend received on each connection."""

    async def both() -> None:
        received: list[bytes] = []
        busy: set[asyncio.Task[None] | None] = set()

        async def backend(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            busy.add(asyncio.current_task())
            received.append(b"")
            place = len(received) - 1
            try:
                while piece := await reader.read(65536):
                    received[place] += piece
                    if _whole(received[place]):
                        writer.write(answer)
            except OSError:
                pass
            finally:
                writer.close()

        behind = await asyncio.start_server(backend, "127.0.0.1", 0)
        proxy = router.Router([router.Backend(f"http://127.0.0.1:{behind.sockets[0].getsockname()[1]}")], "")
        loop = asyncio.get_running_loop()

        def protocol() -> asyncio.StreamReaderProtocol:
            return asyncio.StreamReaderProtocol(router.Client(loop), proxy.serve, loop=loop)  # type: ignore[arg-type]

        front = await loop.create_server(protocol, "127.0.0.1", 0)
        try:
            await talk(front.sockets[0].getsockname()[1], received)
        finally:
            front.close()
            behind.close()
            for task in (*proxy.tasks, *busy):
                if task is not None:
                    task.cancel()
            await asyncio.gather(*proxy.tasks, return_exceptions=True)

    asyncio.run(asyncio.wait_for(both(), 20))


def _whole(request: bytes) -> bool:
    head, gap, body = request.partition(b"\r\n\r\n")
    if not gap:
        return False
    if b"chunked" in head:
        return body.endswith(b"0\r\n\r\n")
    length = [int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")]
    return len(body) >= (length or [0])[0]


async def exchange(port: int, pieces: Iterable[bytes]) -> bytes:
    """All that the router answers."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for piece in pieces:
        writer.write(piece)
        await writer.drain()
    try:
        return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()


def post(*headers: str, body: bytes = b"hello") -> bytes:
    return "".join(["POST /x HTTP/1.1\r\nHost: a\r\n", *(f"{header}\r\n" for header in headers), "\r\n"]).encode("latin-1") + body


def chunked(body: bytes) -> bytes:
    return post("Transfer-Encoding: chunked", "Connection: close", body=body)


REFUSED: dict[str, bytes] = {
    "negative length": post("Content-Length: -1"),
    "signed length": post("Content-Length: +5"),
    "hex length": post("Content-Length: 0x5"),
    "fractional length": post("Content-Length: 5.0"),
    "underscored length": post("Content-Length: 1_0"),
    "empty length": post("Content-Length:"),
    "length of other digits": post("Content-Length: \u00b2"),
    "length with a space": post("Content-Length: 5 5"),
    "list of lengths": post("Content-Length: 5, 5"),
    "two lengths": post("Content-Length: 5", "Content-Length: 6"),
    "the same length twice": post("Content-Length: 5", "Content-Length: 5"),
    "overlong length": post("Content-Length: " + "9" * 5000),
    "length beside chunks": post("Content-Length: 5", "Transfer-Encoding: chunked", body=b"0\r\n\r\n"),
    "chunks beside length": post("Transfer-Encoding: chunked", "Content-Length: 5", body=b"0\r\n\r\n"),
    "two encodings": post("Transfer-Encoding: chunked", "Transfer-Encoding: chunked", body=b"0\r\n\r\n"),
    "another encoding": post("Transfer-Encoding: identity"),
    "an encoding that ends like it": post("Transfer-Encoding: xchunked", body=b"0\r\n\r\n"),
    "a list of encodings": post("Transfer-Encoding: gzip, chunked", body=b"0\r\n\r\n"),
    "an empty encoding": post("Transfer-Encoding:", body=b"0\r\n\r\n"),
    "a tab in the encoding": post("Transfer-Encoding: \x0bchunked", body=b"0\r\n\r\n"),
    "a space before the colon": post("Content-Length : 5"),
    "a folded header": post("X: a", " Content-Length: 5"),
    "a bare line feed": b"POST /x HTTP/1.1\r\nX: a\nContent-Length: 5\r\n\r\nhello",
    "a bare carriage return": b"POST /x HTTP/1.1\r\nX: a\rContent-Length: 5\r\n\r\nhello",
    "a zero byte": post("X: a\x00b"),
    "chunks in HTTP/1.0": b"POST /x HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "a version that is none": b"GET /x HTTP/1.9\r\n\r\n",
    "two spaces": b"GET  /x HTTP/1.1\r\n\r\n",
    "too many headers": post(*(f"X-{number}: 1" for number in range(300))),
    "an overlong head": post("X: " + "y" * 100_000),
    "hex prefix": chunked(b"0x5\r\nhello\r\n0\r\n\r\n"),
    "negative size": chunked(b"-5\r\nhello\r\n0\r\n\r\n"),
    "signed size": chunked(b"+5\r\nhello\r\n0\r\n\r\n"),
    "underscored size": chunked(b"0_5\r\nhello\r\n0\r\n\r\n"),
    "a space before the size": chunked(b" 5\r\nhello\r\n0\r\n\r\n"),
    "an empty size": chunked(b"\r\nhello\r\n0\r\n\r\n"),
    "an overlong size": chunked(b"0" * 40 + b"5\r\nhello\r\n0\r\n\r\n"),
    "a huge size": chunked(b"f" * 17 + b"\r\nhello"),
    "a size with a bare line feed": chunked(b"5\nhello\r\n0\r\n\r\n"),
    "no line behind a chunk": chunked(b"5\r\nhello0\r\n\r\n"),
    "a chunk longer than its size": chunked(b"4\r\nhello\r\n0\r\n\r\n"),
    "a bare line feed behind a chunk": chunked(b"5\r\nhello\n0\r\n\r\n"),
    "an overlong extension": chunked(b"5;" + b"x" * 5000 + b"\r\nhello\r\n0\r\n\r\n"),
    "a zero byte in an extension": chunked(b"5;a=\0\r\nhello\r\n0\r\n\r\n"),
    "endless trailers": chunked(b"0\r\n" + b"X: y\r\n" * 300),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_could_be_read_differently_is_refused(name: str) -> None:
    async def talk(port: int, received: list[bytes]) -> None:
        answer = await exchange(port, [REFUSED[name] + b"GET /smuggled HTTP/1.1\r\n\r\n"])
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert answer.count(b"HTTP/1.1 ") == 1
        assert not any(b"/smuggled" in data or _whole(data) for data in received)

    routed(talk)


@pytest.mark.parametrize(
    ("data", "sent"),
    [
        (post("Content-Length: 5", "Connection: close"), b"hello"),
        (post("content-length:5", "Connection: close"), b"hello"),
        (post("Connection: close", body=b""), b""),
        (chunked(b"5\r\nhello\r\n0\r\n\r\n"), b"5\r\nhello\r\n0\r\n\r\n"),
        (chunked(b"005;name=value\r\nhello\r\nA\r\n0123456789\r\n0\r\nTrailer: x\r\n\r\n"), b"5\r\nhello\r\na\r\n0123456789\r\n0\r\n\r\n"),
    ],
)
def test_proper_bodies_pass(data: bytes, sent: bytes) -> None:
    async def talk(port: int, received: list[bytes]) -> None:
        assert (await exchange(port, [data])).endswith(b"\r\n\r\nok")
        assert received[0].partition(b"\r\n\r\n")[2] == sent

    routed(talk)


@pytest.mark.parametrize("data", [post("Content-Length: 10"), chunked(b"a\r\nhello"), chunked(b"a")])
def test_a_body_that_does_not_come(data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router, "_BODY_IDLE_S", 0.05)

    async def talk(port: int, received: list[bytes]) -> None:
        assert (await exchange(port, [data])).startswith(b"HTTP/1.1 408 ")

    routed(talk)


def test_a_body_that_comes_too_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router, "_PACE_AFTER_S", 0.0)
    monkeypatch.setattr(router, "_PACE", 10**12)

    async def talk(port: int, received: list[bytes]) -> None:
        assert (await exchange(port, [post("Content-Length: 10")])).startswith(b"HTTP/1.1 408 ")

    routed(talk)


def test_a_head_that_does_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router, "_IDLE_S", 0.05)

    async def talk(port: int, received: list[bytes]) -> None:
        assert await exchange(port, [b"GET /x HTTP/1.1\r\nX: "]) == b""
        assert await exchange(port, []) == b""
        assert received == []

    routed(talk)


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\nContent-Length: -2\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\nX: a\nSet-Cookie: b\r\n\r\nok",
        b"nonsense\r\n\r\n",
    ],
)
def test_an_answer_that_could_be_read_differently_is_a_502(answer: bytes) -> None:
    async def talk(port: int, received: list[bytes]) -> None:
        assert (await exchange(port, [post("Content-Length: 5")])).startswith(b"HTTP/1.1 502 ")

    routed(talk, answer)
