"""One shard while it is collected: its lease, its attempt's file, what is still owed, and its counts.

- A shard in which nothing is owed gets neither a lease nor a file.
- What is owed is read after the lease is ours: the one before us may have written until then.
- An attempt that is fenced off writes no more: its units are the next one's.
"""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self

from seatrial.launch.interrupt import Interrupted
from seatrial.rollouts.collect.state import ShardState, write_state
from seatrial.rollouts.journal.attempt import Attempt
from seatrial.rollouts.journal.holder import Holder
from seatrial.rollouts.journal.lease import STALE_S, FencedError, Lease
from seatrial.rollouts.journal.scan import OWED, Scan, Scanner
from seatrial.rollouts.manifest import load
from seatrial.rollouts.place import Place
from seatrial.rollouts.record import Head, encode
from seatrial.rollouts.units import Units

WAIT_S = STALE_S + 15.0
"""Long enough to take over from a node that was lost."""
_SMOOTH = 0.3
"""Weight of the newest measurement in `rate`."""


class Book:
    """A shard that is ours."""

    def __init__(self, place: Place, shard: int, total: int, lease: Lease, scan: Scan) -> None:
        self.shard = shard
        self.in_hand = 0
        """Units that were given out and are not done with."""
        self.whole = True
        """Whether every unit that came back was written down."""
        self.lost = False
        """Whether a newer attempt has the shard."""
        self.total = total
        self.ok, self.failed, self.failed_now = scan.ok, scan.failed, 0
        self.collected = 0
        self._place = place
        self._lease = lease
        self._attempt = Attempt.open(place.shard(shard), lease.holder)
        self._before = scan.failed_attempts
        self._settled = scan.settled
        self._kinds: Counter[str] = Counter()
        self._reward_sum = scan.reward_sum
        self._started = time.time()
        self._rate, self._rated, self._rated_at = 0.0, 0, time.monotonic()
        self.message = ""
        """Of the last failure."""
        self._closed = False

    @classmethod
    def open(cls, place: Place, shard: int, halted: Callable[[], bool]) -> Self | None:
        """Take the shard; None when nothing of it is owed, or `halted` while waiting. Raises HeldError. Blocks: for a thread."""
        with Units(place, load(place)) as units:
            if not _owed(Scanner(place, units), shard):
                return None
            try:
                lease = Lease.acquire(place.shard(shard), Holder.here(), WAIT_S, sleep=_sleeper(halted))
            except Interrupted:
                return None
            try:
                if _owed(scanner := Scanner(place, units), shard):
                    return cls(place, shard, sum(1 for _ in units.of_shard(shard)), lease, scanner.scan)
            except BaseException:
                lease.release()
                raise
            lease.release()
            return None

    @property
    def owed(self) -> int:
        """Units that are not settled."""
        return self.total - self.ok - self.failed

    def numbers(self, units: Units) -> Iterator[int]:
        """Units that were owed when the shard was taken."""
        return (number for number in units.of_shard(self.shard) if self._settled[number] == OWED)

    def who(self) -> str:
        """Us, in words."""
        return f"shard {self.shard}, {self._lease.holder}"

    def failed_before(self, number: int) -> int:
        """Attempts that gave this unit up."""
        return self._before[number]

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
        except FencedError:
            self.lost = True
            self._finish("fenced")
            return None
        self._attempt.tick()
        self._measure()
        return self._write_state(None, now_open, concurrency)

    def close(self, how: str) -> None:
        """Sync, say how it ended, and let the shard go; twice is once."""
        if not self._closed and not self.lost:
            self._finish(how)
            self._lease.release()
        self._closed = True

    def _finish(self, how: str) -> None:
        self._attempt.close()
        self._write_state(how, 0, 0)

    def _measure(self) -> None:
        now, done = time.monotonic(), self.collected + sum(self._kinds.values())
        rate = (done - self._rated) / max(now - self._rated_at, 1e-3)
        self._rate = rate if not self._rate else (1 - _SMOOTH) * self._rate + _SMOOTH * rate
        self._rated, self._rated_at = done, now

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


def _owed(scanner: Scanner, shard: int) -> bool:
    """Whether anything of the shard is owed."""
    scanner.update([shard])
    return next(iter(scanner.owed([shard])), None) is not None


def _sleeper(halted: Callable[[], bool]) -> Callable[[float], None]:
    """A sleep that ends the wait for a lease."""

    def sleep(seconds: float) -> None:
        if halted():
            raise Interrupted(signal.SIGTERM)
        time.sleep(seconds)

    return sleep
