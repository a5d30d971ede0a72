"""Hands out the pending units of shards, writes each shard, and limits the open requests.

- `Dispatcher` takes one shard after another and knows the writers of those that are open.
- `ShardWriter` holds a shard's lease and its attempt's file. A shard without pending units gets neither. Pending units are read after the
  lease is taken: the previous holder may have written until then. A writer that lost its lease writes no more.
- `Limiter` learns from the server's answers, between 1 and a cap: it starts small, doubles per round until the first overload, then grows
  by one per round while all of it is used. Overload (429, 503, timeouts, lost connections) cuts it by a third, once per round.
"""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self

from seatrial.core.text import counted
from seatrial.rollouts.campaign_dir import CampaignDir, ShardState, write_state
from seatrial.rollouts.journal.attempts import STALE_S, Attempt, Lease, LeaseHeldError, LeaseHolder, LeaseLostError
from seatrial.rollouts.journal.journal_scan import PENDING, Scan, Scanner
from seatrial.rollouts.manifest import Units, load_manifest
from seatrial.rollouts.rollout_record import Head, encode
from seatrial.runtime.interrupt import Interrupted

WAIT_S = STALE_S + 15.0
"""Long enough to take over from a node that was lost."""
_SMOOTH = 0.3
"""Weight of the newest measurement in `rate`."""


class ShardWriter:
    """Writes one shard, whose lease this process holds."""

    def __init__(self, place: CampaignDir, shard: int, total: int, lease: Lease, scan: Scan) -> None:
        self.shard = shard
        self.in_hand = 0
        """Units handed out and not back yet."""
        self.whole = True
        """Whether every unit that came back was written."""
        self.lost = False
        self.total = total
        self.ok, self.failed, self.failed_now = scan.ok, scan.failed, 0
        self.collected = 0
        self._place = place
        self._lease = lease
        self._attempt = Attempt.open(place.shard(shard), lease.holder)
        self.failed_before = scan.failed_attempts
        """How many attempts gave up each unit."""
        self._settled = scan.settled
        self._kinds: Counter[str] = Counter()
        self._reward_sum = scan.reward_sum
        self._started = time.time()
        self._rate, self._rated, self._rated_at = 0.0, 0, time.monotonic()
        self.message = ""
        self._closed = False

    @classmethod
    def open(cls, place: CampaignDir, shard: int, halted: Callable[[], bool]) -> Self | None:
        """Take the shard; None when nothing of it is owed, or `halted` while waiting. Raises LeaseHeldError. Blocks: for a thread."""
        with Units(place, load_manifest(place)) as units:
            if not _has_pending(Scanner(place, units), shard):
                return None
            try:
                lease = Lease.acquire(place.shard(shard), LeaseHolder.here(), WAIT_S, sleep=_sleeper(halted))
            except Interrupted:
                return None
            try:
                if _has_pending(scanner := Scanner(place, units), shard):
                    return cls(place, shard, sum(1 for _ in units.of_shard(shard)), lease, scanner.scan)
            except BaseException:
                lease.release()
                raise
            lease.release()
            return None

    @property
    def owed(self) -> int:
        return self.total - self.ok - self.failed

    def numbers(self, units: Units) -> Iterator[int]:
        """Units that were owed when the shard was taken."""
        return (number for number in units.of_shard(self.shard) if self._settled[number] == PENDING)

    def who(self) -> str:
        return f"shard {self.shard}, {self._lease.holder}"

    def write(self, head: Head, row: Mapping[str, Any]) -> None:
        """Write a unit down. A ValueError or TypeError says that it cannot be stored, a BlockedError that the disk takes no more."""
        line = encode(head, row)
        if self.lost:
            return
        self._attempt.append(line)
        if head.ok:
            self.ok += 1
            self.collected += 1
            self._reward_sum += head.reward or 0.0
            return
        self.failed += head.final
        self.failed_now += not head.final
        self._kinds[head.kind or ""] += 1
        self.message = head.message

    def keep(self, now_open: int, concurrency: int) -> float | None:
        """Renew the lease, sync, and write the state: every two seconds or so. Gives the file system's time, or None when closed."""
        if self._closed or self.lost:
            return None
        try:
            self._lease.renew()
        except LeaseLostError:
            self.lost = True
            self._finish("fenced")
            return None
        self._attempt.tick()
        now, done = time.monotonic(), self.collected + sum(self._kinds.values())
        rate = (done - self._rated) / max(now - self._rated_at, 1e-3)
        self._rate = rate if not self._rate else (1 - _SMOOTH) * self._rate + _SMOOTH * rate
        self._rated, self._rated_at = done, now
        return self._write_state(None, now_open, concurrency)

    def close(self, how: str) -> None:
        """Flush, record the end reason, release the lease. Idempotent."""
        if not self._closed and not self.lost:
            self._finish(how)
            self._lease.release()
        self._closed = True

    def _finish(self, how: str) -> None:
        self._attempt.close()
        self._write_state(how, 0, 0)

    def _write_state(self, ended: str | None, now_open: int, concurrency: int) -> float:
        holder = self._lease.holder
        state = ShardState(
            shard=self.shard,
            attempt=holder.number,
            token=holder.token,
            host=holder.host,
            pid=holder.pid,
            slurm=holder.slurm,
            started=self._started,
            updated=time.time(),
            ended=ended,
            units=self.total,
            owed=self.owed,
            ok=self.ok,
            failed=self.failed,
            failed_now=self.failed_now,
            kinds=self._kinds,
            collected=self.collected,
            reward_sum=self._reward_sum,
            open=now_open,
            concurrency=concurrency,
            rate=round(self._rate, 3),
            message=self.message,
        )
        return write_state(self._place, state)


def _has_pending(scanner: Scanner, shard: int) -> bool:
    scanner.update([shard])
    return next(iter(scanner.owed([shard])), None) is not None


def _sleeper(halted: Callable[[], bool]) -> Callable[[float], None]:
    def sleep(seconds: float) -> None:
        if halted():
            raise Interrupted(signal.SIGTERM)
        time.sleep(seconds)

    return sleep


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
        """Give a slot back; `answered` and `overloaded` adapt the limit."""
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
        """Grant no slot until `resume`."""
        self._paused = True

    def resume(self) -> None:
        self._paused = False
        self._wake()

    def close(self) -> None:
        """Refuse slots from now on, also to those who wait."""
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


class Dispatcher:
    """Hands out pending units."""

    def __init__(self, place: CampaignDir, units: Units, shards: Sequence[int]) -> None:
        self._place = place
        self._units = units
        self._shards = iter(shards)
        self._writers: list[ShardWriter] = []
        self._current: ShardWriter | None = None
        self._numbers: Iterator[int] = iter(())
        self._turn = asyncio.Lock()
        self._halted = threading.Event()
        self._held: list[str] = []

    @property
    def ok(self) -> int:
        """Units of opened shards that are settled well."""
        return sum(writer.ok for writer in self._writers)

    @property
    def failed(self) -> int:
        """Units of opened shards that failed, for good or for now."""
        return sum(writer.failed + writer.failed_now for writer in self._writers)

    @property
    def message(self) -> str:
        """Of a failure, one of the last; empty when there was none."""
        return next((writer.message for writer in reversed(self._writers) if writer.message), "")

    async def next(self, only: Callable[[int], bool] | None) -> tuple[int, ShardWriter] | None:
        """A unit, and the writer of its shard; None when there are no more. Each must come `back`."""
        while (writer := self._current) is not None:
            if not writer.lost:
                for number in self._numbers:
                    if only is None or only(number):
                        writer.in_hand += 1
                        return number, writer
            async with self._turn:
                # Whoever waited here finds the next shard taken already.
                if self._current is writer:
                    await self.open_next()
                    self._settle(writer)
        return None

    def back(self, writer: ShardWriter, *, written: bool) -> None:
        """A unit is done with; not `written` leaves it owed."""
        writer.in_hand -= 1
        writer.whole = writer.whole and written
        if writer is not self._current:
            self._settle(writer)

    def keep(self, limiter: Limiter) -> float | None:
        """Renew what is open and say how it stands; gives the file system's time, if anything is open."""
        times = [writer.keep(limiter.open, int(limiter.limit)) for writer in self._writers]
        return max((time for time in times if time is not None), default=None)

    def close(self, how: str) -> None:
        self._halted.set()
        for writer in self._writers:
            writer.close(how)

    def lost(self) -> str:
        """Which shards others have, in words; empty when none."""
        return "; ".join(
            [*(f"shard {writer.shard} was taken over by a newer attempt" for writer in self._writers if writer.lost), *self._held]
        )

    def describe(self) -> str:
        owed = sum(writer.owed for writer in self._writers)
        return f"{self.ok:,} ok, {self.failed:,} failed, {owed:,} owed in {counted(len(self._writers), 'shard')}"

    def who(self) -> str:
        return self._writers[-1].who() if self._writers else "a collector"

    @staticmethod
    def _settle(writer: ShardWriter) -> None:
        """Let a shard go in which everything was tried; what else becomes of it is known when the collector ends."""
        if writer.whole and not writer.in_hand:
            writer.close("done")

    async def open_next(self) -> bool:
        """Open the next shard that owes anything; those that others hold are noted. Until it is open, the one before stays current:
        nobody who asks meanwhile may think that there are no more."""
        for shard in self._shards:
            try:
                writer = await self._open(shard)
            except LeaseHeldError as error:
                self._held.append(error.message)
                continue
            if writer is not None:
                self._writers.append(writer)
                self._numbers = writer.numbers(self._units)
                self._current = writer
                return True
        self._current = None
        return False

    async def _open(self, shard: int) -> ShardWriter | None:
        """In a thread: a lease may have to be waited for. A cancelled wait gives back what it got."""
        opening = asyncio.create_task(asyncio.to_thread(ShardWriter.open, self._place, shard, self._halted.is_set))
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            self._halted.set()
            got = (await asyncio.gather(opening, return_exceptions=True))[0]
            if isinstance(got, ShardWriter):
                got.close("stopped")
            raise
