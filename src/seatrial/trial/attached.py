"""Following the job of a trial from where one is: its log as it grows, and what Slurm says of it.

- Reads files and asks Slurm now and then; whoever follows may come and go, the job does not notice.
- A controller that does not answer is said, and waited for: nothing is concluded from it.
- While nothing else is to be told there is a sign of life at least every `ALIVE_S` seconds.
- A result that appears on disk is taken up at once; with a verdict in the run directory it needs no word from Slurm.
"""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from seatrial.files import read_error, read_text
from seatrial.launch.jobdir import JobDir, job_dir
from seatrial.launch.slurm.status import Poller
from seatrial.model.errors import UserError
from seatrial.model.guarded import open_file
from seatrial.model.job import UnitState, UnitStatus
from seatrial.trial import rundir
from seatrial.trial.remote import CLIENT, JOB, submissions

ASK_S = 5.0
"""Seconds between two questions to Slurm; `SOON_S` at first, and when a result is there."""
SOON_S = 1.0
YOUNG_S = 15.0
TICK_S = 0.25
ALIVE_S = 30.0
NOTHING = (0, 0)
STARTED = re.compile(r"restart (\d+), on (\S+)$", re.MULTILINE)
"""The first line of the job script."""
LOST_ASKED = 2
"""So often a job must be found lost: a controller that just came back may not know it yet."""


@dataclass(frozen=True, slots=True)
class Note:
    """Something to tell: a change of the job, a line of its log, or that it is still being followed."""

    kind: Literal["job", "log", "alive"]
    text: str
    slurm: str = ""
    state: str = ""


class Tail:
    """Whole lines that were added to a file; one that is not there yet is empty."""

    def __init__(self, path: Path) -> None:
        self.path, self.place, self.rest = path, 0, b""

    def lines(self, last: bool = False) -> Iterator[str]:
        """New lines; `last` gives what stands after the last newline too."""
        try:
            with open_file(self.path) as stream:
                stream.seek(self.place)
                data = stream.read()
        except FileNotFoundError:
            return
        except OSError as error:
            raise read_error(self.path, error) from error
        self.place += len(data)
        *whole, self.rest = (self.rest + data).split(b"\n")
        if last and self.rest:
            whole, self.rest = [*whole, self.rest], b""
        yield from (line.decode("utf-8", errors="backslashreplace") for line in whole)


def latest(path: Path) -> Path:
    """The batch directory of the trial's latest job."""
    found = submissions(path)
    if not found:
        fix = f"seatrial resume {shlex.quote(str(path))} --on slurm:PROFILE submits it"
        raise UserError(f"{path}: this trial was never submitted to Slurm", fix)
    return found[-1]


class Following:
    """One pass from now to the end of the job."""

    def __init__(self, path: Path, tell: Callable[[Note], None]) -> None:
        self.path, directory = path, latest(path)
        self.job: JobDir = job_dir(directory, JOB)
        self.poller = Poller([directory])
        self.tail = Tail(self.job.log(CLIENT, 0, None))
        self.tell = tell
        self.said = ""
        self.spoke = self.began = time.monotonic()
        self.has_run = False

    def to_the_end(self) -> UnitStatus:
        """Tell everything until the job has ended; how it did is returned."""
        lost = 0
        while True:
            result = self._signature()
            unit = self._ask()
            self._log()
            lost = lost + 1 if unit.state is UnitState.LOST else 0
            if self._has_verdict() or (unit.verdict is not None and (not lost or lost >= LOST_ASKED)):
                self._log(last=True)
                return unit
            self._wait(unit, result)

    def _has_verdict(self) -> bool:
        """Whether this job has left a result and the trial its verdict: then Slurm has nothing to add."""
        return self._signature() != NOTHING and rundir.load(self.path).status == "done"

    def _ask(self) -> UnitStatus:
        """Ask Slurm once, and tell what changed."""
        snapshot = self.poller.poll()
        unit = snapshot.units[0]
        self.has_run = self.has_run or unit.state is UnitState.RUNNING or self.tail.place > 0
        if unit.verdict is not None:
            self._log(last=True)
        text = self._words(unit, snapshot.controller)
        if text != self.said:
            self.said = text
            self._tell(Note("job", text, unit.slurm, unit.state))
        return unit

    def _words(self, unit: UnitStatus, controller: str) -> str:
        """One line about where the job stands."""
        match unit.state:
            case UnitState.UNKNOWN:
                return f"Slurm does not answer, the job goes on without it: {controller}"
            case UnitState.WAITING:
                return ("requeued" if self.has_run else "waiting") + (f": {unit.reason}" if unit.reason else "")
            case UnitState.RUNNING:
                return f"running{self._place()}" + (f": {unit.reason}" if unit.reason else "")
            case _:
                words = [word for word in (unit.scheduler, unit.reason) if word]
                return f"ended: {unit.state}" + (f" ({', '.join(words)})" if words else "")

    def _place(self) -> str:
        """Where the job script says that it runs; Slurm is not asked for it."""
        log = self.job.path / "logs" / "slurm.log"
        found = STARTED.findall(read_text(log)) if log.is_file() else []
        if not found:
            return ""
        restart, node = found[-1]
        return f" on {node}" + (f", requeued {restart} times" if restart != "0" else "")

    def _wait(self, unit: UnitStatus, before: tuple[int, int]) -> None:
        """Until it is time to ask again, or a result appears; the log is shown meanwhile."""
        soon = self._signature() != NOTHING or time.monotonic() - self.began < YOUNG_S
        stops = time.monotonic() + (SOON_S if soon else ASK_S)
        while time.monotonic() < stops and self._signature() == before:
            time.sleep(TICK_S)
            self._log()
            if time.monotonic() - self.spoke >= ALIVE_S:
                minutes = (time.monotonic() - self.began) / 60
                self._tell(Note("alive", f"{self.said}; followed for {minutes:.1f} min", unit.slurm, unit.state))

    def _signature(self) -> tuple[int, int]:
        """What changes when a result is written."""
        try:
            stat = self.job.result_file(0).stat()
        except OSError:
            return NOTHING
        return (stat.st_ino, stat.st_mtime_ns)

    def _log(self, last: bool = False) -> None:
        for line in self.tail.lines(last):
            self._tell(Note("log", line))

    def _tell(self, note: Note) -> None:
        self.spoke = time.monotonic()
        self.tell(note)
