"""Who may ask the sandbox service, and for how long. Raw requests; no program runs, so no sandbox is needed."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
from collections.abc import Awaitable, Callable

import pytest
from aiohttp import web

from seatrial.rollouts.sandbox import sandbox_service as module
from seatrial.rollouts.sandbox.sandbox_service import Service, host_name, is_loopback
from tests.rollouts.sandboxes import LIMITS

BODY = json.dumps({"generated_code": "theorem", "language": "lean4", "timeout": 1}).encode()
"""A language that there is not: answered without a sandbox."""
Talk = Callable[[int, web.AppRunner, Service], Awaitable[None]]


def served(talk: Talk, host: str = "127.0.0.1") -> None:
    async def both() -> None:
        service = Service(LIMITS, host)
        runner = service.runner()
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            await talk(runner.addresses[0][1], runner, service)
        finally:
            await runner.cleanup()

    asyncio.run(asyncio.wait_for(both(), 20))


def request(*headers: str, body: bytes = BODY, first: str = "POST /execute HTTP/1.1", host: str = "127.0.0.1:1") -> bytes:
    lines = [first, *([f"Host: {host}"] if host else []), f"Content-Length: {len(body)}", "Connection: close", *headers]
    return "".join(f"{line}\r\n" for line in lines).encode("latin-1") + b"\r\n" + body


async def exchange(port: int, data: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data)
        return await reader.read()
    finally:
        writer.close()


def raw(rest: bytes) -> bytes:
    return b"POST /execute HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n" + rest


def chunks(body: bytes) -> bytes:
    return raw(b"Transfer-Encoding: chunked\r\n\r\n" + body)


JSON = "Content-Type: application/json"
CASES: dict[str, tuple[bytes, int]] = {
    "a client": (request(JSON), 200),
    "a charset": (request(JSON + "; charset=utf-8"), 200),
    "localhost": (request(JSON, host="localhost:6000"), 200),
    "the other loopback": (request(JSON, host="[::1]:6000"), 200),
    "health": (request(body=b"", first="GET /health HTTP/1.1"), 200),
    "a page": (request(JSON, "Origin: https://evil.example"), 403),
    "a page without an origin": (request(JSON, "Origin: null"), 403),
    "a page of the same address": (request(JSON, "Origin: http://127.0.0.1:6000"), 403),
    "a browser's cross-site request": (request(JSON, "Sec-Fetch-Site: cross-site"), 403),
    "health for a page": (request("Origin: https://evil.example", body=b"", first="GET /health HTTP/1.1"), 403),
    "a page that deletes": (request("Origin: https://evil.example", body=b"", first="DELETE /sessions/s HTTP/1.1"), 403),
    "rebinding": (request(JSON, host="evil.example:6000"), 403),
    "rebinding with a suffix": (request(JSON, host="127.0.0.1.evil.example"), 403),
    "rebinding of a list of sessions": (request(body=b"", first="GET /sessions HTTP/1.1", host="evil.example"), 403),
    "rebinding behind brackets": (request(JSON, host="[::1].evil.example"), 403),
    "rebinding behind an address": (request(JSON, host="[::1]evil.example:6000"), 403),
    "half an address": (request(JSON, host="[::1"), 403),
    "an address with a scope": (request(JSON, host="[::1%evil.example]:6000"), 403),
    "an address without brackets": (request(JSON, host="::1"), 403),
    "another address behind brackets": (request(JSON, host="[::ffff:10.0.0.1]:6000"), 403),
    "a user in the host": (request(JSON, host="localhost:80@evil.example"), 403),
    "a port that is none": (request(JSON, host="127.0.0.1:evil.example"), 403),
    "two ports": (request(JSON, host="localhost:1:evil.example"), 403),
    "a list of hosts": (request(JSON, host="127.0.0.1, evil.example"), 403),
    "two hosts": (request(JSON, "Host: evil.example"), 400),
    "no host in HTTP/1.1": (request(JSON, host=""), 400),
    "a target of another host": (request(JSON, first="POST http://evil.example/execute HTTP/1.1"), 400),
    "a target with a user": (request(JSON, first="POST http://127.0.0.1:1@evil.example/execute HTTP/1.1"), 400),
    "a target of this host": (request(JSON, first="POST http://127.0.0.1:1/execute HTTP/1.1"), 200),
    "a target that is no path": (request(body=b"", first="OPTIONS * HTTP/1.1"), 400),
    "a tunnel": (request(body=b"", first="CONNECT evil.example:80 HTTP/1.1"), 400),
    "HTTP/0.9": (b"GET /health\r\n\r\n", 400),
    "an empty host": (request(JSON, "Host: ", host=""), 403),
    "no host": (request(JSON, first="POST /execute HTTP/1.0", host=""), 400),
    "a form": (request("Content-Type: application/x-www-form-urlencoded"), 415),
    "plain text": (request("Content-Type: text/plain"), 415),
    "no type": (request(), 415),
    "a type in another case": (request('content-type: Application/JSON ; Charset="UTF-8"'), 200),
    "two types": (request(JSON, "Content-Type: text/plain"), 400),
    "a list of types": (request("Content-Type: text/plain, application/json"), 415),
    "a type as a parameter": (request("Content-Type: text/plain; application/json"), 415),
    "a type that begins like it": (request("Content-Type: application/jsonp"), 415),
    "a compressed body": (request(JSON, "Content-Encoding: gzip", body=gzip.compress(BODY)), 415),
    "a body that says it is compressed": (request(JSON, "Content-Encoding: br"), 415),
    "another charset": (request(JSON + "; charset=nonsense"), 400),
    "a charset that takes for ever": (request(JSON + "; charset=punycode", body=b"a" * 1_000_000 + b"-" + b"a" * 1_000_000), 400),
    "not JSON": (request(JSON, body=b"{"), 400),
    "not UTF-8": (request(JSON, body=b"\xff"), 400),
    "deep JSON": (request(JSON, body=b"[" * 100_000), 400),
    "a huge number": (request(JSON, body=b'{"generated_code": "", "language": "python", "timeout": ' + b"9" * 400 + b"}"), 400),
    "a long session": (request(JSON, "X-Session-ID: " + "s" * 1000), 400),
    "a long header": (request(JSON, "X: " + "y" * 20_000), 400),
    "a long path": (request(JSON, first=f"POST /{'x' * 20_000} HTTP/1.1"), 400),
    "two lengths": (request(JSON, "Content-Length: 3"), 400),
    "length and chunks": (request(JSON, "Transfer-Encoding: chunked"), 400),
    "a signed length": (raw(b"Content-Length: +5\r\n\r\nhello"), 400),
    "other digits": (raw("Content-Length: \u0665\r\n\r\nhello".encode()), 400),
    "a folded header": (raw(b"X: a\r\n Content-Length: 5\r\n\r\nhello"), 400),
    "a bare carriage return": (raw(b"X: a\rContent-Length: 5\r\n\r\nhello"), 400),
    "a space before the colon": (raw(b"Content-Length : 5\r\n\r\nhello"), 400),
    "chunks": (chunks(b"%x;a=b\r\n" % len(BODY) + BODY + b"\r\n0\r\nHost: evil.example\r\n\r\n"), 200),
    "a chunk of hex": (chunks(b"0x%x\r\n" % len(BODY) + BODY + b"\r\n0\r\n\r\n"), 400),
    "a signed chunk": (chunks(b"+%x\r\n" % len(BODY) + BODY + b"\r\n0\r\n\r\n"), 400),
    "a huge chunk": (chunks(b"f" * 17 + b"\r\n" + BODY), 400),
    "a chunk longer than its size": (chunks(b"5\r\n" + BODY + b"\r\n0\r\n\r\n"), 400),
}


@pytest.mark.parametrize("name", CASES)
def test_who_is_answered(name: str) -> None:
    data, status = CASES[name]

    async def talk(port: int, runner: web.AppRunner, service: Service) -> None:
        answer = await exchange(port, data)
        assert answer.split(b" ", 2)[1] == str(status).encode(), answer[:300]

    served(talk)


@pytest.mark.parametrize("late", [b"zz\r\n", b"-1\r\n", b"5\r\nhello world"])
def test_a_body_that_turns_out_malformed(late: bytes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(module, "_BODY_S", 0.5)

    async def talk(port: int, runner: web.AppRunner, service: Service) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(chunks(b"1\r\n{\r\n"))
        while not service._active:
            await asyncio.sleep(0)
        writer.write(late)
        assert (await reader.read()).split(b" ", 2)[1] in (b"400", b"408")
        writer.close()

    served(talk)
    assert caplog.records == []


def test_what_is_malformed_fills_no_log(caplog: pytest.LogCaptureFixture) -> None:
    async def talk(port: int, runner: web.AppRunner, service: Service) -> None:
        for name in ("two hosts", "two types", "a signed length", "a chunk of hex", "HTTP/0.9"):
            await exchange(port, CASES[name][0])

    served(talk)
    assert caplog.records == []


def test_each_request_of_a_connection_is_looked_at() -> None:
    async def talk(port: int, runner: web.AppRunner, service: Service) -> None:
        first = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
        answer = await exchange(port, first + request(body=b"", first="GET /sessions HTTP/1.1", host="evil.example"))
        assert (answer.count(b"HTTP/1.1 200 "), answer.count(b"HTTP/1.1 403 "), b"sessions" in answer) == (1, 1, False)

    served(talk)


def test_a_node_of_a_cluster_may_have_any_name() -> None:
    async def talk(port: int, runner: web.AppRunner, service: Service) -> None:
        assert (await exchange(port, request(JSON, host="node3.cluster:6000"))).startswith(b"HTTP/1.1 200 ")
        assert (await exchange(port, request(JSON, "Origin: http://node3.cluster", host="node3.cluster"))).startswith(b"HTTP/1.1 403 ")

    served(talk, host="0.0.0.0")


def test_a_large_body(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BODY", 1000)

    async def talk(port: int, runner: web.AppRunner, service: Service) -> None:
        assert (await exchange(port, request(JSON, body=b" " * 2000 + BODY))).startswith(b"HTTP/1.1 413 ")

    served(talk)


def test_a_body_that_does_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BODY_S", 0.05)

    async def talk(port: int, runner: web.AppRunner, service: Service) -> None:
        assert (await exchange(port, request(JSON)[:-5])).startswith(b"HTTP/1.1 408 ")

    served(talk)


def test_too_many_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_REQUESTS", 0)

    async def talk(port: int, runner: web.AppRunner, service: Service) -> None:
        assert (await exchange(port, request(JSON))).startswith(b"HTTP/1.1 503 ")

    served(talk)


@pytest.mark.parametrize("said", [b"", b"POST /execute HTTP/1.1\r\nHost: "])
def test_a_quiet_connection_is_closed(monkeypatch: pytest.MonkeyPatch, said: bytes) -> None:
    async def talk(port: int, runner: web.AppRunner, service: Service) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(said)
        while runner.server is None or not runner.server.connections:
            await asyncio.sleep(0)
        service.end_quiet(runner)
        assert not reader.at_eof()
        monkeypatch.setattr(module, "_QUIET_S", 0.0)
        service.end_quiet(runner)
        with contextlib.suppress(ConnectionError):  # a reset is an end, too
            assert await reader.read() == b""
        writer.close()

    served(talk)


def test_the_quietest_connections_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CONNECTIONS", 2)

    async def talk(port: int, runner: web.AppRunner, service: Service) -> None:
        held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(5)]
        while runner.server is None or len(runner.server.connections) < 5:
            await asyncio.sleep(0)
        service.end_quiet(runner)
        while len(runner.server.connections) > 2:
            await asyncio.sleep(0)
        for _, writer in held:
            writer.close()

    served(talk)


def test_names_of_this_machine_for_itself() -> None:
    assert [host_name(host) for host in ("a:1", "[::1]:2", "127.0.0.1", "")] == ["a", "::1", "127.0.0.1", ""]
    assert all(map(is_loopback, ("localhost", "127.0.0.1", "127.8.8.8", "::1")))
    assert not any(map(is_loopback, ("0.0.0.0", "10.0.0.1", "localhost.evil.example", "", "node3")))
