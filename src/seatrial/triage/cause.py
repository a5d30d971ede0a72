"""Which of a log's chains ended the run, and the first cause in it.

- A chain was survived when a milestone followed it, or (if it was only logged) when its process went on writing.
- The end of the main process is the end of the run: its last chain counts. Without one, of the processes that died,
  the one that died first. A chain that only reports the death of another process points back to that one's chain.
- A kill from outside that comes before the chain explains it.
- The same exception may be printed by a worker and again by the driver: the first print is the cause.
- Nothing here knows a verdict: that is `diagnose`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from seatrial.model.knowledge import Milestone
from seatrial.triage.chain import Chain, How, Raised
from seatrial.triage.shapes import short

_WENT_ON = 10  # lines a dying process may still write: hints, shutdown messages, the exit code
_BACK = 200  # lines a consequence may come after its cause when other processes reached a milestone meanwhile


class Reached(NamedTuple):
    """A milestone that was matched."""

    line: int
    process: str
    id: str


def in_order(reached: Sequence[Reached], milestones: Sequence[Milestone]) -> list[Reached]:
    """The milestones in the order of the lines, without late ones that directly follow the milestone after them."""
    after = {milestone.id: follower.id for milestone, follower in pairwise(milestones) if milestone.late}
    kept: list[Reached] = []
    for hit in reached:
        if not (kept and after.get(hit.id) == kept[-1].id):
            kept.append(hit)
    return kept


class Progress:
    """The milestones of a log, in the order of its lines."""

    def __init__(self, reached: Sequence[Reached]) -> None:
        self._reached = reached
        self._lines = [hit.line for hit in reached]
        self._last_main = max((hit.line for hit in reached if not hit.process), default=0)

    def before(self, line: int, *, inclusive: bool = False) -> Reached | None:
        """The last milestone above `line`, or at it."""
        index = (bisect_right if inclusive else bisect_left)(self._lines, line)
        return self._reached[index - 1] if index else None

    def last(self) -> Reached | None:
        """The last milestone of all."""
        return self._reached[-1] if self._reached else None

    def after(self, line: int, *, main: bool) -> bool:
        """Whether a milestone came below `line`; with `main`, one that the main process wrote."""
        last = self._last_main if main else self._lines[-1] if self._lines else 0
        return last > line


class Cause(NamedTuple):
    """The chain that ended the run and the exception in it that was raised first."""

    chain: Chain
    raised: Raised


def find_cause(chains: Sequence[Chain], progress: Progress) -> Cause | None:
    """The first cause, or None when the log shows no failure."""
    chain = _ending(chains, progress)
    if chain is None:
        return None
    since = _line(progress.before(chain.start))
    for other in chains:
        if other.start >= chain.start or other.how in (How.NOTED, How.KILLED):
            continue
        for raised in other.raised:
            if raised.line > since and _same(raised, chain.first):
                return Cause(other, raised)
    return Cause(chain, chain.first)


def independent(chains: Sequence[Chain]) -> list[Cause]:
    """The failures of a test runner: one does not cause the next, so each needs its own explanation."""
    return [Cause(chain, chain.first) for chain in chains if chain.how is How.TEST]


def survived(chain: Chain, progress: Progress) -> bool:
    """Whether the run went on after this chain."""
    if chain.how in (How.REPORT, How.TEST):
        return False  # a runner's own verdict stands, however many stages follow
    if chain.how is How.NOTED:
        return True
    # A worker's line can be forwarded late, so the main process's end is only disproved by the main process.
    own = chain.how is How.UNCAUGHT and not chain.process
    if progress.after(chain.end, main=own):
        return True
    return chain.how in (How.LOGGED, How.BARE) and chain.after > _WENT_ON


def _ending(chains: Sequence[Chain], progress: Progress) -> Chain | None:
    live = [chain for chain in chains if not survived(chain, progress)]
    died = [chain for chain in live if chain.how is How.UNCAUGHT]
    kill = next((chain for chain in live if chain.how is How.KILLED), None)
    found = _first_death([chain for chain in died if chain.primary])
    if found is None and died:
        found = _behind(died[0], chains, progress)
    if kill is not None and (found is None or kill.start < found.start):
        return kill
    if found is not None:
        return found
    reported = next((chain for chain in live if chain.how in (How.REPORT, How.TEST)), None)
    return reported or _first_death([chain for chain in live if chain.how in (How.LOGGED, How.BARE) and chain.primary])


def _first_death(chains: Sequence[Chain]) -> Chain | None:
    """The last chain of the main process, else the earliest of the other processes' last chains."""
    last = {chain.process: chain for chain in chains}
    return last.get("") or min(last.values(), key=lambda chain: chain.start, default=None)


def _behind(report: Chain, chains: Sequence[Chain], progress: Progress) -> Chain:
    """The chain that a report of another process's death points back to; the report itself when nothing is there."""
    since = min(_line(progress.before(report.start)), report.start - _BACK)
    earlier = [c for c in chains if since < c.end < report.start and c.primary and c.how not in (How.NOTED, How.KILLED)]
    return earlier[-1] if earlier else report


def _line(reached: Reached | None) -> int:
    return reached.line if reached else 0


def _same(one: Raised, other: Raised) -> bool:
    """Whether two prints show the same exception; runners shorten the message."""
    if short(one.name) != short(other.name) or not one.message:
        return False
    return one.message[:60].rstrip() == other.message[:60].rstrip()
