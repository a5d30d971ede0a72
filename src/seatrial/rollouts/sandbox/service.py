"""The sandbox as a service that clients of NEMO_SKILLS_SANDBOX_HOST and _PORT know: NeMo Gym's resources servers, and Skills.

- POST /execute {generated_code, timeout, language, std_input, max_output_characters, traceback_verbosity}, and X-Session-ID for
  ipython -> {process_status: completed | timeout | error, stdout, stderr}, and new_session_created for ipython.
- GET /health, GET /sessions, DELETE /sessions/ID.
- Languages: ipython (a session, with the standard library only), python and python3, shell and bash. Others, such as pypy3 and
  lean4, are answered with process_status error and the reason in stderr.
- As in Skills, a Python program that ends by an exception is `completed`, with the traceback in stderr; a shell script that fails is
  an `error`. Also as there, output beyond max_output_characters (1000) is cut from its end, so a long traceback loses its last line.
  Unlike there, each program has its own /tmp: nothing is kept from one to the next but in a session.
- It listens where it is told to, which should be loopback: whoever reaches it may run programs in the sandbox.
"""

from __future__ import annotations

import asyncio
import json
import math
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from seatrial.model.errors import BlockedError
from seatrial.model.verdict import Boundary
from seatrial.rollouts.campaign import SandboxLimits
from seatrial.rollouts.sandbox import sandbox as sandboxes
from seatrial.rollouts.sandbox.process import SandboxError
from seatrial.rollouts.sandbox.sandbox import Sandbox
from seatrial.rollouts.sandbox.sessions import Sessions

_BODY = 32 << 20
_IDLE_LOOK_S = 30.0
_CUT = "<output cut>"
_WORDS = {
    "memory": "Ended: it used more than {0.memory_mb} MB of memory",
    "processes": "Ended: it had {0.processes} processes or threads",
    "files": "Ended: it made too many files",
    "output": "Ended: it wrote more than {0.output_kb} KB",
    "killed": "Ended early: by itself, by a signal, or by its CPU limit",
}


@dataclass(frozen=True, slots=True)
class _Request:
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

    def __init__(self, limits: SandboxLimits) -> None:
        self._limits = limits
        self._sandbox = Sandbox(limits)
        self._sessions = Sessions(limits)
        self.app = web.Application(client_max_size=_BODY)
        self.app.add_routes(
            [
                web.post("/execute", self._execute),
                web.get("/health", self._health),
                web.get("/sessions", self._list),
                web.delete("/sessions/{name}", self._delete),
            ]
        )

    async def tend(self) -> None:
        """End idle sessions, for ever."""
        while True:
            await asyncio.sleep(_IDLE_LOOK_S)
            await self._sessions.end_idle()

    async def close(self) -> None:
        """End every session."""
        await self._sessions.close()

    async def _health(self, _: web.Request) -> web.Response:
        return web.json_response({"status": "healthy", "worker": "seatrial"})

    async def _list(self, _: web.Request) -> web.Response:
        found = {
            name: {"backend": "ipython", "created": session.created, "last_used": session.used, "alive": True}
            for name, session in self._sessions.open.items()
        }
        return web.json_response({"sessions": found, "backend": "ipython"})

    async def _delete(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if await self._sessions.end(name):
            return web.json_response({"message": f"IPython session {name} deleted successfully"})
        return web.json_response({"error": f"IPython session {name} not found"}, status=404)

    async def _execute(self, request: web.Request) -> web.Response:
        try:
            asked = _asked(await request.text(), request.headers.get("X-Session-ID"))
        except ValueError as error:
            return web.json_response({"error": str(error)}, status=400)
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
            cell = await self._sessions.run(asked.session, asked.code, asked.timeout_s, asked.minimal)
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
    data = json.loads(body)
    if not isinstance(data, dict):
        raise ValueError("the body must be a JSON object")
    language = data.get("language", "ipython")
    if language == "ipython" and session is None:
        raise ValueError("X-Session-ID header required for ipython sessions")
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


async def serve(host: str, port: int, limits: SandboxLimits, ready: Callable[[int], None]) -> None:
    """Serve until cancelled, or until SIGTERM or SIGINT where `run_service` runs it; `ready` is told the port, which matters for 0."""
    sandboxes.require()
    service = Service(limits)
    runner = web.AppRunner(service.app, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    tending = asyncio.create_task(service.tend())
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
        await service.close()


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
