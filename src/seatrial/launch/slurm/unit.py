"""Where one unit stands, from its result and from what Slurm says of it. Pure.

- A result that says `done` wins over everything. No other result counts while Slurm says that the unit lives, nor one
  that an earlier submission left.
- Ended in Slurm without a result is never success, whatever word Slurm has for it.
- LOST needs answers: where the controller or the accounting did not answer, the state is UNKNOWN.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from seatrial.launch.slurm.commands import Row
from seatrial.model.errors import UserError
from seatrial.model.job import Ending, Result, UnitState, UnitStatus
from seatrial.model.verdict import ExitCode

SUBMITTED_GRACE_S = 30
"""So long after a submission an id that nobody knows is not yet lost."""
RESULT_GRACE_S = 30
"""So long a result may take to show after its script has ended: shared file systems are late."""

_WAITING = {"PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD"}
ENDED = {
    "COMPLETED": "Slurm says COMPLETED, but the job ended without leaving a result",
    "FAILED": "the job script failed without leaving a result",
    "TIMEOUT": "ended by Slurm at its time limit",
    "NODE_FAIL": "a node failed",
    "CANCELLED": "cancelled",
    "PREEMPTED": "preempted by another job, and not requeued",
    "OUT_OF_MEMORY": "used more memory than it had",
    "BOOT_FAIL": "a node did not boot",
    "DEADLINE": "could not end before its deadline",
    "REVOKED": "revoked by another cluster of the federation",
}
"""Slurm's words for units that have ended, and what they mean where there is no result."""
_BY_ITSELF = ("COMPLETED", "FAILED")
"""The script ended by itself, so a result is to be expected."""
_NEVER = "DependencyNeverSatisfied"
_NOTHING = ("None", "", "NonZeroExitCode")


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of a unit, before it is judged."""

    job: str
    index: int
    slurm: str = ""
    """Id of the whole Slurm job; empty while it is not known."""
    rows: Sequence[Row] = ()
    """What Slurm says: several for the parts of a heterogeneous job, none when it does not know the unit."""
    result: Result | UserError | None = None
    """The error is that of a torn file."""
    handed: bool = False
    """Whether it was handed to Slurm; if not, it ran on this machine, or never."""
    since: float = 0.0
    """When it was handed over, or else when its batch was made."""
    silent: str = ""
    """Why the controller or the accounting did not answer; empty when they did."""
    note: str = ""
    """What is known about an id that is not ours any more."""
    array: bool = False


def is_done(known: Known) -> bool:
    """Whether the result says so, of this unit, without contradicting itself."""
    result = known.result
    return isinstance(result, Result) and result.ending is Ending.DONE and not _contradiction(known, result)


def is_current(known: Known) -> bool:
    """Whether there is a result, or a torn one, that the present submission left."""
    result = known.result
    if not isinstance(result, Result) or not known.handed:
        return result is not None
    if known.slurm:
        return result.slurm.partition("_")[0] == known.slurm
    return result.started >= known.since


def judge(known: Known, now: float) -> UnitStatus:
    """The state of a unit."""
    if is_done(known):
        return _status(known, UnitState.DONE, known.rows[0].state if known.rows else "", "")
    row = _decisive(known.rows)
    if row is not None and row.state in _WAITING:
        never = f"{row.reason}: a job that it comes after did not end well; cancel it, then resubmit"
        return _status(known, UnitState.WAITING, row.state, never if row.reason == _NEVER else _reason(row))
    if row is not None and row.state not in ENDED:
        return _status(known, UnitState.RUNNING, row.state, _reason(row))
    if known.silent and row is None:
        return _status(known, UnitState.UNKNOWN, "", known.silent)
    if is_current(known):
        return _by_result(known, row.state if row else "")
    if row is not None:
        return _without_result(known, row, now)
    if now - known.since < SUBMITTED_GRACE_S:
        return _status(known, UnitState.WAITING, "", "just submitted" if known.handed else "not submitted yet")
    return _status(known, UnitState.LOST, "", known.note or "neither Slurm nor a result knows it")


def _decisive(rows: Sequence[Row]) -> Row | None:
    """Of the parts of a job, one that lives, else one that did not end well, else any."""
    live = [row for row in rows if row.state not in ENDED]
    bad = [row for row in rows if row.state != "COMPLETED"]
    return next(iter([*live, *bad, *rows]), None)


def _without_result(known: Known, row: Row, now: float) -> UnitStatus:
    if row.state in _BY_ITSELF and row.ended is not None and now - row.ended < RESULT_GRACE_S:
        return _status(known, UnitState.RUNNING, row.state, "ended; its result does not show yet")
    text = ENDED[row.state]
    if row.reason == _NEVER:
        text = f"a job that it comes after did not end well ({_NEVER})"
    elif row.reason not in _NOTHING and row.reason.lower() != row.state.lower():
        text += f" ({row.reason})"
    return _status(known, UnitState.BLOCKED, row.state, text)


def _by_result(known: Known, scheduler: str) -> UnitStatus:
    result = known.result
    if not isinstance(result, Result):
        return _status(known, UnitState.BLOCKED, scheduler, result.message if result else "")
    wrong = _contradiction(known, result)
    if wrong:
        return _status(known, UnitState.BLOCKED, scheduler, f"its result is not believed: {wrong}")
    code = "" if result.exit_code is None else f", exit code {result.exit_code}"
    who = f" ({result.component}{code})" if result.component else ""
    reason = f"{result.ending}{who}" + (f": {result.message}" if result.message else "")
    # A client that speaks our exit codes says so itself when something beside it was to blame; one that has none never ran, or was ended.
    failed = result.ending is Ending.CLIENT_FAILED and result.exit_code not in (None, ExitCode.BLOCKED)
    state = UnitState.FAILED if failed else UnitState.BLOCKED
    return _status(known, state, scheduler, reason)


def _contradiction(known: Known, result: Result) -> str:
    if (result.job, result.index) != (known.job, known.index):
        return f"results/{known.index}.json of {known.job} speaks of {result.job}, unit {result.index}"
    if result.ending is Ending.DONE and result.exit_code != 0:
        return f"results/{known.index}.json of {known.job} says done with exit code {result.exit_code}"
    return ""


def _reason(row: Row) -> str:
    return "" if row.reason == "None" else row.reason


def _status(known: Known, state: UnitState, scheduler: str, reason: str) -> UnitStatus:
    slurm = f"{known.slurm}_{known.index}" if known.slurm and known.array else known.slurm
    result = known.result if isinstance(known.result, Result) else None
    return UnitStatus(job=known.job, index=known.index, slurm=slurm, state=state, scheduler=scheduler, reason=reason, result=result)
