"""The failure budget: when so many units fail that going on is waste, over all shards.

- Counted are units that failed for good, in any shard, and units that running attempts gave up for now: a server that answers 500 to
  everything must not be asked 300,000 times before somebody notices. What an earlier round gave up for now counts no more.
- Others are known by their state files, read now and then; our own failures count at once.
- An attempt that wrote nothing for a minute, by the file system's clock, is not running.
"""

from __future__ import annotations

import math
import re
import time

from seatrial.rollouts.campaign import Failures
from seatrial.rollouts.collect.state import newest_states
from seatrial.rollouts.place import Place

_RUNNING_S = 60.0
_LOOK_S = 10.0
_LOOK_S_PER_SHARD = 0.25
"""Hundreds of collectors read hundreds of files each: the more shards, the less often."""
_FAILED = re.compile(r"(\d+) of (\d+) units failed")


def accepting(reason: str) -> str | None:
    """The setting with which a campaign that stopped for this reason goes on, with room for more; None for another reason."""
    found = _FAILED.match(reason)
    if not found or "; failures." not in reason:
        return None
    failed, known = int(found[1]), int(found[2])
    if "failures.max_count" in reason:
        return f"failures.max_count={2 * failed}"
    return f"failures.max_share={min(math.floor(10 * failed / known + 2) / 10, 1):g}"


class Budget:
    """Says when to stop the campaign."""

    def __init__(self, failures: Failures, place: Place, shards: int, own: frozenset[int]) -> None:
        self._failures = failures
        self._place = place
        self._others = [shard for shard in range(shards) if shard not in own]
        self._every_s = _LOOK_S + _LOOK_S_PER_SHARD * shards
        self._looked = float("-inf")
        self._ok = self._failed = 0

    def look(self, now: float) -> None:
        """Read the states of other shards, when it is time; `now` is a fresh time of the file system's clock."""
        if time.monotonic() - self._looked < self._every_s:
            return
        self._looked = time.monotonic()
        self._ok = self._failed = 0
        for state, written in newest_states(self._place, self._others).values():
            self._ok += state.ok
            running = state.ended is None and now - written < _RUNNING_S
            self._failed += state.failed + (state.failed_now if running else 0)

    def exceeded(self, ok: int, failed: int) -> str | None:
        """Why to stop, when our own shards have so many; else None."""
        ok, failed = ok + self._ok, failed + self._failed
        known = ok + failed
        limits = self._failures
        if limits.max_count is not None and failed > limits.max_count:
            return f"{failed} of {known} units failed; failures.max_count is {limits.max_count}"
        if known >= limits.after and failed > limits.max_share * known:
            return f"{failed} of {known} units failed ({failed / known:.0%}); failures.max_share is {limits.max_share:g}"
        return None
