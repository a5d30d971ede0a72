"""Where a campaign stands, from its files alone: the journal says what is done, the state files say who works on it.

- Counts come from records that count, so what status says is what merge will find.
- A state file that has not changed for a while belongs to a collector that is gone, or that the file system has not shown yet:
  it is left out of the rate, and nothing else depends on it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping

from seatrial.model.record import Record
from seatrial.rollouts.collect.state import ShardState, newest_states
from seatrial.rollouts.collect.stops import stopped
from seatrial.rollouts.conduct import rounds
from seatrial.rollouts.journal.scan import OWED, Scanner
from seatrial.rollouts.manifest import Manifest
from seatrial.rollouts.place import Place
from seatrial.rollouts.units import Units

FRESH_S = 20.0
"""A collector writes its state every two seconds; file systems and clocks may lag."""
_WINDOW_S = 60.0
_ENOUGH_S = 3.0
"""What was seen over less time says little of the speed."""


class Status(Record):
    """A campaign at one moment."""

    name: str
    units: int
    ok: int
    failed: int
    """For good."""
    owed: int
    rows: int
    rows_done: int
    """Rows all of whose repetitions are settled."""
    shards: int
    shards_done: int
    collectors: int
    """That work on it right now."""
    open: int
    """Requests that wait for an answer."""
    seen_s: float | None = None
    """How long ago the last of these collectors wrote its state; None without any."""
    per_s: float | None
    """Rollouts a second; None when nothing is known of it."""
    eta_s: float | None
    mean_reward: float | None
    failures: Mapping[str, int]
    """Failure records by class, also of units that healed later."""
    torn: int
    duplicates: int
    conflicts: int
    foreign: int
    round: int
    """The last one; 0 when nothing was launched."""
    on: str
    stopped: str
    """Why it stopped by itself; empty when it did not."""
    owing_most: tuple[int, ...]
    """Up to five shards."""

    @property
    def settled(self) -> int:
        """Units that are owed no more."""
        return self.ok + self.failed


class Watch:
    """Asks again and again; each time only what was appended is read."""

    def __init__(self, place: Place, manifest: Manifest, units: Units) -> None:
        self._place, self._manifest, self._units = place, manifest, units
        self._scanner = Scanner(place, units)
        self._seen: deque[tuple[float, int]] = deque()
        self.owed_by_shard: dict[int, int] = {}
        """Shards that owe something, and how much, as of the last look."""

    def look(self) -> Status:
        """The campaign now."""
        scan = self._scanner.update()
        rows_done = self._count(scan.settled)
        owed = self.owed_by_shard
        working = self._working()
        states = [state for state, _ in working]
        settled = scan.ok + scan.failed
        rate = self._rate(settled, states)
        past = rounds.rounds(self._place)
        why = stopped(self._place)
        return Status(
            name=self._manifest.name,
            units=self._manifest.units,
            ok=scan.ok,
            failed=scan.failed,
            owed=scan.owed,
            rows=self._manifest.rows,
            rows_done=rows_done,
            shards=self._manifest.shards,
            shards_done=self._manifest.shards - len(owed),
            collectors=len({(state.host, state.pid) for state in states}),
            open=sum({(state.host, state.pid): state.open for state in states}.values()),
            seen_s=min((age for _, age in working), default=None),
            per_s=rate,
            eta_s=scan.owed / rate if rate else (0.0 if not scan.owed else None),
            mean_reward=scan.reward_sum / scan.ok if scan.ok else None,
            failures=dict(scan.by_kind.most_common()),
            torn=scan.torn,
            duplicates=scan.duplicates,
            conflicts=scan.conflicts,
            foreign=scan.foreign,
            round=past[-1].number if past else 0,
            on=past[-1].on if past else "",
            stopped=why.reason if why else "",
            owing_most=tuple(sorted(owed, key=lambda shard: -owed[shard])[:5]),
        )

    def _count(self, settled: bytearray) -> int:
        """Set what each shard owes; gives the number of rows that owe nothing. Every two seconds, so no unit is looked at by itself."""
        shards, done = self._manifest.shards, 0
        counts = [0] * shards
        for row, (first, end) in enumerate(self._units.spans()):
            if missing := settled.count(OWED, first, end):
                counts[row % shards] += missing
            else:
                done += 1
        if self._manifest.deal == "units":
            counts = [settled[shard::shards].count(OWED) for shard in range(shards)]
        self.owed_by_shard = {shard: count for shard, count in enumerate(counts) if count}
        return done

    def _working(self) -> list[tuple[ShardState, float]]:
        """States of shards that owe something and whose collectors wrote lately, and how many seconds ago that was."""
        newest, now = newest_states(self._place, self.owed_by_shard).values(), time.time()
        # A clock that lags behind the file system's must not make it the future.
        aged = [(state, max(0.0, now - written)) for state, written in newest if state.ended is None]
        return [(state, age) for state, age in aged if age <= FRESH_S]

    def _rate(self, settled: int, states: list[ShardState]) -> float | None:
        """What was seen over the last minute; at first what the collectors say."""
        now = time.monotonic()
        self._seen.append((now, settled))
        while self._seen[-1][0] - self._seen[0][0] > _WINDOW_S:
            self._seen.popleft()
        since, before = self._seen[0]
        passed = now - since
        if passed > _ENOUGH_S and settled > before:
            return (settled - before) / passed
        said = sum(state.rate for state in states)
        return said or None
