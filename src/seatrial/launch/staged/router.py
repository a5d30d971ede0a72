"""A least-loaded reverse proxy in front of several copies of a server.

- One file, standard library only, Python 3.8 or newer: it is copied into the job directory and run there by whatever
  Python the node or the container has (`python3 router.py --host H --port P --backends URL,URL`).
- A request goes to the backend with the fewest requests under way. One that refuses the connection is left for another,
  once; nothing is sent twice. What cannot be delivered is a 502 that says why; an answer that breaks off is broken off
  for the client, too, never completed.
- Bodies pass through piece by piece, in both directions, and are neither held nor logged. A client that leaves takes its
  request to the backend with it.
- `/health` is 200 only when every backend answers; `/router/status` counts. It ends with 0 when it is told to (SIGTERM).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

_PIECE = 64 * 1024
_CONNECT_S = 10.0
_HEALTH_S = 5.0
_IDLE_S = 75.0
"""A connection without a request is closed after this time."""
_HOP_BY_HOP = {b"connection", b"keep-alive", b"proxy-connection", b"te", b"upgrade", b"expect"}


class Refused(Exception):
    """No connection, or none in time: nothing was sent."""


class BadRequest(Exception):
    """What the client sent is not HTTP."""


class Broken(Exception):
    """A body ended before its end."""


class Backend:
    """One server and what is under way there."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname or parts.path.strip("/"):
            raise ValueError(f"{url!r}: a backend is http://HOST:PORT")
        self.url = url.rstrip("/")
        self.host, self.port = parts.hostname, parts.port or 80
        self.active = self.total = self.refused = self.broken = 0

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A fresh connection."""
        try:
            return await asyncio.wait_for(asyncio.open_connection(self.host, self.port, limit=_PIECE), _CONNECT_S)
        except (OSError, asyncio.TimeoutError) as error:  # noqa: UP041 - two classes before Python 3.11
            raise Refused(f"{self.url}: {str(error) or f'no connection within {_CONNECT_S:g} s'}") from error

    async def healthy(self, path: str) -> bool:
        """Whether it answers 200 at `path`, or accepts a connection when there is no path."""
        try:
            reader, writer = await self.connect()
        except Refused:
            return False
        try:
            if not path:
                return True
            writer.write(b"GET %s HTTP/1.1\r\nHost: %s\r\nConnection: close\r\n\r\n" % (path.encode(), self.host.encode()))
            line = await asyncio.wait_for(reader.readline(), _HEALTH_S)
            return line.split()[1:2] == [b"200"]
        except (OSError, ValueError, asyncio.TimeoutError):  # noqa: UP041
            return False
        finally:
            writer.close()


class Head:
    """The first line and the headers of a message."""

    def __init__(self, first: bytes, headers: list[tuple[bytes, bytes]]) -> None:
        self.first, self.headers = first, headers

    def value(self, name: bytes) -> bytes:
        """A header's value in lower case, empty when absent; several are joined."""
        return b",".join(value for key, value in self.headers if key.lower() == name).strip().lower()

    def framing(self, until_end: bool) -> Framing:
        """How long the body is; `until_end` when a body without length lasts until the connection ends."""
        length, encoding = self.value(b"content-length"), self.value(b"transfer-encoding")
        if encoding and (length or not encoding.endswith(b"chunked")):
            raise BadRequest("a body with an unclear length")
        if length and not length.isdigit():
            raise BadRequest("Content-Length is no number")
        if encoding:
            return Framing(chunked=True)
        return Framing(length=int(length)) if length else Framing(length=None if until_end else 0)

    @property
    def status(self) -> bytes:
        """The status code of an answer."""
        return b"".join(self.first.split(b" ")[1:2])

    def encoded(self, *more: bytes) -> bytes:
        """As it is sent on: what concerns one connection only is left out, `more` is added."""
        kept = [key + b": " + value for key, value in self.headers if key.lower() not in _HOP_BY_HOP]
        return b"\r\n".join((self.first, *kept, *more)) + b"\r\n\r\n"


class Framing:
    """Where a body ends: `chunked`, after `length` bytes, or (None) with the connection."""

    def __init__(self, chunked: bool = False, length: int | None = None) -> None:
        self.chunked, self.length = chunked, length

    async def relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass the body on as it comes. Raises Broken when it ends too early."""
        if not self.chunked:
            await _copy(reader, writer, self.length)
            return
        while True:
            line = await _line(reader)
            try:
                size = int(line.split(b";")[0], 16)
            except ValueError:
                raise Broken("a chunk without a size") from None
            writer.write(line)
            if size == 0:
                break
            await _copy(reader, writer, size + 2)
        while line.strip():
            line = await _line(reader)
            writer.write(line)
        await writer.drain()


async def _line(reader: asyncio.StreamReader) -> bytes:
    try:
        line = await reader.readline()
    except ValueError as error:
        raise Broken("a line is too long") from error
    if not line.endswith(b"\n"):
        raise Broken("the connection ended within a body")
    return line


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, left: int | None) -> None:
    while left is None or left > 0:
        piece = await reader.read(_PIECE if left is None else min(left, _PIECE))
        if not piece:
            if left is None:
                return
            raise Broken(f"the connection ended {left} bytes before the end of a body")
        writer.write(piece)
        await writer.drain()
        left = None if left is None else left - len(piece)


async def _send(framing: Framing, client: asyncio.StreamReader, to_backend: asyncio.StreamWriter) -> None:
    """Pass the body of a request on; the backend is not left waiting for the rest of a broken one."""
    try:
        await framing.relay(client, to_backend)
    except Broken:
        to_backend.transport.abort()
        raise


async def read_head(reader: asyncio.StreamReader) -> Head | None:
    """The next head, or None when the connection ended in between. Raises BadRequest."""
    try:
        text = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError as error:
        if error.partial.strip():
            raise BadRequest("the connection ended within a head") from error
        return None
    except asyncio.LimitOverrunError as error:
        raise BadRequest(f"a head is longer than {_PIECE} bytes") from error
    first, *lines = text[:-4].lstrip(b"\r\n").split(b"\r\n")
    headers = []
    for line in lines:
        key, colon, value = line.partition(b":")
        if not colon or not key or key != key.strip():
            raise BadRequest("a header without a name")
        headers.append((key, value.strip()))
    return Head(first, headers)


class Client(asyncio.StreamReader):
    """What a client sends; `gone` is set when it closes the connection, even while nobody reads."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(limit=_PIECE, loop=loop)
        self.gone = asyncio.Event()

    def feed_eof(self) -> None:
        super().feed_eof()
        self.gone.set()

    def set_exception(self, exc: Exception) -> None:
        super().set_exception(exc)
        self.gone.set()


class Router:
    """The proxy."""

    def __init__(self, backends: list[Backend], health_path: str) -> None:
        self.backends, self.health_path = backends, health_path
        self.tasks: set[asyncio.Task[Any]] = set()

    async def serve(self, client: Client, writer: asyncio.StreamWriter) -> None:
        """One connection of a client: request after request, until one side has enough."""
        task = asyncio.current_task()
        assert task is not None
        self.tasks.add(task)
        try:
            while await self._one(client, writer):
                pass
        except BadRequest as error:
            _answer(writer, HTTPStatus.BAD_REQUEST, {"error": {"message": f"router: {error}", "type": "bad_request"}})
        except (OSError, asyncio.TimeoutError):  # noqa: UP041 - the client has left, or says nothing
            pass
        except asyncio.CancelledError:
            writer.transport.abort()  # the router ends; what was sent so far must not look whole
        finally:
            self.tasks.discard(task)
            writer.close()

    async def _one(self, client: Client, writer: asyncio.StreamWriter) -> bool:
        """One request; whether the connection can take another."""
        head = await asyncio.wait_for(read_head(client), _IDLE_S)
        if head is None:
            return False
        parts = head.first.split(b" ")
        if len(parts) != 3 or not parts[2].startswith(b"HTTP/1."):
            raise BadRequest("the first line is no HTTP/1 request")
        stays = parts[2] != b"HTTP/1.0" and head.value(b"connection") != b"close"
        path = parts[1].split(b"?")[0]
        if path in (b"/health", b"/router/status"):
            stays = stays and head.framing(until_end=False).length == 0
            _answer(writer, *(await self._health() if path == b"/health" else self._status()), close=not stays)
            await writer.drain()
            return stays
        request = asyncio.ensure_future(self._forward(head, parts[0] == b"HEAD", client, writer))
        left = asyncio.ensure_future(client.gone.wait())
        try:
            await asyncio.wait({request, left}, return_when=asyncio.FIRST_COMPLETED)
            return await request and stays if request.done() else False
        finally:
            request.cancel()
            left.cancel()
            await asyncio.gather(request, left, return_exceptions=True)

    async def _forward(self, head: Head, bodiless: bool, client: Client, writer: asyncio.StreamWriter) -> bool:
        """Pass one request on; whether the client's connection is still usable."""
        framing = head.framing(until_end=False)
        try:
            backend, streams = await self._connect()
        except Refused as error:
            _answer(writer, HTTPStatus.BAD_GATEWAY, {"error": {"message": f"router: {error}", "type": "backend_unreachable"}})
            return False
        began: list[bool] = []
        try:
            return await self._exchange(head, framing, bodiless, client, writer, streams, began)
        except (Broken, BadRequest, OSError) as error:
            backend.broken += 1
            if began:
                writer.transport.abort()  # the client must not take what it has for the whole
            else:
                message = f"router: {backend.url} broke off before it answered: {error}"
                _answer(writer, HTTPStatus.BAD_GATEWAY, {"error": {"message": message, "type": "backend_broken"}})
            return False
        finally:
            backend.active -= 1
            streams[1].close()

    async def _connect(self) -> tuple[Backend, tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """The least loaded backend that accepts, counted as active; at most two are asked."""
        refused: list[str] = []
        left = list(self.backends)
        while left and len(refused) < 2:
            backend = min(left, key=lambda item: (item.active, item.total))
            left.remove(backend)
            backend.active += 1
            backend.total += 1
            try:
                return backend, await backend.connect()
            except Refused as error:
                backend.active -= 1
                backend.refused += 1
                refused.append(str(error))
            except BaseException:
                backend.active -= 1
                raise
        raise Refused("; ".join(refused))

    async def _exchange(
        self,
        head: Head,
        framing: Framing,
        bodiless: bool,
        client: Client,
        writer: asyncio.StreamWriter,
        streams: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        began: list[bool],
    ) -> bool:
        reader, to_backend = streams
        to_backend.write(head.encoded(b"Connection: close"))
        if head.value(b"expect"):
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        sending = asyncio.ensure_future(_send(framing, client, to_backend))
        try:
            answer = await read_head(reader)
            while answer is not None and answer.status.startswith(b"1"):
                answer = await read_head(reader)
            if answer is None:
                raise Broken("the connection ended")
            began.append(True)
            empty = bodiless or answer.status in (b"204", b"304")
            body = Framing(length=0) if empty else answer.framing(until_end=True)
            stays = sending.done() and (body.chunked or body.length is not None)
            writer.write(answer.encoded() if stays else answer.encoded(b"Connection: close"))
            await body.relay(reader, writer)
            await writer.drain()
            return stays
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)

    async def _health(self) -> tuple[HTTPStatus, dict[str, Any]]:
        answers = await asyncio.gather(*(backend.healthy(self.health_path) for backend in self.backends))
        waiting = [backend.url for backend, well in zip(self.backends, answers) if not well]  # noqa: B905 - Python 3.10
        return (HTTPStatus.SERVICE_UNAVAILABLE if waiting else HTTPStatus.OK), {"backends": len(answers), "not_healthy": waiting}

    def _status(self) -> tuple[HTTPStatus, dict[str, Any]]:
        keys = ("url", "active", "total", "refused", "broken")
        return HTTPStatus.OK, {"backends": [{key: getattr(backend, key) for key in keys} for backend in self.backends]}


def _answer(writer: asyncio.StreamWriter, status: HTTPStatus, body: dict[str, Any], close: bool = True) -> None:
    data = json.dumps(body).encode()
    head = f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n"
    writer.write(head.encode() + (b"Connection: close\r\n\r\n" if close else b"\r\n") + data)


def _say(text: str) -> None:
    sys.stderr.write(f"router: {text}\n")
    sys.stderr.flush()


async def run(host: str, port: int, backends: list[Backend], health_path: str) -> None:
    """Serve until SIGTERM or SIGINT."""
    loop = asyncio.get_running_loop()
    router, told = Router(backends, health_path), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, told.set)

    def protocol() -> asyncio.StreamReaderProtocol:
        return asyncio.StreamReaderProtocol(Client(loop), router.serve, loop=loop)  # type: ignore[arg-type]

    server = await loop.create_server(protocol, host, port, backlog=1024)
    _say(f"listening on {host}:{port}, in front of {', '.join(item.url for item in backends)}")
    await told.wait()
    server.close()
    for task in tuple(router.tasks):
        task.cancel()
    await asyncio.gather(*router.tasks, return_exceptions=True)
    _say(f"told to stop, after {sum(item.total for item in backends)} requests")


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description="Pass requests on to the least loaded of several servers.")
    parser.add_argument("--host", required=True, help="address to listen on")
    parser.add_argument("--port", required=True, type=int)
    parser.add_argument("--backends", required=True, help="http://HOST:PORT of each server, comma separated")
    parser.add_argument("--health-path", default="/health", help="where a backend answers 200 when it is ready; empty: its port answers")
    words = parser.parse_args()
    try:
        backends = [Backend(url) for url in words.backends.split(",")]
    except ValueError as error:
        parser.error(str(error))
    asyncio.run(run(words.host, words.port, backends, words.health_path))
    return 0


if __name__ == "__main__":
    sys.exit(main())
