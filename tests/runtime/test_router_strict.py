"""The router takes no request that two readers could read differently, and waits for no client for ever. In this process, raw sockets."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable, Iterable

import pytest

from seatrial.runtime.staged import router

Talk = Callable[[int, list[bytes]], Awaitable[None]]
ENDED = b"(ended)"
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


def routed(talk: Talk, answer: bytes = ANSWER, most: int = 1000, closes: bool = False, reads: bool = True) -> None:
    """Talk to a router; the list is what its backend received on each connection, and `ENDED` for each that ended."""

    async def both() -> None:
        received: list[bytes] = []
        busy: set[asyncio.Task[None] | None] = set()

        async def backend(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            busy.add(asyncio.current_task())
            received.append(b"")
            place = len(received) - 1
            try:
                while not reads:
                    await asyncio.sleep(1)
                while piece := await reader.read(65536):
                    received[place] += piece
                    if _whole(received[place]):
                        writer.write(answer)
                        if closes:
                            break
            except OSError:
                pass
            finally:
                received.append(ENDED)
                writer.close()

        behind = await asyncio.start_server(backend, "127.0.0.1", 0)
        proxy = router.Router([router.Backend(f"http://127.0.0.1:{behind.sockets[0].getsockname()[1]}")], "", most)
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
    "two hosts": post("Host: b", "Content-Length: 5"),
    "a tunnel": b"CONNECT a:80 HTTP/1.1\r\nHost: a:80\r\n\r\n",
    "HTTP/0.9": b"GET /x\r\n\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
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
        b"HTTP/1.1 200 OK\rSet-Cookie: b\r\nContent-Length: 2\r\n\r\nok",
        b"HTTP/1.0 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n",
        b"HTTP/1.1 204 OK\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\nok",
        b"HTTP/1.1 103 Early Hints\r\n\r\n" * 200 + ANSWER,
        b"HTTP/1.1 200 OK\r\nX: " + b"y" * 100_000 + b"\r\n\r\n",
        b"HTTP/1.1 2000 OK\r\n\r\n",
        b"HTTP/2 200\r\n\r\n",
    ],
)
def test_an_answer_that_could_be_read_differently_is_a_502(answer: bytes) -> None:
    async def talk(port: int, received: list[bytes]) -> None:
        assert (await exchange(port, [post("Content-Length: 5")])).startswith(b"HTTP/1.1 502 ")

    routed(talk, answer)


@pytest.mark.parametrize(
    ("answer", "got"),
    [
        (b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" * 3 + ANSWER, b"ok"),
        (b"HTTP/1.1 200 HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\nTrailer: x\r\n\r\n", b"2\r\nok\r\n0\r\n\r\n"),
        (b"HTTP/1.1 204 No Content\r\nContent-Length: 2\r\n\r\nok", b""),
        (b"HTTP/1.1 304 Not Modified\r\nContent-Length: 2\r\n\r\nok", b""),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0x2\r\nok\r\n0\r\n\r\n", b"2\r\nok\r\n"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n-1\r\n\r\n", b"2\r\nok\r\n"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\n0\r\n\r\n", b"2\r\nok"),
    ],
)
def test_what_a_client_gets_of_an_answer(answer: bytes, got: bytes) -> None:
    """Never the end of a body that broke off, never the body of an answer that has none."""

    async def talk(port: int, received: list[bytes]) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(post("Content-Length: 5", "Connection: close"))
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith((b"HTTP/1.1 2", b"HTTP/1.1 304"))
        found = b""
        try:
            while piece := await reader.read(65536):
                found += piece
        except ConnectionError:
            pass
        assert found == got
        writer.close()

    routed(talk, answer)


def test_requests_behind_each_other_are_answered_in_turn() -> None:
    async def talk(port: int, received: list[bytes]) -> None:
        one = post("Content-Length: 5") + chunked(b"5\r\nhello\r\n0\r\n\r\n").replace(b"Connection: close\r\n", b"")
        answer = await exchange(port, [one * 3 + post("Content-Length: 5", "Connection: close") + b"GET /late HTTP/1.1\r\n\r\n"])
        assert answer.count(b"HTTP/1.1 200 OK") == 7
        assert [data.count(b"POST /x ") for data in received if data != ENDED] == [1] * 7

    routed(talk)


@pytest.mark.parametrize("path", ["/health", "/router/status"])
def test_an_answer_of_its_own_to_head_has_no_body(path: str) -> None:
    async def talk(port: int, received: list[bytes]) -> None:
        head = f"HEAD {path} HTTP/1.1\r\nHost: a\r\n\r\n".encode()
        answer = await exchange(port, [head + post("Content-Length: 5", "Connection: close")])
        first, _, rest = answer.partition(b"\r\n\r\n")
        assert first.startswith(b"HTTP/1.1 200 ")
        assert rest.startswith(b"HTTP/1.1 200 ")

    routed(talk)


@pytest.mark.parametrize(
    ("data", "asked"),
    [
        (post("Content-Length: 5", "Expect: 100-continue", "Connection: close"), True),
        (post("Content-Length: 5", "Expect: 100-Continue", "Connection: close"), True),
        (post("Expect: 100-continue", "Connection: close", body=b""), False),
        (post("Content-Length: 5", "Expect: 42", "Connection: close"), False),
        (b"POST /x HTTP/1.0\r\nContent-Length: 5\r\nExpect: 100-continue\r\n\r\nhello", False),
    ],
)
def test_who_is_told_to_go_on(data: bytes, asked: bool) -> None:
    async def talk(port: int, received: list[bytes]) -> None:
        answer = await exchange(port, [data])
        assert answer.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 " if asked else b"HTTP/1.1 200 ")
        assert b"xpect" not in received[0]

    routed(talk)


LARGE = 8 << 20


@pytest.mark.parametrize(
    "data",
    [
        post("Content-Length: -1", body=b"x" * LARGE),
        chunked(b"zz\r\n" + b"x" * LARGE),
        b"GET /x HTTP/1.1\r\nX: " + b"x" * LARGE,
    ],
)
def test_the_reason_arrives_though_the_body_was_not_read(data: bytes) -> None:
    """A connection that is closed with unread data is reset, and what was answered is lost."""

    async def talk(port: int, received: list[bytes]) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(data)
        await writer.drain()  # as most clients do: everything is sent before anything is read
        await asyncio.sleep(0.2)
        assert (await reader.read()).startswith(b"HTTP/1.1 400 ")
        writer.close()

    routed(talk)


def test_the_reason_arrives_where_no_backend_is(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(_: router.Backend) -> None:
        raise router.Refused("nobody")

    monkeypatch.setattr(router.Backend, "connect", refuse)

    async def talk(port: int, received: list[bytes]) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(post(f"Content-Length: {LARGE}", body=b"x" * LARGE))
        await writer.drain()
        await asyncio.sleep(0.2)
        assert (await reader.read()).startswith(b"HTTP/1.1 502 ")
        writer.close()

    routed(talk)


def test_an_early_answer_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.runtime.test_router_strict._whole", lambda request: b"\r\n\r\n" in request)  # before the body

    async def talk(port: int, received: list[bytes]) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(post(f"Content-Length: {LARGE}"))
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"Connection: close" in head
        writer.write(b"x" * (LARGE - 5))
        assert await reader.read() == b"ok"
        writer.close()

    routed(talk, b"HTTP/1.1 413 Too Large\r\nContent-Length: 2\r\n\r\nok")


def test_too_many_connections() -> None:
    async def talk(port: int, received: list[bytes]) -> None:
        assert (await exchange(port, [post("Content-Length: 5")])).startswith(b"HTTP/1.1 503 ")
        assert received == []

    routed(talk, most=0)


@pytest.mark.parametrize("more", [b"", b"GET /next HTTP/1.1\r\n\r\n" * 8_000])
def test_a_client_that_leaves_is_noticed(more: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it had sent more than anybody reads: then its end is not among what was read."""
    monkeypatch.setattr(router, "_LOOK_S", 0.05)

    async def talk(port: int, received: list[bytes]) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(post("Content-Length: 5"))
        while not received:
            await asyncio.sleep(0.01)
        writer.write(more)
        await asyncio.sleep(0.1)
        writer.transport.abort()
        while ENDED not in received:
            await asyncio.sleep(0.01)

    routed(talk, b"")


def test_a_client_that_reads_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router, "_UNREAD_S", 0.1)
    monkeypatch.setattr(router, "_IDLE_S", 0.1)
    monkeypatch.setattr(router, "_LINGER_S", 0.1)

    async def talk(port: int, received: list[bytes]) -> None:
        held = socket.create_connection(("127.0.0.1", port))
        held.sendall(post("Content-Length: 5"))
        while ENDED not in received:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.5)
        received.clear()
        found = held.recv(64 << 20)
        while found:
            try:
                found = held.recv(64 << 20)
            except ConnectionError:
                found = b""
        held.close()

    routed(talk, b"HTTP/1.1 200 OK\r\nContent-Length: 33554432\r\n\r\n" + b"x" * (32 << 20))


def test_a_backend_that_takes_nothing_of_a_body_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router, "_UNREAD_S", 0.2)
    monkeypatch.setattr(router, "_LINGER_S", 0.2)

    async def talk(port: int, received: list[bytes]) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(post(f"Content-Length: {64 << 20}", body=b"x" * (64 << 20)))
        with contextlib.suppress(ConnectionError):  # it is reset, or answered and closed; else this hangs
            await writer.drain()
            assert b"200 OK" not in await reader.read()

    routed(talk, reads=False)


def test_a_client_that_reads_slowly_gets_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router, "_LINGER_S", 0.05)
    body = bytes(range(256)) * 16384

    async def talk(port: int, received: list[bytes]) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1)
        writer.write(post("Content-Length: 5", "Connection: close"))
        found = bytearray()
        while piece := await reader.read(1 << 18):
            found += piece
            await asyncio.sleep(0.02)
        assert bytes(found).partition(b"\r\n\r\n")[2] == body
        writer.close()

    routed(talk, b"HTTP/1.1 200 OK\r\n\r\n" + body, closes=True)
