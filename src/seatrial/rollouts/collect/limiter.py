"""How many requests may be open: found out from the server's answers, between 1 and a cap.

- It starts small and grows by one per answer, so it doubles each round, until the server is first overloaded; from then on by one
  per round. It grows only while all of it is used.
- Overload (429, 503, timeouts, lost connections) cuts it by a third, once per round: requests that were open before the last cut
  say nothing about the new limit.
- `pause` lets nobody in, such as while no server answers; `close` turns everybody away.
"""

from __future__ import annotations

import asyncio
from collections import deque

_START = 16
_CUT = 0.67


class Limiter:
    """Slots for one event loop. Whoever got one must give it back by `release`."""

    def __init__(self, cap: int) -> None:
        self.cap = cap
        self.limit = float(min(cap, _START))
        self.open = 0
        self._growing = True
        self._round = 0
        self._paused = False
        self._closed = False
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def acquire(self) -> int | None:
        """A slot: the number of the round, which `release` wants back; None when closed."""
        while not self._closed:
            if not self._paused and self.open < int(self.limit):
                self.open += 1
                return self._round
            turn = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._wake()  # the turn was ours already: somebody else must have it
                raise
        return None

    def release(self, round_: int, *, answered: bool = False, overloaded: bool = False) -> None:
        """Give a slot back and say how it went; neither word teaches nothing."""
        full = bool(self._waiting) or self.open >= int(self.limit)
        self.open -= 1
        if overloaded:
            if round_ == self._round:
                self.limit = max(1.0, self.limit * _CUT)
                self._round += 1
            self._growing = False
        elif answered and full and self.limit < self.cap:
            self.limit = min(float(self.cap), self.limit + (1.0 if self._growing else 1.0 / self.limit))
        self._wake()

    def pause(self) -> None:
        """Let nobody in until `resume`."""
        self._paused = True

    def resume(self) -> None:
        """Let them in again."""
        self._paused = False
        self._wake()

    def close(self) -> None:
        """Turn away whoever waits and whoever comes."""
        self._closed = True
        while self._waiting:
            self._let(self._waiting.popleft())

    def _wake(self) -> None:
        """Wake as many as there are slots; each looks for itself, since a slot may be gone by then."""
        if self._paused:
            return
        for _ in range(min(len(self._waiting), int(self.limit) - self.open)):
            self._let(self._waiting.popleft())

    @staticmethod
    def _let(turn: asyncio.Future[None]) -> None:
        if not turn.done():
            turn.set_result(None)
