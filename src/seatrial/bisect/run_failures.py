"""How a run failed, by its log: the commit's own failure, or the machine's.

- The machine's are the known failures that say so (`machine` of a signature): they may come and go while the files under test stay the
  same, so they say nothing about a commit, and another try may help. Every other failure is the commit's own: a machine that always
  fails like that fails at the good end, too.
- Two failures are the same when their tests, their exceptions and the places of these agree, numbers and directories taken out. When in
  doubt they differ: that costs a skip, and the other mistake blames the wrong commit.
- A failure of the machine that a run survived is kept (`Failure.beside`): what failed later may follow from it.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from seatrial import loops
from seatrial.bisect.bisect_records import Failure
from seatrial.core.files import write_bytes
from seatrial.core.records import Diagnosis, replace
from seatrial.core.specs import Signature
from seatrial.core.text import failure_identity, one_line
from seatrial.core.verdict import Boundary
from seatrial.triage import log as shapes
from seatrial.triage.causes import Chain, ChainReader, How
from seatrial.triage.diagnose import diagnose
from seatrial.triage.log import Line, read_log
from seatrial.triage.signatures import GENERAL, Hit, Scan, first_match, load_signatures

_SUMMARY = re.compile(r"(?:FAILED|ERROR) (\S+?\.py(?:::.+?)?)(?: - (\S+).*)?$|(?:FAIL|ERROR): (\w+ \([\w.]+\))")
"""A test that failed: in pytest's summary, with the first word of why, and as unittest says it."""
_SECTION = re.compile(r"_{3,} (\S.*?) _{3,}$")
"""pytest's head over one failure. It says, too, whether the test ran, was set up, or could not be collected."""
_TOTALS = re.compile(r"(?:=+ )?(\d+ (?:passed|failed|skipped|xfailed|xpassed|deselected|errors?|warnings?)\b.*) in [\d.]+ ?s")
_FRAME = re.compile(r'\s*File "([^"]+)", line \d+, in (.+)')
_SAYS_SO = re.compile(
    r"error|fail|mismatch|wrong|cannot|can't|invalid|abort|unexpected|differ|refus|missing|not |\bno such|denied|unable", re.IGNORECASE
)
_NOTE = "[seatrial] "
"""Before lines that the launcher wrote into the log."""
_REASON, _LONGEST = 160, 400
LONGEST = 4 << 20
"""Bytes of a log that are read, counted from its end."""


@dataclass(frozen=True, slots=True)
class FailureReading:
    """What a log says about the failure of its run."""

    failure: Failure
    machine: str = ""
    """Id of the machine's failure that ended the run, or one of its tests."""
    nothing_ran: str = ""
    """pytest's last line, when it ran no test at all."""


def read_failure(log: Path, exit_code: int | None, *, hung: bool = False) -> FailureReading:
    """Read the log of a run. `hung`: it was ended because it took too long."""
    kind: Literal["timeout", "exit"] = "timeout" if hung else "exit"
    if not log.is_file():
        return FailureReading(Failure(kind=kind, exit_code=exit_code))
    log, known = _ending(log), _signatures()
    found = diagnose(log, (), tuple(s for s in known if not s.silent or (hung and s.machine)))
    seen = _see(log, known)
    if hung and (shapes.KILLED.match(found.cause) or shapes.short(found.cause.partition(":")[0]) in shapes.INTERRUPTS):
        found = Diagnosis()  # it was we who ended it
    if seen.raised and found.line is not None and found.line not in seen.lines and found.line < max(seen.lines):
        # A traceback that a test printed on its way; the runner went on, and its own lines say what failed.
        found = Diagnosis(boundary=Boundary.PROVIDER, cause=min(seen.raised), line=min(seen.lines))
    own = found.line in seen.lines
    parts = [*sorted(seen.tests), *sorted(seen.raised)] if seen.testing else []
    if not own:
        # The function that raised it: a bare `AssertionError` may come from anywhere. Line numbers move with every commit.
        frames = [frame for text in found.excerpt if (frame := _FRAME.match(text))]
        place = f" in {Path(frames[-1][1]).name}:{frames[-1][2]}" if frames else ""
        parts += [_alike(found.cause) + place] if found.cause else [] if hung or parts else seen.last_words()
    cause = "; ".join(parts)
    if len(cause) > _LONGEST:  # its beginning, and a hash of all of it
        cause = f"{cause[: _LONGEST - 20]}… {hashlib.sha256(cause.encode()).hexdigest()[:12]}"
    failure = Failure(
        kind=kind,
        boundary=found.boundary,
        signature=found.signature,
        cause=cause,
        exit_code=exit_code,
        shown=(one_line(found.cause) or one_line(seen.last))[:_LONGEST],
        beside=seen.beside(None if seen.testing else found.line),
    )
    ended_by = [found.signature or "", *(seen.machine if own else ())]
    return FailureReading(failure, next((name for name in ended_by if name in machine_failures()), ""), seen.nothing_ran())


def _ending(log: Path) -> Path:
    """The log; of a very long one its last part, as a file beside it. What ended a run stands there, and all of it would take minutes."""
    if log.stat().st_size <= LONGEST:
        return log
    end = log.with_name(f"{log.stem}.end{log.suffix}")
    with log.open("rb") as stream:
        stream.seek(-LONGEST, os.SEEK_END)
        stream.readline()  # the rest of a line
        write_bytes(end, stream.read())
    return end


@functools.cache
def _signatures() -> tuple[Signature, ...]:
    """The known failures of all loops: nobody says which one a command runs. Those by frames are left out, since what a commit does
    wrong is raised there, too."""
    found = [*map(load_signatures, loops.signature_files()), *(loop.signatures() for loop in loops.installed())]
    return tuple(signature for signatures in found for signature in signatures if not signature.frame)


@functools.cache
def _general() -> tuple[Signature, ...]:
    return load_signatures(GENERAL)


@functools.cache
def machine_failures() -> dict[str, str]:
    """Known failures of the machine: id, and why they say nothing about a commit."""
    return {s.id: s.machine for s in (*_signatures(), *_general()) if s.machine}


@dataclass(slots=True)
class _Seen:
    scan: Scan
    machines: Sequence[Signature]
    tests: set[str] = field(default_factory=set)
    raised: set[str] = field(default_factory=set)
    machine: list[str] = field(default_factory=list)
    """Machine failures among the tests' own."""
    lines: set[int] = field(default_factory=set)
    """Lines that only say what `tests` and `raised` say."""
    totals: list[str] = field(default_factory=list)
    last: str = ""

    @property
    def testing(self) -> bool:
        return bool(self.lines and (self.tests or self.raised))

    def feed(self, line: Line) -> None:
        self.scan.feed(line)
        text = line.body.strip()
        if text and not text.startswith(_NOTE):
            self.last = text
        if (name := _SUMMARY.match(text)) is not None:
            self.tests.add(name[3] or " - ".join(filter(None, (name[1], name[2]))))
            self.lines.add(line.number)
        elif text.startswith("___") and (head := _SECTION.match(text)) is not None:
            self.tests.add(f"<{head[1]}>")
        elif (total := _TOTALS.match(text)) is not None:
            self.totals.append(total[1])
            self.lines.add(line.number)

    def last_words(self) -> list[str]:
        """The last line, if it says that something is wrong: all that is known of a run that raised nothing."""
        return [_alike(self.last)] if _SAYS_SO.search(self.last) else []

    def beside(self, before: int | None) -> tuple[str, ...]:
        """Machine failures that were met, above the line of the cause; what stands below follows from it."""
        hits = ((s.id, self.scan.hits.get(s.pattern)) for s in self.machines if self.scan.counts(s))
        return tuple(sorted({name for name, hit in hits if hit is not None and (before is None or hit.line < before)}))

    def nothing_ran(self) -> str:
        """A summary of tests of which none passed or failed: what is skipped, or expected to fail, proves nothing."""
        ran = any(re.search(r"\b(passed|failed|xpassed|errors?)\b", total) for total in self.totals)
        return self.totals[-1] if self.totals and not ran else ""


def _see(log: Path, known: Sequence[Signature]) -> _Seen:
    everything = (*known, *_general())
    machines = [replace(s, silent=True) for s in everything if s.machine]  # silent: wherever it stands
    seen, reader = _Seen(Scan((), machines), machines), ChainReader()
    for line in read_log(log):
        seen.feed(line)
        reader.feed(line)
    seen.scan.finish()
    for chain in reader.finish():
        if chain.how is How.TEST:
            seen.raised.add(_alike(f"{chain.first.name}: {chain.first.message}"))
            seen.lines.add(chain.first.line)
            seen.machine += _machine_of(chain, everything)
    return seen


def _machine_of(chain: Chain, known: Iterable[Signature]) -> list[str]:
    """The known failure of one test, if it is the machine's."""
    hits = [Hit(chain.first.line, f"{chain.first.name}: {chain.first.message}"), *(Hit(*line) for line in chain.first.lines)]
    match = next((s for s in known if not (s.silent or s.harmless or s.also or s.unless) and first_match(s, hits)), None)
    return [match.id] if match is not None and match.machine else []


def _alike(text: str) -> str:
    return failure_identity(one_line(text))[:_REASON]
