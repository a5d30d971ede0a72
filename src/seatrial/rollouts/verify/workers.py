"""Worker processes that verify: each loads once what it needs, answers one request at a time, and may hang or crash.

- A worker that does not answer in time is killed, with all that it started, and replaced by a new one when it is needed.
- Ctrl-C and SIGTERM are for the collector, which drains: workers do not heed them, though whoever ends a job sends them to everybody.
- A worker that dies is replaced once for the same request. When the new one dies too, by a signal (out of memory, somebody's kill),
  nobody knows whose fault that was: another try may heal it. By an exit code of its own it never does.
- Requests and answers are JSON with a number; see `worker`, which runs in the process. An answer with another number than the request's
  is no answer to it: the worker counts as dead.
- Workers die with this process, however it dies. After `close` none is left and none starts: a request that is under way fails.
- Every wait has a bound: for a worker to load, to answer, and to end.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from seatrial.launch.descendants import die_with_parent
from seatrial.model.errors import UserError
from seatrial.model.guarded import parse_json
from seatrial.rollouts.sandbox.spawn import END_S, Child, start_child

_LOAD_S = 120.0
_MOST = 4
STOPS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""Signals that ask for an end in order."""


class WorkerError(Exception):
    """No answer: too late, or the worker died. The message says which, `heals` whether another try may give one."""

    def __init__(self, message: str, *, heals: bool = False) -> None:
        super().__init__(message)
        self.heals = heals


class _DiedError(WorkerError):
    """The worker died."""


class Workers:
    """A pool of workers of one kind."""

    def __init__(self, arguments: Sequence[str], timeout_s: float, count: int | None = None) -> None:
        self._arguments = arguments
        self._timeout_s = timeout_s
        self._turn = asyncio.Semaphore(count or min(os.cpu_count() or 1, _MOST))
        self._idle: list[_Worker] = []
        self._all: set[_Worker] = set()
        self._closed = asyncio.Event()

    async def ask(self, request: Mapping[str, Any]) -> Any:
        """The answer to a request. Raises WorkerError, and UserError when a worker cannot load what it needs."""
        async with self._turn:
            try:
                return await self._ask(request)
            except _DiedError:
                return await self._ask(request)

    async def _ask(self, request: Mapping[str, Any]) -> Any:
        if self._closed.is_set():  # a retry, or a request that waited for its turn, would start a worker that nobody ends
            raise WorkerError("the verifier was closed", heals=True)
        worker = self._idle.pop() if self._idle else await self._start()
        try:
            async with asyncio.timeout(self._timeout_s):
                answer = await worker.ask(request)
        except TimeoutError:
            await self._end(worker)
            raise WorkerError(f"no answer within {self._timeout_s:g} s") from None
        except _StaleError as error:
            await self._end(worker)
            raise _DiedError(str(error)) from None
        except (asyncio.IncompleteReadError, ConnectionError, ValueError):
            code = await self._end(worker)
            raise _DiedError(f"the worker process died ({_how(code)})", heals=code < 0) from None
        except BaseException:
            await self._end(worker)
            raise
        self._idle.append(worker)
        return answer

    async def close(self) -> None:
        """End every worker, also those that load or answer."""
        self._closed.set()
        self._idle.clear()
        workers = [*self._all]
        for worker in workers:  # before the first wait: that may be cancelled
            worker.kill()
        await asyncio.gather(*(self._end(worker) for worker in workers))

    async def _start(self) -> _Worker:
        words = (sys.executable, "-m", "seatrial.rollouts.verify.worker", *self._arguments)
        worker = _Worker(await start_child(words, start_new_session=True, before_exec=_before_exec()))
        self._all.add(worker)
        if self._closed.is_set():  # while it started
            await self._end(worker)
            raise WorkerError("the verifier was closed", heals=True)
        what = f"a worker of the verifier ({' '.join(self._arguments)})"
        try:
            async with asyncio.timeout(_LOAD_S):
                said = await worker.read(0)
        except TimeoutError:
            await self._end(worker)
            raise UserError(f"{what} did not load within {_LOAD_S:g} s", "see what its import waits for") from None
        except (asyncio.IncompleteReadError, ConnectionError, ValueError):
            if self._closed.is_set():
                await self._end(worker)
                raise WorkerError("the verifier was closed", heals=True) from None
            raise UserError(f"{what} died while loading ({_how(await self._end(worker))})", "import it in a Python of your own") from None
        except BaseException:
            await self._end(worker)
            raise
        if said is not None:
            await self._end(worker)
            raise UserError(str(said), "see that it can be imported where the collector runs")
        return worker

    async def _end(self, worker: _Worker) -> int:
        self._all.discard(worker)
        return await worker.end()


class _StaleError(Exception):
    """What came is the answer to another request."""


class _Worker:
    def __init__(self, process: Child) -> None:
        self._process = process
        self._number = 0
        self._ended = False

    async def ask(self, request: Mapping[str, Any]) -> Any:
        body = json.dumps(request).encode()
        self._number += 1
        self._process.stdin.write(b"%012d%012d" % (self._number, len(body)) + body)
        await self._process.stdin.drain()
        return await self.read(self._number)

    async def read(self, number: int) -> Any:
        """The answer with this number."""
        head = await self._process.stdout.readexactly(24)
        answer = parse_json(await self._process.stdout.readexactly(int(head[12:])))
        if int(head[:12]) != number:
            raise _StaleError(f"the worker process answered request {int(head[:12])} where {number} was asked")
        return answer

    def kill(self) -> None:
        """Kill it and what it started. Not twice: its number may be another process's by then."""
        if self._ended:
            return
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass

    async def end(self) -> int:
        """Kill it and what it started; its exit code, negative for a signal."""
        self.kill()
        self._process.close()
        try:
            async with asyncio.timeout(END_S):
                code = await self._process.wait()
        except TimeoutError:  # the kernel holds it; it dies when that lets it go
            return -signal.SIGKILL
        self._ended = True
        try:
            # What it had started may be ours now (see `adopt_orphans`); there is nobody else to collect it.
            while os.waitpid(-self._process.pid, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            pass
        return code


def _how(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"


def _before_exec() -> Callable[[], None]:
    """What a worker does before exec: it dies with us, and ignores signals until `worker` has taken them over."""
    die = die_with_parent()

    def prepare() -> None:
        for number in STOPS:
            signal.signal(number, signal.SIG_IGN)
        die()

    return prepare
