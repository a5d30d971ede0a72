"""Read the exception chains of a log, process by process.

- A chain is what Python prints for one exception with its causes; Ray's nested remote tracebacks, multiprocessing's
  quoted ones, exception groups and torch's "Original Traceback" are part of the chain that carries them.
- Interleaved processes are kept apart by their prefix.
- Kills, crashes, bare error lines, pytest's `E` lines and a runner's FAIL lines are chains of one element.
- `How` says what the form of the log tells about who handled it; whether it ended the run is decided in `cause`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

from seatrial.triage import shapes
from seatrial.triage.log import Line

_KEEP = 2000  # chains remembered; a log with more repeats itself, and the last ones matter
_DETAIL = 12  # lines kept of a message
_GAP = 40  # lines after which a connector no longer belongs to the chain above
_FOREIGN = 60  # lines of other writers tolerated inside a traceback
CRASH = "crash"
"""The name of what a crash raised."""
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
    """The last frames before it."""
    frames: tuple[str, ...] = ()
    """The `File "…", line n, in …` lines of its traceback."""

    @property
    def carrier(self) -> bool:
        """Whether it only reports another exception."""
        return shapes.carries(self.name, self.message)


@dataclass(slots=True)
class Chain:
    """An exception with its causes, first raised first."""

    how: How
    process: str
    start: int
    lead: str
    """The line that introduces it."""
    raised: list[Raised] = field(default_factory=list)
    end: int = 0
    after: int = 0
    """Ordinary lines that its process wrote afterwards."""

    @property
    def first(self) -> Raised:
        """The first cause: the first exception that does not merely carry another. Of carriers alone, Ray's wrapper says least."""
        if self.how is How.KILLED:
            return next((r for r in self.raised if shapes.short(r.name) in shapes.INTERRUPTS), self.raised[0])
        said = [r for r in self.raised if shapes.short(r.name) != shapes.WRAPPER] or self.raised
        return next((r for r in said if not r.carrier), said[0])

    @property
    def crash(self) -> bool:
        """Whether it is a crash in native code."""
        return self.raised[0].name == CRASH

    @property
    def forced(self) -> bool:
        """Whether it is a kill that nobody sends to a process that is done: the machine ran out of memory."""
        return self.how is How.KILLED and any(shapes.FORCED.search(text) for raised in self.raised for _, text in raised.lines)

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


def read_chains(lines: Iterable[Line]) -> list[Chain]:
    """The chains of a whole log."""
    reader = ChainReader()
    for line in lines:
        reader.feed(line)
    return reader.finish()


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
        if text[:1] in "DIWEFC[" and (record := shapes.RECORD.match(text)):
            text, level = text[record.end() :], record["vllm"] or record["glog"]
        if self._group and (margin := shapes.GROUP.match(text)):
            if text[: margin.end()].rstrip(" +|") or not text.strip(" +|-"):
                self._linked = True  # the rule between two members of the group
                return
            text = text[margin.end() :]
        if shapes.HEADER in text:
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
        names = {shapes.short(r.name) for r in chain.raised}
        if names & shapes.LAUNCHERS:
            chain.how = How.UNCAUGHT
        if chain.how is How.UNCAUGHT and (names & shapes.INTERRUPTS or names == {"SystemExit"}):
            chain.how = How.KILLED
        self._found.append(chain)

    def _open(self, line: Line, text: str, level: str) -> None:
        """A traceback begins: a new chain, or the next link of the open one."""
        before, _, _ = text.partition(shapes.HEADER)
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
        self._framing, self._linked, self._gap = True, False, 0
        self._tail.clear()
        self._frames.clear()

    def _how(self, word: str, level: str) -> How:
        """Who handles the traceback that starts here."""
        if word and word not in ("Original", "+ Exception Group") and not shapes.PROGRESS.search(word):
            found = shapes.LEVEL.match(word)
            level = level or (found[1] or found[2] if found else "ERROR")
        if level:
            return How.LOGGED if level in shapes.SEVERE else How.WARNED if level in shapes.WARNINGS else How.NOTED
        if shapes.NOTED.search(self._lead):
            return How.NOTED
        found = shapes.LEVEL.match(self._lead)
        logged = found is not None and (found[1] or found[2]) in shapes.SEVERE
        return How.LOGGED if logged or shapes.ASIDE.match(self._lead) else How.UNCAUGHT

    def _frame(self, chain: Chain, line: Line, text: str) -> bool:
        """Inside a traceback: frames until the line that names the exception."""
        if self._indent and not text[: self._indent].strip():
            text = text[self._indent :]
        if not text or text[0] in " \t^":
            self._keep(text)
            return True
        named = shapes.RAISED.match(text)
        if named and named[1] not in shapes.NOT_NAMES:
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
        if shapes.CONNECTOR.match(text):
            self._linked = True
            return True
        if self._linked and self._group and (named := shapes.RAISED.match(text)):
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
        if text[0] in " \t" and self._gap == 0 and not shapes.NATIVE.match(text):
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
        raised = Raised(name, message, line.number, [(line.number, text)], tail, tuple(self._frames))
        chain.raised.append(raised)
        chain.end = line.number
        chain.after = self.ordinary
        self._framing, self._linked, self._gap = False, False, 0
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
    if "FAIL" in text and (report := shapes.REPORT.match(text)):
        inner = shapes.REPORTED.search(report[1] or report[2])
        return (How.REPORT, inner[1], inner[2]) if inner else (How.REPORT, "FAIL", report[1] or report[2])
    if text[0] == "E" and (test := shapes.TEST.match(text)):
        return How.TEST, test[1] or "AssertionError", test[2] or test[3] or ""
    shell = ": line " in text
    if (shell or text[0] in "F[*SABt") and shapes.CRASHED.match(text):
        return How.UNCAUGHT, CRASH, text
    if not line.process and (shell or text[0] in "[*TKHs" or "eceived " in text) and shapes.KILLED.match(text):
        return How.KILLED, "killed", text
    if ("rror" in text or "xception" in text or "fatal: " in text or "ERROR: " in text or "Traceback" in text) and (
        bare := shapes.BARE.match(text)
    ):
        return (How.BARE, bare[1], bare[2] or "") if bare[1] else (How.BARE, bare[3], bare[4])
    return None
