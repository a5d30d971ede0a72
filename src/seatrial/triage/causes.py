"""The exception chains of a log, process by process, and the one that ended the run.

- A chain is what Python prints for one exception with its causes; Ray's nested remote tracebacks, multiprocessing's quoted ones,
  exception groups and torch's "Original Traceback" belong to the chain that carries them. Interleaved processes are kept apart by their
  prefix.
- A chain was survived when a milestone followed it, or, if it was only logged, when its process went on writing.
- The end of the main process is the end of the run. Without one, the process that died first counts.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise
from typing import NamedTuple

from seatrial.core.specs import Milestone
from seatrial.core.verdict import Verdict
from seatrial.triage import log
from seatrial.triage.log import Line, short

_KEEP = 2000  # chains remembered; a log with more repeats itself, and the last ones matter
_DETAIL = 12  # lines kept of a message
_GAP = 40  # lines after which a connector no longer belongs to the chain above
_FOREIGN = 60  # lines of other writers tolerated inside a traceback
CRASH = "crash"
_FRAMES = 60  # frames kept of one traceback, the innermost ones


class How(Enum):
    """Who dealt with an exception, as far as its form tells."""

    UNCAUGHT = "uncaught"
    LOGGED = "logged"
    """Printed by a handler: counts only if its process did nothing afterwards."""
    NOTED = "noted"
    """Printed for information: never a cause."""
    WARNED = "warned"
    """Printed by a handler as a warning: never a cause, but counted (see `survived`)."""
    BARE = "bare"
    REPORT = "report"
    TEST = "test"
    KILLED = "killed"


@dataclass(slots=True)
class Raised:
    """One exception of a chain."""

    name: str
    message: str
    line: int
    lines: list[tuple[int, str]]
    """The exception's own lines: numbers and texts, the first being `line`."""
    tail: tuple[str, ...] = ()
    frames: tuple[str, ...] = ()

    @property
    def carrier(self) -> bool:
        """Whether it only reports another exception."""
        return log.carries(self.name, self.message)


@dataclass(slots=True)
class Chain:
    """An exception with its causes, first raised first."""

    how: How
    process: str
    start: int
    lead: str
    raised: list[Raised] = field(default_factory=list)
    end: int = 0
    after: int = 0
    """Ordinary lines that its process wrote afterwards."""

    @property
    def first(self) -> Raised:
        """The first cause: the first exception that does not merely carry another. Of carriers alone, Ray's wrapper says least."""
        if self.how is How.KILLED:
            return next((r for r in self.raised if log.short(r.name) in log.INTERRUPTS), self.raised[0])
        said = [r for r in self.raised if log.short(r.name) != log.WRAPPER] or self.raised
        return next((r for r in said if not r.carrier), said[0])

    @property
    def crash(self) -> bool:
        """Whether it is a crash in native code."""
        return self.raised[0].name == CRASH

    @property
    def forced(self) -> bool:
        """Whether it is a kill that nobody sends to a process that is done: the machine ran out of memory."""
        return self.how is How.KILLED and any(log.FORCED.search(text) for raised in self.raised for _, text in raised.lines)

    @property
    def primary(self) -> bool:
        """Whether it names a cause of its own."""
        return not self.first.carrier


class ChainReader:
    """Feed lines in order, then take `finish()`."""

    def __init__(self) -> None:
        self._found: deque[Chain] = deque(maxlen=_KEEP)
        self._processes: dict[str, _Process] = {}

    def feed(self, line: Line) -> None:
        """Take the next line of the log."""
        process = self._processes.get(line.process)
        if process is None:
            process = self._processes[line.process] = _Process(self._found)
        process.feed(line)

    def finish(self) -> list[Chain]:
        """All chains, by the line where they start."""
        for process in self._processes.values():
            process.close()
        for chain in self._found:
            chain.after = self._processes[chain.process].ordinary - chain.after
        return sorted(self._found, key=lambda chain: (chain.start, chain.end))


class _Process:
    """The state of one writing process."""

    def __init__(self, found: deque[Chain]) -> None:
        self._found = found
        self.ordinary = 0
        self._chain: Chain | None = None
        self._framing = False
        self._linked = False
        self._group = False
        self._indent = 0
        self._gap = 0
        self._tail: deque[str] = deque(maxlen=6)
        self._frames: deque[str] = deque(maxlen=_FRAMES)
        self._lead = ""

    def feed(self, line: Line) -> None:
        text, level = line.body, ""
        if text[:1] in "DIWEFC[" and (record := log.RECORD.match(text)):
            text, level = text[record.end() :], record["vllm"] or record["glog"]
        if self._group and (margin := log.GROUP.match(text)):
            if text[: margin.end()].rstrip(" +|") or not text.strip(" +|-"):
                self._linked = True  # the rule between two members of the group
                return
            text = text[margin.end() :]
        if log.HEADER in text:
            self._open(line, text, level)
        elif (chain := self._chain) is None or not (self._frame if self._framing else self._message)(chain, line, text):
            self._outside(line, text)
        if text.strip() and not text.startswith("future: <"):  # asyncio's second line; the first says what it is
            self._lead = line.body

    def close(self) -> None:
        """End the open chain; one that never named an exception is torn and dropped."""
        chain, self._chain = self._chain, None
        self._framing = self._linked = self._group = False
        if chain is None or not chain.raised:
            return
        names = {log.short(r.name) for r in chain.raised}
        if names & log.LAUNCHERS:
            chain.how = How.UNCAUGHT
        if chain.how is How.UNCAUGHT and (names & log.INTERRUPTS or names == {"SystemExit"}):
            chain.how = How.KILLED
        self._found.append(chain)

    def _open(self, line: Line, text: str, level: str) -> None:
        """A traceback begins: a new chain, or the next link of the open one."""
        before, _, _ = text.partition(log.HEADER)
        word = before.strip()
        chain = self._chain
        how = self._how(word, level)
        nested = chain is not None and chain.raised and (chain.raised[-1].carrier and self._gap < 5)
        if chain is None or not (self._linked or self._group or nested or word == "Original"):
            self.close()
            chain = self._chain = Chain(how, line.process, line.number, f"{self._lead}\n{line.body}")
        elif chain.how is How.BARE:
            chain.how = how
        self._group = self._group or word == "+ Exception Group"
        self._indent = 0 if self._group else len(before) - len(before.lstrip(" ")) if not word else 0
        self._expect(frames=True)

    def _how(self, word: str, level: str) -> How:
        """Who handles the traceback that starts here."""
        if word and word not in ("Original", "+ Exception Group") and not log.PROGRESS.search(word):
            found = log.LEVEL.match(word)
            level = level or (found[1] or found[2] if found else "ERROR")
        if level:
            return How.LOGGED if level in log.SEVERE else How.WARNED if level in log.WARNINGS else How.NOTED
        if log.NOTED.search(self._lead):
            return How.NOTED
        found = log.LEVEL.match(self._lead)
        logged = found is not None and (found[1] or found[2]) in log.SEVERE
        return How.LOGGED if logged or log.ASIDE.match(self._lead) else How.UNCAUGHT

    def _frame(self, chain: Chain, line: Line, text: str) -> bool:
        """Inside a traceback: frames until the line that names the exception."""
        if self._indent and not text[: self._indent].strip():
            text = text[self._indent :]
        if not text or text[0] in " \t^":
            self._keep(text)
            return True
        named = log.RAISED.match(text)
        if named and named[1] not in log.NOT_NAMES:
            self._add(chain, line, text, named[1], named[2] or "")
            return True
        self._gap += 1
        if self._gap > _FOREIGN:
            self.close()
        return False

    def _message(self, chain: Chain, line: Line, text: str) -> bool:
        """After an exception's line: the rest of its message, or the link to the next."""
        if text.startswith('  File "') or (self._linked and text.startswith("ray::")):
            self._framing, self._linked, self._gap = True, False, 0
            self._keep(text)
            return True
        if log.CONNECTOR.match(text):
            self._linked = True
            return True
        if self._linked and self._group and (named := log.RAISED.match(text)):
            self._add(chain, line, text, named[1], named[2] or "")
            return True
        if not text.strip() or text == '"""':
            return True
        last = chain.raised[-1]
        if not last.message and self._gap == 0 and last.lines[0][1].rstrip().endswith(":"):  # the message begins on a line of its own
            if text.strip(" -="):
                last.message = text.strip()
                last.lines.append((line.number, text))
                chain.end = line.number
            return True
        if text[0] in " \t" and self._gap == 0 and not log.NATIVE.match(text):
            if len(last.lines) < _DETAIL:
                last.lines.append((line.number, text))
            chain.end = line.number
            return True
        self._gap += 1
        if self._gap > _GAP:
            self.close()
        return False

    def _add(self, chain: Chain, line: Line, text: str, name: str, message: str) -> None:
        tail = tuple(t for t in self._tail if t.strip(" ^~"))
        chain.raised.append(Raised(name, message, line.number, [(line.number, text)], tail, tuple(self._frames)))
        chain.end = line.number
        chain.after = self.ordinary
        self._expect(frames=False)

    def _expect(self, *, frames: bool) -> None:
        """What comes next: the frames of a traceback, or the rest of a message."""
        self._framing, self._linked, self._gap = frames, False, 0
        self._tail.clear()
        self._frames.clear()

    def _keep(self, text: str) -> None:
        """A line inside a traceback."""
        self._tail.append(text)
        if text.lstrip().startswith('File "'):
            self._frames.append(text.strip())

    def _outside(self, line: Line, text: str) -> None:
        """A line outside of any traceback: an event of its own, or ordinary output."""
        event = _event(line, text)
        if event is None:
            self.ordinary += bool(text.strip())
            if text.lstrip().startswith('File "'):
                self._keep(text)  # a progress bar may hide whose traceback it is
            elif text.strip() and text[0] not in " \t":
                self._frames.clear()
            return
        self.close()
        how, name, message = event
        self._chain = Chain(how, line.process, line.number, self._lead)
        self._add(self._chain, line, text, name, message)


def _event(line: Line, text: str) -> tuple[How, str, str] | None:
    """What a single line reports: how it came to be known, the exception's name and its message."""
    if text[:1] in ("", " ", "\t"):
        return None
    if "FAIL" in text and (report := log.REPORT.match(text)):
        inner = log.REPORTED.search(report[1] or report[2])
        return (How.REPORT, inner[1], inner[2]) if inner else (How.REPORT, "FAIL", report[1] or report[2])
    if text[0] == "E" and (test := log.TEST.match(text)):
        return How.TEST, test[1] or "AssertionError", test[2] or test[3] or ""
    shell = ": line " in text
    if (shell or text[0] in "F[*SABt") and log.CRASHED.match(text):
        return How.UNCAUGHT, CRASH, text
    if not line.process and (shell or text[0] in "[*TKHs" or "eceived " in text) and log.KILLED.match(text):
        return How.KILLED, "killed", text
    if ("rror" in text or "xception" in text or "fatal: " in text or "ERROR: " in text or "Traceback" in text) and (
        bare := log.BARE.match(text)
    ):
        return (How.BARE, bare[1], bare[2] or "") if bare[1] else (How.BARE, bare[3], bare[4])
    return None


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


class MilestoneProgress:
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


def find_cause(chains: Sequence[Chain], progress: MilestoneProgress) -> Cause | None:
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


def survived(chain: Chain, progress: MilestoneProgress) -> bool:
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


def _ending(chains: Sequence[Chain], progress: MilestoneProgress) -> Chain | None:
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


def _before_kill(kill: Chain, chains: Sequence[Chain], progress: MilestoneProgress) -> Chain | None:
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


def _behind(report: Chain, chains: Sequence[Chain], progress: MilestoneProgress) -> Chain:
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
