"""Sessions: sandboxed interpreters that keep their variables from cell to cell.

- A session is one process tree in one sandbox. A cell that passes a limit ends its session; the next cell finds a new one, and the
  answer says so (`new`), so that a client can repeat what is lost.
- There are at most `MOST`. A session that was idle for `IDLE_S` is ended; when there is no room, the one that was idle longest.
- CPU time adds up over a session, so it may use `_CPU` times a program's; each cell has the wall time of a program.
"""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from seatrial.model.guarded import parse_json
from seatrial.rollouts.campaign import SandboxLimits
from seatrial.rollouts.sandbox import bubblewrap
from seatrial.rollouts.sandbox.process import Jailed, SandboxError, start
from seatrial.rollouts.sandbox.sandbox import Ending, slot

MOST = bubblewrap.SLOTS // 2
IDLE_S = 600.0
_CPU = 100


@dataclass(frozen=True, slots=True)
class Cell:
    """What a cell did."""

    stdout: str
    stderr: str
    failed: bool
    ending: Ending
    """Anything but `done` ended the session."""
    new: bool
    """Whether the session began with this cell."""


class Session:
    """One of them; made by `Sessions`."""

    def __init__(self, limits: SandboxLimits) -> None:
        self.created = self.used = time.time()
        self.turn = asyncio.Lock()
        """Cells of a session run one after another."""
        self.jailed: Jailed | None = None
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
            argv = [*bubblewrap.interpreter(), "-c", bubblewrap.inside("cells")]
            self.jailed = await start(argv, {}, self._limits, number, cpu_s=self._limits.cpu_s * _CPU)

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

    async def _answer(self, jailed: Jailed, request: bytes) -> tuple[str, str, bool] | None:
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
        self.open: dict[str, Session] = {}
        self._limits = limits
        self._most = most
        self._idle_s = idle_s

    async def run(self, name: str, code: str, wall_s: float, minimal: bool = False) -> Cell:
        """Run a cell in the session of that name, which is made when there is none. Raises SandboxError."""
        await self.end_idle()
        while True:
            session = await self._session(name)
            async with session.turn:
                if not session.closed:
                    return await self._in(name, session, code, min(wall_s, self._limits.wall_s), minimal)

    async def _in(self, name: str, session: Session, code: str, wall_s: float, minimal: bool) -> Cell:
        session.used = time.time()
        new = session.jailed is None
        try:
            if new:
                await session.open()
            cell = await session.run(code, wall_s, minimal, new)
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
        """End all."""
        for name in list(self.open):
            await self.end(name)

    async def _session(self, name: str) -> Session:
        while (session := self.open.get(name)) is None:
            if len(self.open) < self._most:
                self.open[name] = Session(self._limits)
                continue
            idle = [(other.used, key) for key, other in self.open.items() if not other.turn.locked()]
            if not idle:
                raise SandboxError(f"{self._most} sessions are busy already")
            await self.end(min(idle)[1])
        return session

    async def _drop(self, name: str, session: Session) -> None:
        if self.open.get(name) is session:
            del self.open[name]
        await session.close()
