"""Whether anybody answers: asked when connections fail or nothing came for long, by one question at a time.

- While nobody answers, nothing is dispatched and no unit loses a try. Servers that come back in time go on where they were.
- After `dead_s` it is over: ServersGoneError, and the units are owed again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from seatrial.rollouts.collect.limiter import Limiter
from seatrial.rollouts.work import Backend, ServersGoneError

_AGAIN_S = 1.0


class Pulse:
    """Knows when somebody answered last, and finds out whether anybody still does."""

    def __init__(self, backend: Backend, dead_s: float, limiter: Limiter, progress: Callable[[str], None]) -> None:
        self._backend = backend
        self._dead_s = dead_s
        self._limiter = limiter
        self._progress = progress
        self._heard = time.monotonic()
        self._question: asyncio.Task[bool] | None = None

    def heard(self) -> None:
        """Somebody answered."""
        self._heard = time.monotonic()

    def silent(self) -> bool:
        """Whether it is time to ask, although no connection failed: a server may hang, or its node be lost."""
        return time.monotonic() - self._heard > self._dead_s / 4

    async def check(self) -> bool:
        """True when they answer at once, False when they came back after a silence; raises ServersGoneError."""
        if self._question is None or self._question.done():
            self._question = asyncio.create_task(self._ask())
        return await asyncio.shield(self._question)

    async def close(self) -> None:
        """Ask no more."""
        if self._question is not None:
            self._question.cancel()
            await asyncio.gather(self._question, return_exceptions=True)

    async def _ask(self) -> bool:
        until = time.monotonic() + self._dead_s
        why = await self._once(until)
        if why is None:
            return True
        self._limiter.pause()
        self._progress(f"nobody answers, waiting up to {self._dead_s:g} s: {why}")
        try:
            while (left := until - time.monotonic()) > 0:
                await asyncio.sleep(min(_AGAIN_S, self._dead_s / 10, left))
                if (said := await self._once(until)) is None:
                    self._progress("the servers answer again")
                    return False
                why = said
        finally:
            self._limiter.resume()
        raise ServersGoneError(f"nobody answered for {self._dead_s:g} s: {why}")

    async def _once(self, until: float) -> str | None:
        """Ask once, no longer than there is time."""
        try:
            async with asyncio.timeout(max(until - time.monotonic(), 0.01)):
                why = await self._backend.alive()
        except TimeoutError:
            return "no answer in time"
        if why is None:
            self.heard()
        return why
