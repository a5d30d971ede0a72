"""The sandbox as a service that clients of NEMO_SKILLS_SANDBOX_HOST and _PORT know: NeMo Gym's resources servers, and Skills.

- POST /execute {generated_code, timeout, language, std_input, max_output_characters, traceback_verbosity}, and X-Session-ID for
  ipython -> {process_status: completed | timeout | error, stdout, stderr}, and new_session_created for ipython. GET /health,
  GET /sessions, DELETE /sessions/ID. Languages: ipython (a session, with the standard library only), python, python3, shell, bash.
- As in Skills, a Python program that ends by an exception is `completed`, a failing shell script an `error`; output is cut from its end.
  Unlike there, each program has its own /tmp.
- A session is one process tree in one sandbox. A cell that passes a limit ends it; the next answer says that the session is new. At
  most `MOST` sessions; one idle for `IDLE_S`, or the longest idle when there is no room, is ended.
- Listen on loopback: any client may run programs. Requests from web pages are refused (Origin, cross-site, a foreign Host, a body that
  is not application/json); `POST http://HOST/execute` counts as that Host.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import re
import signal
import time
import weakref
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from ipaddress import ip_address
from typing import Any, NamedTuple

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.web_protocol import RequestPayloadError

from seatrial.core.errors import BlockedError
from seatrial.core.guarded import parse_json
from seatrial.core.verdict import Boundary
from seatrial.rollouts.campaign import SandboxLimits
from seatrial.rollouts.sandbox import bubblewrap
from seatrial.rollouts.sandbox import sandbox as sandboxes
from seatrial.rollouts.sandbox.sandbox import Ending, Sandbox, SandboxedProcess, SandboxError, slot, start_sandboxed

MOST = bubblewrap.SLOTS // 2
IDLE_S = 600.0
_CPU = 100


class Cell(NamedTuple):
    """What a cell did."""

    stdout: str
    stderr: str
    failed: bool
    ending: Ending
    """Anything but `done` ended the session."""
    new: bool
    """Whether the session began with this cell."""


class SandboxSession:
    """One of them; made by `Sessions`."""

    def __init__(self, limits: SandboxLimits) -> None:
        self.created = self.used = time.time()
        self.turn = asyncio.Lock()
        """Cells of a session run one after another."""
        self.jailed: SandboxedProcess | None = None
        self.closed = False
        self._limits = limits
        self._held = AsyncExitStack()
        self._life = asyncio.Lock()
        """Whoever closes waits until it is open: half a sandbox cannot be ended."""

    async def open(self) -> None:
        async with self._life:
            if self.closed:
                raise SandboxError("the session was ended while it began")
            number = await self._held.enter_async_context(slot())
            argv = [*bubblewrap.interpreter(), "-c", bubblewrap.inside_source("cells")]
            self.jailed = await start_sandboxed(argv, {}, self._limits, number, cpu_s=self._limits.cpu_s * _CPU)

    async def run(self, code: str, wall_s: float, minimal: bool, new: bool) -> Cell:
        """One cell; the session is over when its ending is not `done`."""
        assert self.jailed is not None
        jailed = self.jailed
        request = {"code": code, "minimal": minimal, "limit": self._limits.output_kb << 10}
        answer = asyncio.create_task(self._answer(jailed, json.dumps(request).encode() + b"\n"))
        try:
            awaited: set[asyncio.Future[Any]] = {answer, jailed.trouble}
            done, _ = await asyncio.wait(awaited, timeout=wall_s, return_when=asyncio.FIRST_COMPLETED)
            if answer in done and (said := answer.result()) is not None:
                return Cell(*said, "done", new)
        finally:
            answer.cancel()
            await asyncio.gather(answer, return_exceptions=True)
        ending: Ending = "killed" if answer in done else jailed.trouble.result() if jailed.trouble.done() else "timeout"
        return Cell("", "", True, ending, new)

    async def close(self) -> None:
        async with self._life:
            self.closed = True
            try:
                if self.jailed is not None:
                    await self.jailed.end()
            finally:
                await self._held.aclose()

    async def _answer(self, jailed: SandboxedProcess, request: bytes) -> tuple[str, str, bool] | None:
        """Output, errors, and whether the cell failed. None when the interpreter ended, or said what it should not."""
        try:
            jailed.stdin.write(request)
            length = int(await jailed.stdout.readexactly(12))
            if length > 16 * (self._limits.output_kb << 10):
                return None
            said = parse_json(await jailed.stdout.readexactly(length))
        except (ConnectionError, asyncio.IncompleteReadError, ValueError):
            return None
        # The program shares a process with the one that answers, and may answer in its place: take nothing on trust.
        if not isinstance(said, dict):
            return None
        return str(said.get("stdout", "")), str(said.get("stderr", "")), said.get("failed") is not False


class Sessions:
    """All of them, by id."""

    def __init__(self, limits: SandboxLimits, most: int = MOST, idle_s: float = IDLE_S) -> None:
        self.open: dict[str, SandboxSession] = {}
        self._limits, self._most, self._idle_s = limits, most, idle_s

    async def run(self, name: str, code: str, wall_s: float, minimal: bool = False) -> Cell:
        """Run a cell in the session of that name, which is made when there is none. Raises SandboxError."""
        await self.end_idle()
        while True:
            session = await self._session(name)
            async with session.turn:
                if session.closed:
                    continue
                session.used = time.time()
                new = session.jailed is None
                try:
                    if new:
                        await session.open()
                    cell = await session.run(code, min(wall_s, self._limits.wall_s), minimal, new)
                except BaseException:
                    await self._drop(name, session)
                    raise
                session.used = time.time()
                if cell.ending != "done":
                    await self._drop(name, session)
                return cell

    async def end(self, name: str) -> bool:
        """End a session, whatever it does; False when there is none."""
        session = self.open.get(name)
        if session is None:
            return False
        await self._drop(name, session)
        return True

    async def end_idle(self) -> None:
        """End those that nobody has used for long."""
        now = time.time()
        for name, session in list(self.open.items()):
            if not session.turn.locked() and now - session.used > self._idle_s:
                await self._drop(name, session)

    async def close(self) -> None:
        for name in list(self.open):
            await self.end(name)

    async def _session(self, name: str) -> SandboxSession:
        while (session := self.open.get(name)) is None:
            if len(self.open) < self._most:
                self.open[name] = SandboxSession(self._limits)
                continue
            idle = [(other.used, key) for key, other in self.open.items() if not other.turn.locked()]
            if not idle:
                raise SandboxError(f"{self._most} sessions are busy already")
            await self.end(min(idle)[1])
        return session

    async def _drop(self, name: str, session: SandboxSession) -> None:
        if self.open.get(name) is session:
            del self.open[name]
        await session.close()


_BODY = 32 << 20
_BODY_S = 30.0
"""A body must have come within this time."""
_HEAD = 8 << 10
"""Bytes of one line of a head, or of one header."""
_SESSION_NAME = 200
_REQUESTS = 1024
"""Requests at a time; more are told to come again (503)."""
_CONNECTIONS = 2048
_QUIET_S = 60.0
"""A connection without a request is closed after this time; the quietest ones earlier, when there are more than `_CONNECTIONS`."""
_LOOK_S = 5.0
_CUT = "<output cut>"
_HOST = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9._-]+))(?::[0-9]{0,5})?")
"""A Host header: a name or an address, and a port."""
_log = logging.getLogger(__name__)
_log.addFilter(lambda record: not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError)))
_WORDS = {
    "memory": "Ended: it used more than {0.memory_mb} MB of memory",
    "processes": "Ended: it had {0.processes} processes or threads",
    "files": "Ended: it made too many files",
    "output": "Ended: it wrote more than {0.output_kb} KB",
    "killed": "Ended early: by itself, by a signal, or by its CPU limit",
}


class _Request(NamedTuple):
    """A request that makes sense."""

    code: str
    timeout_s: float
    language: str
    stdin: str
    most: int
    minimal: bool
    session: str | None


class Service:
    """What answers; `app` is what aiohttp serves."""

    def __init__(self, limits: SandboxLimits, host: str = "127.0.0.1") -> None:
        self._limits = limits
        self._local = is_loopback(host)
        self._sandbox = Sandbox(limits)
        self.sessions = Sessions(limits)
        self._active: dict[asyncio.BaseTransport, int] = {}
        self._seen: weakref.WeakKeyDictionary[asyncio.BaseTransport, float] = weakref.WeakKeyDictionary()
        """When each connection was first seen, or last had a request."""
        self.app = web.Application(client_max_size=_BODY, middlewares=[self._guard])
        self.app.add_routes([web.post("/execute", self._execute), web.get("/health", self._health)])
        self.app.add_routes([web.get("/sessions", self._list), web.delete("/sessions/{name}", self._delete)])

    def runner(self) -> web.AppRunner:
        return web.AppRunner(
            self.app,
            logger=_log,
            access_log=None,
            shutdown_timeout=1.0,
            keepalive_timeout=_QUIET_S,
            max_line_size=_HEAD,
            max_field_size=_HEAD,
            lingering_time=1.0,
            auto_decompress=False,
            handler_cancellation=True,
        )

    async def tend(self, runner: web.AppRunner) -> None:
        """End idle sessions and quiet connections, for ever."""
        while True:
            await asyncio.sleep(_LOOK_S)
            await self.sessions.end_idle()
            self.end_quiet(runner)

    def end_quiet(self, runner: web.AppRunner) -> None:
        """Close connections that have no request under way, and had none for long."""
        now = time.monotonic()
        found = [handler.transport for handler in (runner.server.connections if runner.server else ())]
        quiet = [transport for transport in found if transport is not None and transport not in self._active]
        quiet.sort(key=lambda transport: self._seen.setdefault(transport, now))
        beyond = max(0, len(found) - _CONNECTIONS)
        for place, transport in enumerate(quiet):
            if place < beyond or now - self._seen[transport] >= _QUIET_S:
                transport.abort()

    @web.middleware
    async def _guard(self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> web.StreamResponse:
        """Refuse what no client of ours sends; count what is under way."""
        if refusal := self._refusal(request):
            status, message = refusal
            return web.json_response({"error": message}, status=status, headers={"Connection": "close"})
        transport = request.transport
        if transport is None:
            raise ConnectionResetError
        self._active[transport] = self._active.get(transport, 0) + 1
        try:
            return await handler(request)
        finally:
            self._active[transport] -= 1
            if not self._active[transport]:
                del self._active[transport]
            self._seen[transport] = time.monotonic()

    def _refusal(self, request: web.Request) -> tuple[int, str] | None:
        if "Origin" in request.headers or request.headers.get("Sec-Fetch-Site", "none") != "none":
            return 403, "this service does not answer web pages (the request has an Origin)"
        hosts = request.headers.getall("Host", [])
        if len(hosts) != 1:
            return 400, "a request needs one Host header"
        target = request.raw_path
        if not target.startswith("/") and target.partition("://")[2].partition("/")[0] != hosts[0]:
            return 400, "the request's target is no path, and not of its Host"
        if self._local and not is_loopback(host_name(hosts[0])):
            return 403, f"Host {hosts[0][:100]!r} is not this service: ask for 127.0.0.1 or localhost"
        if len(request.headers.getall("Content-Type", ())) > 1:  # an older aiohttp takes the first
            return 400, "there are two Content-Type headers"
        if request.method == "POST" and request.content_type != "application/json":
            return 415, "the body must be application/json (the Content-Type header says otherwise)"
        if request.headers.get("Content-Encoding", "identity").lower() != "identity":
            return 415, "the body must not be compressed (the Content-Encoding header says that it is)"
        if len(self._active) >= _REQUESTS:
            return 503, f"{_REQUESTS} requests are under way already"
        return None

    async def _health(self, _: web.Request) -> web.Response:
        return web.json_response({"status": "healthy", "worker": "seatrial"})

    async def _list(self, _: web.Request) -> web.Response:
        found = {
            name: {"backend": "ipython", "created": session.created, "last_used": session.used, "alive": True}
            for name, session in self.sessions.open.items()
        }
        return web.json_response({"sessions": found, "backend": "ipython"})

    async def _delete(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if await self.sessions.end(name):
            return web.json_response({"message": f"IPython session {name} deleted successfully"})
        return web.json_response({"error": f"IPython session {name} not found"}, status=404)

    async def _execute(self, request: web.Request) -> web.Response:
        try:
            async with asyncio.timeout(_BODY_S):
                body = await request.read()
            if (request.charset or "utf-8").lower() not in ("utf-8", "us-ascii"):  # Python decodes some others in quadratic time
                raise ValueError("the body must be UTF-8 (the Content-Type header says otherwise)")
            asked = _asked(body.decode("utf-8"), request.headers.get("X-Session-ID"))
        except TimeoutError:
            error = f"the body did not come within {_BODY_S:g} s"
            return web.json_response({"error": error}, status=408, headers={"Connection": "close"})
        except RequestPayloadError as error:
            return web.json_response({"error": f"the body is malformed: {error}"}, status=400, headers={"Connection": "close"})
        except (ValueError, LookupError, OverflowError, RecursionError) as wrong:
            return web.json_response({"error": str(wrong)}, status=400)
        try:
            answer = await self._run(asked)
        except SandboxError as error:
            answer = {"process_status": "error", "stdout": "", "stderr": f"Sandbox: {error}\n"}
        for key in ("stdout", "stderr"):
            if len(answer[key]) > asked.most:
                answer[key] = answer[key][: asked.most] + _CUT
        return web.json_response(answer)

    async def _run(self, asked: _Request) -> dict[str, Any]:
        if asked.language == "ipython":
            assert asked.session is not None
            cell = await self.sessions.run(asked.session, asked.code, asked.timeout_s, asked.minimal)
            answer = self._answer(cell.ending, cell.stdout, cell.stderr, cell.failed, asked)
            # A session that was ended is new the next time; the client is told then.
            return {**answer, "new_session_created": cell.new}
        if asked.language in ("python", "python3"):
            ran = await self._sandbox.run(asked.code, stdin=asked.stdin, wall_s=asked.timeout_s)
            return self._answer(ran.ending, ran.stdout, ran.stderr, False, asked)
        if asked.language in ("shell", "bash"):
            ran = await self._sandbox.run(asked.code, stdin=asked.stdin, language="bash", wall_s=asked.timeout_s)
            return self._answer(ran.ending, ran.stdout, ran.stderr, ran.exit_code != 0, asked)
        known = "ipython, python, python3, shell, bash"
        return {"process_status": "error", "stdout": "", "stderr": f"Sandbox: no language {asked.language!r} here; known: {known}\n"}

    def _answer(self, ending: str, stdout: str, stderr: str, failed: bool, asked: _Request) -> dict[str, Any]:
        if ending == "timeout":
            seconds = min(asked.timeout_s, self._limits.wall_s)
            return {"process_status": "timeout", "stdout": stdout, "stderr": f"{stderr}Execution timed out after {seconds:g} seconds\n"}
        if ending != "done":
            stderr, failed = f"{stderr}{_WORDS[ending].format(self._limits)}\n", True
        return {"process_status": "error" if failed else "completed", "stdout": stdout, "stderr": stderr}


def _asked(body: str, session: str | None) -> _Request:
    """The request, or a ValueError that names the key."""
    data = parse_json(body)
    if not isinstance(data, dict):
        raise ValueError("the body must be a JSON object")
    language = data.get("language", "ipython")
    if language == "ipython" and session is None:
        raise ValueError("X-Session-ID header required for ipython sessions")
    if session is not None and not (0 < len(session) <= _SESSION_NAME and session.isprintable()):
        raise ValueError(f"X-Session-ID must have 1 to {_SESSION_NAME} printable characters")
    timeout, most = data.get("timeout"), data.get("max_output_characters", 1000)
    if not isinstance(timeout, int | float) or not 0 < timeout < math.inf:
        raise ValueError("timeout is required: a number of seconds above 0")
    if not isinstance(most, int) or most < 0:
        raise ValueError("max_output_characters must be a number, 0 or more")
    texts = {"generated_code": data.get("generated_code"), "language": language, "std_input": data.get("std_input") or ""}
    for key, value in texts.items():
        if not isinstance(value, str):
            raise ValueError(f"{key} must be a text")
    minimal = str(data.get("traceback_verbosity", "")).lower() == "minimal"
    return _Request(texts["generated_code"], float(timeout), language, texts["std_input"], most, minimal, session)


def host_name(host: str) -> str:
    """The name in a Host header, without its port; empty where it is no proper one."""
    found = _HOST.fullmatch(host)
    return (found[1] or found[2]) if found else ""


def is_loopback(name: str) -> bool:
    """Whether this is an address or the name of this machine for itself."""
    if name.lower() == "localhost":
        return True
    try:
        return ip_address(name).is_loopback
    except ValueError:
        return False


async def serve(host: str, port: int, limits: SandboxLimits, ready: Callable[[int], None]) -> None:
    """Serve until cancelled, or until SIGTERM or SIGINT where `run_service` runs it; `ready` is told the port, which matters for 0."""
    sandboxes.require()
    service = Service(limits, host)
    runner = service.runner()
    await runner.setup()
    tending = asyncio.create_task(service.tend(runner))
    try:
        site = web.TCPSite(runner, host, port)
        try:
            await site.start()
        except OSError as error:
            message = f"the sandbox service cannot listen on {host}:{port}: {error.strerror or error}"
            raise BlockedError(Boundary.ENVIRONMENT, message, "choose another port") from error
        ready(runner.addresses[0][1])
        await asyncio.Event().wait()
    finally:
        tending.cancel()
        await asyncio.gather(tending, return_exceptions=True)
        await runner.cleanup()
        await service.sessions.close()


def run_service(host: str, port: int, limits: SandboxLimits, ready: Callable[[int], None]) -> None:
    """Serve until SIGTERM or SIGINT; then nothing of it is left."""

    async def until_stopped() -> None:
        task = asyncio.current_task()
        assert task is not None
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
        try:
            await serve(host, port, limits, ready)
        except asyncio.CancelledError:
            return

    asyncio.run(until_stopped())
