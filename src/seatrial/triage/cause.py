"""Which of a log's chains ended the run, and the first cause in it.

- A chain was survived when a milestone followed it, or (if it was only logged) when its process went on writing.
- The end of the main process is the end of the run: its last chain counts. Without one, of the processes that died,
  the one that died first. A chain that only reports the death of another process points back to that one's chain.
- A kill from outside that comes before the chain explains it; one that comes after it ended a run that had failed already.
- A traceback outranks the native crash that follows it: a process that dies of an exception often crashes while it ends.
- The same exception may be printed by a worker and again by the driver: the first print is the cause.
- Nothing here knows a verdict: that is `diagnose`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from seatrial.model.knowledge import Milestone
from seatrial.model.verdict import Verdict
from seatrial.triage.chain import Chain, How, Raised
from seatrial.triage.shapes import short

_WENT_ON = 10  # lines a dying process may still write: hints, shutdown messages, the exit code
_BACK = 200  # lines a consequence may come after its cause when other processes reached a milestone meanwhile
_LATE = 2
"""Steps of a worker that are not forwarded so late that the main process had ended before."""
_MENTIONED = (How.NOTED, How.WARNED)


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

    def __init__(self, reached: Sequence[Reached], milestones: Sequence[Milestone] = ()) -> None:
        verdicts = {milestone.id: milestone.verdict for milestone in milestones}
        self._reached = reached
        self._lines = [hit.line for hit in reached]
        self._last_main = max((hit.line for hit in reached if not hit.process), default=0)
        counts = Counter(hit.id for hit in reached)
        order = [milestone.id for milestone in milestones]
        self._rounds = max(counts.values(), default=0)
        often = next((name for name, count in counts.items() if count == self._rounds), "")
        self._rounded = [hit.line for hit in reached if hit.id == often] if self._rounds > _LATE else []
        self._built = next((hit.line for hit in reached if verdicts.get(hit.id) is Verdict.FAIL), None)
        # The milestone that comes again and again is a step; the one before it in the loop's order says that training began.
        again = next((index for index, name in enumerate(order) if counts and counts[name] == self._rounds), 0)
        begun = set(order[max(0, again - 1) : again + 1])
        self._begun = next((hit.line for hit in reached if hit.id in begun), None)

    def before(self, line: int, *, inclusive: bool = False) -> Reached | None:
        """The last milestone above `line`, or at it."""
        index = (bisect_right if inclusive else bisect_left)(self._lines, line)
        return self._reached[index - 1] if index else None

    def first(self, hit: Reached) -> bool:
        """Whether this milestone was reached for the first time there."""
        return next((other.line for other in self._reached if other.id == hit.id), hit.line) == hit.line

    def last(self) -> Reached | None:
        """The last milestone of all."""
        return self._reached[-1] if self._reached else None

    def after(self, line: int, *, main: bool) -> bool:
        """Whether a milestone came below `line`; with `main`, one that the main process wrote, or more steps than are forwarded late."""
        last = self._last_main if main else self._lines[-1] if self._lines else 0
        return last > line or (main and sum(at > line for at in self._rounded) >= _LATE)

    def rounds(self) -> int:
        """How often the milestone was matched that came most often: the steps, where a loop prints each."""
        return self._rounds

    def building(self, line: int) -> bool:
        """Whether the model was being built, or was there, above `line`."""
        return self._built is not None and self._built < line

    def training(self, line: int) -> bool:
        """Whether training had begun above `line`."""
        return self._begun is not None and self._begun < line


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
        if other.start >= chain.start or other.how in (*_MENTIONED, How.KILLED):
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
    if chain.how in _MENTIONED:
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
        return _before_kill(kill, chains, progress) or kill
    if found is not None:
        return found
    reported = next((chain for chain in live if chain.how in (How.REPORT, How.TEST)), None)
    return reported or _first_death([chain for chain in live if chain.how in (How.LOGGED, How.BARE) and chain.primary])


def _first_death(chains: Sequence[Chain]) -> Chain | None:
    """The last chain of the main process, else the earliest of the other processes' last chains."""
    raised = [chain for chain in chains if not chain.crash]
    last = {chain.process: chain for chain in chains}
    # A crash after an exception is the end of a process that was ending already; one before it needs no other reason.
    last |= {chain.process: chain for chain in raised if last[chain.process].crash}
    main = last.get("")
    if main is not None and main.crash:
        return min((chain for chain in raised if chain.start < main.start), key=lambda chain: chain.start, default=main)
    return main or min(last.values(), key=lambda chain: chain.start, default=None)


def _before_kill(kill: Chain, chains: Sequence[Chain], progress: Progress) -> Chain | None:
    """The first exception that the run did not get over before it was killed. What a process logged, and then wrote on for
    long, does not explain that the machine killed it; it explains that it hung."""
    last = progress.before(kill.start)
    handled = (How.UNCAUGHT,) if kill.forced else (How.UNCAUGHT, How.LOGGED)
    raised = [c for c in chains if c.end < kill.start and c.how in handled and c.primary and not c.crash]
    live = [chain for chain in raised if chain.end > _line(last)]
    if not live and last is not None and not kill.forced and progress.first(last):
        # Another process may draw its first bar while a worker raises: one milestone that was never there before shows no more.
        live = [chain for chain in raised if chain.process and chain.end > _line(progress.before(last.line))]
    return live[0] if live else None


def _behind(report: Chain, chains: Sequence[Chain], progress: Progress) -> Chain:
    """The chain that a report of another process's death points back to; the report itself when nothing is there."""
    since = min(_line(progress.before(report.start)), report.start - _BACK)
    earlier = [c for c in chains if since < c.end < report.start and c.primary and c.how not in (*_MENTIONED, How.KILLED)]
    return earlier[-1] if earlier else report


def _line(reached: Reached | None) -> int:
    return reached.line if reached else 0


def _same(one: Raised, other: Raised) -> bool:
    """Whether two prints show the same exception; runners shorten the message."""
    if short(one.name) != short(other.name) or not one.message:
        return False
    return one.message[:60].rstrip() == other.message[:60].rstrip()
