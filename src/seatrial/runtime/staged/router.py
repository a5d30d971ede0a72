"""A least-loaded reverse proxy in front of several copies of a server.

- One file, standard library only, Python 3.8 or newer: it is copied into the job directory and run there by whatever
  Python the node or the container has (`python3 router.py --host H --port P --backends URL,URL`).
- A request goes to the backend with the fewest requests under way. One that refuses the connection is left for another,
  once; nothing is sent twice. What cannot be delivered is a 502 that says why; an answer that breaks off is broken off
  for the client, too, never completed.
- Bodies pass through piece by piece, in both directions, and are neither held nor logged. A client that leaves takes its
  request to the backend with it.
- A request whose end two readers could see at different places is refused: several lengths, a length beside chunks, sizes that are
  not plain numbers, bare line feeds. Chunks are sent on in one spelling, without extensions and trailers.
- A client may be neither silent nor slow for ever: there is a time for a head, for each piece of a body, and for reading an answer,
  and a body has a least pace. Connections are limited by the files that the process may open; more get a 503.
- The last answer of a connection arrives also where the request's body was not read: what still comes is thrown away for a while.
- `/health` is 200 only when every backend answers; `/router/status` counts. It ends with 0 when it is told to (SIGTERM).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import resource
import select
import signal
import sys
import time
from collections.abc import Awaitable
from http import HTTPStatus
from typing import Any, TypeVar
from urllib.parse import urlsplit

_PIECE = 64 * 1024
_CONNECT_S = 10.0
_HEALTH_S = 5.0
_IDLE_S = 75.0
"""A connection without a request is closed after this time."""
_BODY_IDLE_S = 30.0
"""The next piece of a request's body must come within this time."""
_PACE_AFTER_S = 60.0
_PACE = 1024
"""Bytes per second that a request's body must have made on average, once it has taken `_PACE_AFTER_S`."""
_UNREAD_S = 300.0
"""Who takes nothing of a body for so long is left: a client of an answer, a server of a request."""
_LOOK_S = 5.0
"""How often a client is looked for that left while its data was not read."""
_LINGER_S = 5.0
"""What a client still sends behind the last answer is read for so long: a connection that is closed with unread data is reset."""
_INTERIM = 100
"""Most answers before the answer (100 Continue, 103 Early Hints)."""
_OPEN_FILES = 65536
_HEADERS = 200
_CHUNK_LINE = 1024
"""Most headers of a message, and most bytes of a line between chunks."""
_HOP_BY_HOP = {b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"upgrade", b"expect"}
_TOKEN = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_REQUEST = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+) ([\x21-\x7e\x80-\xff]+) (HTTP/1\.[01])")
_ANSWER = re.compile(rb"HTTP/1\.[01] [1-5][0-9]{2}(?: [\t\x20-\x7e\x80-\xff]*)?")
_VALUE = re.compile(rb"[\t\x20-\x7e\x80-\xff]*")
_LENGTH = re.compile(rb"[0-9]{1,18}")
_SIZE = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;[\t\x20-\x7e\x80-\xff]*)?\r\n")


_T = TypeVar("_T")


class Refused(Exception):
    """No connection, or none in time: nothing was sent."""


class BadRequest(Exception):
    """What the client sent is not HTTP."""


class Broken(Exception):
    """A body ended before its end."""


class BadBody(Broken):
    """The body of a request is malformed, or came too slowly."""

    def __init__(self, message: str, status: HTTPStatus = HTTPStatus.BAD_REQUEST) -> None:
        super().__init__(message)
        self.status = status


async def _within(seconds: float, work: Awaitable[_T]) -> _T:
    """What comes of it, or TimeoutError. Before Python 3.12 asyncio.wait_for loses a cancellation that comes as the work ends."""
    task = asyncio.ensure_future(work)
    try:
        if not (await asyncio.wait({task}, timeout=seconds))[0]:
            raise asyncio.TimeoutError  # noqa: UP041 - before Python 3.11 it is another class
        return task.result()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


class Pace:
    """Watches over the body of a request."""

    def __init__(self) -> None:
        self.began, self.bytes = time.monotonic(), 0

    async def next(self, piece: Awaitable[bytes]) -> bytes:
        """The piece, if it comes in time."""
        try:
            found = await _within(_BODY_IDLE_S, piece)
        except asyncio.TimeoutError:  # noqa: UP041
            raise BadBody(f"nothing of the body came within {_BODY_IDLE_S:g} s", HTTPStatus.REQUEST_TIMEOUT) from None
        self.bytes += len(found)
        taken = time.monotonic() - self.began
        if taken > _PACE_AFTER_S and self.bytes < taken * _PACE:
            raise BadBody(f"the body came at less than {_PACE} bytes per second", HTTPStatus.REQUEST_TIMEOUT)
        return found


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
            return await _within(_CONNECT_S, asyncio.open_connection(self.host, self.port, limit=_PIECE))
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
            line = await _within(_HEALTH_S, reader.readline())
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
        """How long the body is; `until_end` (an answer) when a body without length lasts until the connection ends."""
        lengths = [value for key, value in self.headers if key.lower() == b"content-length"]
        encodings = [value.lower() for key, value in self.headers if key.lower() == b"transfer-encoding"]
        if len(lengths) + len(encodings) > 1:
            raise BadRequest("a body with an unclear length")
        if lengths and not _LENGTH.fullmatch(lengths[0]):
            raise BadRequest("Content-Length is no number")
        if encodings and (encodings != [b"chunked"] or self.version == b"HTTP/1.0"):
            raise BadRequest("a body with an unclear length: Transfer-Encoding is not `chunked`")
        if encodings:
            return Framing(chunked=True)
        return Framing(length=int(lengths[0])) if lengths else Framing(length=None if until_end else 0)

    @property
    def version(self) -> bytes:
        """The version of HTTP: an answer begins with it, a request ends with it."""
        return self.first[:8] if self.first.startswith(b"HTTP/1.") else self.first[-8:]

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

    async def relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, pace: Pace | None = None) -> None:
        """Pass the body on as it comes. Raises Broken when it ends too early, or is malformed. With a `pace` it is a request's."""
        if not self.chunked:
            await _copy(reader, writer, self.length, pace)
            return
        while True:
            size = await _chunk_size(reader, pace)
            if size == 0:
                break
            writer.write(b"%x\r\n" % size)
            await _copy(reader, writer, size, pace)
            if await _line(reader, pace) != b"\r\n":
                raise BadBody("a chunk is longer than its size says")
            writer.write(b"\r\n")
        for _ in range(_HEADERS):
            if await _line(reader, pace) == b"\r\n":
                break
        else:
            raise BadBody("too many lines behind the last chunk")
        writer.write(b"0\r\n\r\n")
        await _drain(writer, pace)


async def _chunk_size(reader: asyncio.StreamReader, pace: Pace | None) -> int:
    found = _SIZE.fullmatch(await _line(reader, pace))
    if found is None:
        raise BadBody("a chunk without a proper size")
    return int(found[1], 16)


async def _line(reader: asyncio.StreamReader, pace: Pace | None) -> bytes:
    try:
        line = await (reader.readline() if pace is None else pace.next(reader.readline()))
    except ValueError as error:
        raise BadBody("a line is too long") from error
    if not line.endswith(b"\n"):
        raise Broken("the connection ended within a body")
    if len(line) > _CHUNK_LINE or not line.endswith(b"\r\n"):
        raise BadBody("a line between chunks is too long, or does not end properly")
    return line


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, left: int | None, pace: Pace | None) -> None:
    while left is None or left > 0:
        reading = reader.read(_PIECE if left is None else min(left, _PIECE))
        piece = await (reading if pace is None else pace.next(reading))
        if not piece:
            if left is None:
                return
            raise Broken(f"the connection ended {left} bytes before the end of a body")
        writer.write(piece)
        await _drain(writer, pace)
        left = None if left is None else left - len(piece)


async def _drained(writer: asyncio.StreamWriter) -> None:
    if writer.transport.get_write_buffer_size():
        await _within(_UNREAD_S, writer.drain())
    else:
        await writer.drain()


async def _drain(writer: asyncio.StreamWriter, pace: Pace | None) -> None:
    """Wait until what was written is under way, but not for ever."""
    try:
        await _drained(writer)
    except asyncio.TimeoutError:  # noqa: UP041
        raise Broken(f"the {'client' if pace is None else 'server'} read nothing for {_UNREAD_S:g} s") from None


async def _send(framing: Framing, client: asyncio.StreamReader, to_backend: asyncio.StreamWriter) -> None:
    try:
        await framing.relay(client, to_backend, Pace())
    except Broken:
        to_backend.transport.abort()
        raise


async def _read_answer(reader: asyncio.StreamReader) -> Head:
    """The head of the backend's answer, behind those that only say that it goes on."""
    for _ in range(_INTERIM):
        answer = await read_head(reader)
        if answer is None:
            raise Broken("the connection ended")
        if not _ANSWER.fullmatch(answer.first):
            raise Broken("the answer is not HTTP/1")
        if not answer.status.startswith(b"1"):
            return answer
    raise Broken("it goes on and on without an answer")


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
    if len(lines) > _HEADERS:
        raise BadRequest(f"more than {_HEADERS} headers")
    headers = []
    for line in lines:
        key, colon, value = line.partition(b":")
        if not colon or not _TOKEN.fullmatch(key):
            raise BadRequest("a header without a proper name")
        if not _VALUE.fullmatch(value):
            raise BadRequest("a header with control characters")
        headers.append((key, value.strip(b" \t")))
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

    async def left(self, writer: asyncio.StreamWriter) -> None:
        """Until it has left. Where nobody reads what it sent, its end is not seen here, so the connection is looked at, too."""
        while True:
            try:
                await _within(_LOOK_S, self.gone.wait())
                return
            except asyncio.TimeoutError:  # noqa: UP041
                if writer.transport.is_closing() or _hung_up(writer.get_extra_info("socket").fileno()):
                    return


def _hung_up(handle: int) -> bool:
    poll = select.poll()
    poll.register(handle, getattr(select, "POLLRDHUP", select.POLLHUP))
    return bool(poll.poll(0))


class Router:
    """The proxy."""

    def __init__(self, backends: list[Backend], health_path: str, most: int = _OPEN_FILES) -> None:
        self.backends, self.health_path, self.most = backends, health_path, most
        self.tasks: set[asyncio.Task[Any]] = set()

    async def serve(self, client: Client, writer: asyncio.StreamWriter) -> None:
        """One connection of a client: request after request, until one side has enough."""
        task = asyncio.current_task()
        assert task is not None
        self.tasks.add(task)
        try:
            await self._requests(client, writer)
            await _part(client, writer)
        except (OSError, asyncio.TimeoutError, asyncio.CancelledError):  # noqa: UP041
            pass  # the client has left, or reads nothing; or the router ends, and what was sent so far must not look whole
        finally:
            self.tasks.discard(task)
            writer.transport.abort()

    async def _requests(self, client: Client, writer: asyncio.StreamWriter) -> None:
        if len(self.tasks) > self.most:
            message = f"router: {self.most} connections are open already"
            _answer(writer, HTTPStatus.SERVICE_UNAVAILABLE, {"error": {"message": message, "type": "too_many_connections"}})
            return
        try:
            while await self._one(client, writer):
                pass
        except BadRequest as error:
            _answer(writer, HTTPStatus.BAD_REQUEST, {"error": {"message": f"router: {error}", "type": "bad_request"}})
        except asyncio.TimeoutError:  # noqa: UP041 - it says nothing
            pass

    async def _one(self, client: Client, writer: asyncio.StreamWriter) -> bool:
        """One request; whether the connection can take another."""
        head = await _within(_IDLE_S, read_head(client))
        if head is None:
            return False
        parts = _REQUEST.fullmatch(head.first)
        if parts is None:
            raise BadRequest("the first line is no HTTP/1 request")
        if parts[1] == b"CONNECT" or sum(key.lower() == b"host" for key, _ in head.headers) > 1:
            raise BadRequest("this is no proxy for CONNECT" if parts[1] == b"CONNECT" else "two Host headers")
        stays = parts[3] != b"HTTP/1.0" and b"close" not in [word.strip() for word in head.value(b"connection").split(b",")]
        path = parts[2].split(b"?")[0]
        if path in (b"/health", b"/router/status"):
            stays = stays and head.framing(until_end=False).length == 0
            status, body = await self._health() if path == b"/health" else self._status()
            _answer(writer, status, body, close=not stays, bodiless=parts[1] == b"HEAD")
            await writer.drain()
            return stays
        request = asyncio.ensure_future(self._forward(head, parts[1] == b"HEAD", client, writer))
        left = asyncio.ensure_future(client.left(writer))
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
        except BadBody as error:
            if began:  # it was the answer's
                backend.broken += 1
                writer.transport.abort()
            else:
                _answer(writer, error.status, {"error": {"message": f"router: {error}", "type": "bad_request"}})
            return False
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
            streams[1].transport.abort()  # what was not sent or read by now is of no use

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
        if head.value(b"expect") == b"100-continue" and head.version == b"HTTP/1.1" and framing.length != 0:
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        sending = asyncio.ensure_future(_send(framing, client, to_backend))
        answering = asyncio.ensure_future(_read_answer(reader))
        try:
            await asyncio.wait({sending, answering}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done() and isinstance(sending.exception(), BadBody):
                await sending  # the client's fault, not the backend's
            answer = await answering
            body = answer.framing(until_end=True)
            if bodiless or answer.status in (b"204", b"304"):
                body = Framing(length=0)
            began.append(True)
            stays = sending.done() and (body.chunked or body.length is not None)
            writer.write(answer.encoded() if stays else answer.encoded(b"Connection: close"))
            await body.relay(reader, writer)
            await _drain(writer, None)
            return stays
        finally:
            sending.cancel()
            answering.cancel()
            await asyncio.gather(sending, answering, return_exceptions=True)

    async def _health(self) -> tuple[HTTPStatus, dict[str, Any]]:
        answers = await asyncio.gather(*(backend.healthy(self.health_path) for backend in self.backends))
        waiting = [backend.url for backend, well in zip(self.backends, answers) if not well]  # noqa: B905 - Python 3.10
        return (HTTPStatus.SERVICE_UNAVAILABLE if waiting else HTTPStatus.OK), {"backends": len(answers), "not_healthy": waiting}

    def _status(self) -> tuple[HTTPStatus, dict[str, Any]]:
        keys = ("url", "active", "total", "refused", "broken")
        return HTTPStatus.OK, {"backends": [{key: getattr(backend, key) for key in keys} for backend in self.backends]}


async def _part(client: Client, writer: asyncio.StreamWriter) -> None:
    """End a connection when the client has what was written: all of it leaves this process, and what the client still sends is read."""
    if writer.transport.is_closing():
        return
    writer.write_eof()
    writer.transport.set_write_buffer_limits(0)
    await _drained(writer)

    async def discard() -> None:
        while await client.read(_PIECE):
            pass

    await _within(_LINGER_S, discard())


def _answer(writer: asyncio.StreamWriter, status: HTTPStatus, body: dict[str, Any], close: bool = True, bodiless: bool = False) -> None:
    data = json.dumps(body).encode()
    head = f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n"
    writer.write(head.encode() + (b"Connection: close\r\n\r\n" if close else b"\r\n") + (b"" if bodiless else data))


def _say(text: str) -> None:
    sys.stderr.write(f"router: {text}\n")
    sys.stderr.flush()


def _connections() -> int:
    """How many clients there may be: each takes two files, one of them to a backend. The limit is raised where it may be."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    files = _OPEN_FILES if soft == resource.RLIM_INFINITY else soft
    return max(1, files // 2 - 50)


async def run(host: str, port: int, backends: list[Backend], health_path: str) -> None:
    """Serve until SIGTERM or SIGINT."""
    loop = asyncio.get_running_loop()
    router, told = Router(backends, health_path, _connections()), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, told.set)

    def protocol() -> asyncio.StreamReaderProtocol:
        return asyncio.StreamReaderProtocol(Client(loop), router.serve, loop=loop)  # type: ignore[arg-type]

    server = await loop.create_server(protocol, host, port, backlog=1024)
    _say(f"listening on {host}:{port}, in front of {', '.join(item.url for item in backends)}")
    await told.wait()
    server.close()
    while router.tasks:
        for task in tuple(router.tasks):
            task.cancel()
        await asyncio.wait(tuple(router.tasks), timeout=1)
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
