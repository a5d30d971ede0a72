"""What `seatrial jobs` shows: counts by state, one line per job or unit, progress while it waits, and the exit code."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from seatrial.launch.slurm.status import Snapshot
    from seatrial.model.job import UnitStatus

_SPEAK_S = 30.0
_SHOWN = 5


def close(units: Sequence[UnitStatus]) -> None:
    """Name what is not done, and end with the exit code."""
    from seatrial.model.job import UnitState
    from seatrial.model.verdict import ExitCode

    left = [unit for unit in units if unit.state is not UnitState.DONE]
    for unit in left[:_SHOWN]:
        typer.echo(unit_line(unit), err=True)
    if len(left) > _SHOWN:
        typer.echo(f"and {len(left) - _SHOWN} more; `seatrial jobs list --units` names them", err=True)
    if not left:
        raise typer.Exit(ExitCode.PASS)
    raise typer.Exit(ExitCode.FAIL if any(unit.state is UnitState.FAILED for unit in left) else ExitCode.BLOCKED)


def _counts(units: Sequence[UnitStatus]) -> str:
    """`12 done, 3 running`, in the order of the states."""
    from seatrial.model.job import UnitState

    counts = ((state, sum(unit.state is state for unit in units)) for state in UnitState)
    return ", ".join(f"{count} {state}" for state, count in counts if count)


def _why_waiting(units: Sequence[UnitStatus]) -> str:
    """What units wait for, as Slurm says it."""
    from seatrial.model.job import UnitState

    reasons = dict.fromkeys(unit.reason for unit in units if unit.state is UnitState.WAITING and unit.reason)
    return f" (waiting for: {', '.join(list(reasons)[:_SHOWN])})" if reasons else ""


def job_lines(units: Sequence[UnitStatus]) -> Iterable[str]:
    """Name, Slurm id and counts of each job, and the first reason that somebody should read."""
    from seatrial.model.job import UnitState

    fine = (UnitState.DONE, UnitState.RUNNING)
    for name in dict.fromkeys(unit.job for unit in units):
        own = [unit for unit in units if unit.job == name]
        slurm = next((unit.slurm.partition("_")[0] for unit in own if unit.slurm), "-")
        reason = next((unit.reason for unit in own if unit.reason and unit.state not in fine), "")
        yield "\t".join((name, slurm, _counts(own), reason)).rstrip()


def unit_line(unit: UnitStatus) -> str:
    """Job, index, Slurm's id, our state, Slurm's word, reason."""
    return "\t".join((unit.job, str(unit.index), unit.slurm or "-", unit.state, unit.scheduler or "-", unit.reason)).rstrip()


def silence(why: str, since: str = "") -> str:
    """Why nothing can be said; `since` a time."""
    return f"Slurm does not answer{since} ({why}); jobs are not lost"


class Progress:
    """A line whenever something changed, and at least every 30 seconds."""

    def __init__(self) -> None:
        self._last, self._spoke, self._silent_since = "", float("-inf"), ""

    def show(self, snapshot: Snapshot) -> None:
        """Print what there is to say."""
        text = _counts(snapshot.units) + _why_waiting(snapshot.units)
        if snapshot.controller:
            self._silent_since = self._silent_since or time.strftime("%H:%M:%S")
            text = silence(snapshot.controller, f" since {self._silent_since}")
        else:
            self._silent_since = ""
        if text != self._last or time.monotonic() - self._spoke >= _SPEAK_S:
            typer.echo(f"seatrial: {text}", err=True)
            self._last, self._spoke = text, time.monotonic()


class Ended:
    """Whether a unit has ended; Slurm is asked now and then."""

    def __init__(self, directory: Path, job: str, index: int) -> None:
        from seatrial.launch.slurm.status import FIRST_WAIT_S, Poller

        self._job, self._index = job, index
        self._poller, self._asked, self._pause = Poller([directory]), float("-inf"), FIRST_WAIT_S

    def __call__(self) -> bool:
        """Ask, but not more often than is polite."""
        from seatrial.launch.slurm.status import LIVE, LONGEST_WAIT_S

        if time.monotonic() - self._asked < self._pause:
            return False
        self._asked, self._pause = time.monotonic(), min(self._pause * 1.2, LONGEST_WAIT_S)
        units = self._poller.poll().units
        return next(unit.state not in LIVE for unit in units if (unit.job, unit.index) == (self._job, self._index))
