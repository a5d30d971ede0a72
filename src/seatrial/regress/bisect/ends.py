"""Both ends, verified before anything is searched.

- The good end must be good and the bad one bad, now and here; with noise each is run several times, and the bad end until it has shown
  its failure. What is known of them from an earlier sitting is not run again.
- How the bad end fails is what every bad run must look like.
- Ends that do not hold are an error of the question, with the answer that would help.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence

from seatrial.model.errors import BlockedError, UserError
from seatrial.model.verdict import Boundary
from seatrial.regress.bisect import advice
from seatrial.regress.bisect.judging.observe import threshold
from seatrial.regress.bisect.place import resume_command
from seatrial.regress.bisect.record import Failure, History, Mark, Point, Run, SkipKind
from seatrial.regress.bisect.running.session import Session, Wanted, short
from seatrial.regress.bisect.search.choose import NOISY_ENDS, STEADY_ENDS
from seatrial.regress.bisect.search.noise import Threshold

MOST = 10
"""Runs of an end, at most, before it counts as being on the wrong side."""


def verify(session: Session, history: History, number: int = 0) -> None:
    """Run both ends as often as needed. Afterwards `session.failures` says how the bad end fails."""
    good, bad = history.points[0], history.points[-1]
    if good.contents == bad.contents:
        raise UserError(
            f"both ends, {short(good)} and {short(bad)}, have the same files: no commit between them can make a difference",
            "name ends that differ; if one fails and the other does not, the cause is not in the commits",
        )
    limit = threshold(session.plan.check) if session.plan.check else None
    while owed := [
        # By turns, so that a wrong end is seen soon.
        end
        for pair in itertools.zip_longest(*([end] * _owed(session, end, bad, number, limit) for end in (good, bad)))
        for end in pair
        if end is not None
    ]:
        session.execute([Wanted(end, "ends", 0, number, measured=end is good) for end in owed[: session.plan.jobs]])
        _refuse_unmeasured(session, good, number)
        _refuse_skips(session, good, "good", number)
        _refuse_skips(session, bad, "bad", number)
    _judge(session, good, bad, number, limit)
    _refuse_failing_good(session, good, bad, number)
    failures = [row.failure for row in _rows(session, bad, number) if row.mark is Mark.BAD and row.failure]
    session.failures[:] = _distinct(failures)


def _owed(session: Session, end: Point, bad: Point, number: int, limit: Threshold | None) -> int:
    """Runs that an end still needs: few when they agree, more when they do not, and most when they say the opposite of what was said."""
    rows, said = _rows(session, end, number), Mark.BAD if end is bad else Mark.GOOD
    wanted = STEADY_ENDS if len({row.mark for row in rows}) < 2 else NOISY_ENDS
    if rows and (side(rows, limit) is not said):
        wanted = MOST
    return max(0, min(wanted, session.plan.repeat) - len(rows))


def _rows(session: Session, end: Point, number: int) -> list[Run]:
    """What was run of an end; what was replayed from a log of others has no failure to compare with, and does not count."""
    return [row for row in session.evidence(number) if row.point == end.id and row.stage == "ends"]


def _shown(session: Session, bad: Point, number: int) -> bool:
    return any(row.mark is Mark.BAD for row in _rows(session, bad, number))


def _distinct(failures: Sequence[Failure]) -> list[Failure]:
    found: list[Failure] = []
    for failure in failures:
        if not any(failure.same(other) for other in found):
            found.append(failure)
    return found


def _refuse_skips(session: Session, end: Point, name: str, number: int) -> None:
    """An end that cannot be judged leaves nothing to search between."""
    row = next((row for row in reversed(_rows(session, end, number)) if row.mark is Mark.SKIP), None)
    if row is None:
        return
    why, fix = advice.for_skip(session.plan, row, name)
    message = f"the {name} end {short(end)} cannot be judged: "
    log = _log(session, row)
    if row.skip in (SkipKind.ENVIRONMENT, SkipKind.TRIAL):
        raise BlockedError(
            Boundary.ENVIRONMENT,
            message + row.reason + log,
            f"repair it, then: {resume_command(session.directory)}",
        )
    raise UserError(message + why + log, fix)


def _refuse_unmeasured(session: Session, good: Point, number: int) -> None:
    """A good end without its metric is no matter of chance: more runs of it would say nothing more."""
    failed = [(row, row.failure) for row in _rows(session, good, number) if row.failure and row.failure.kind == "check"]
    row = next((row for row, failure in failed if not failure.missed), None)
    if row is not None:
        raise UserError(
            f"the good end {short(good)} cannot be judged: {row.reason}{_log(session, row)}",
            "correct the check, or say with --metrics where the command leaves its metrics (it may write to {output})",
        )


def _refuse_failing_good(session: Session, good: Point, bad: Point, number: int) -> None:
    """A good end that passes its check and fails all the same counts only if the bad end fails so, too: as every commit between them."""
    row = next((row for row in _rows(session, good, number) if row.mark is Mark.GOOD and row.exit_code), None)
    known = [row.failure.exit_code for row in _rows(session, bad, number) if row.failure and row.failure.kind == "check"]
    if row is not None and row.exit_code not in known:
        raise UserError(
            f"the good end {short(good)} cannot be judged: {row.reason}; the bad end does not end so{_log(session, row)}",
            "name a good commit whose command ends with 0, or let the command end with 0 wherever its metrics are to decide",
        )


def _log(session: Session, row: Run) -> str:
    """Where the log is; what could not be made has none."""
    file = session.directory / row.directory / "run.log"
    return f" (log: {file})" if row.directory and file.is_file() else ""


def _judge(session: Session, good: Point, bad: Point, number: int, limit: Threshold | None) -> None:
    of_good, of_bad = _rows(session, good, number), _rows(session, bad, number)
    good_fails = side(of_good, limit) is Mark.BAD
    # Without a metric one bad run is enough: a flaky failure need not show often.
    bad_passes = not _shown(session, bad, number) or (limit is not None and side(of_bad, limit) is Mark.GOOD)
    if good_fails and bad_passes:
        raise UserError(
            f"the ends are swapped: {short(good)}, said to be good, fails, and {short(bad)}, said to be bad, passes",
            "to find the commit that mended it, negate the command; to find the one that broke it, swap --good and --bad",
        )
    if good_fails:
        row = next((row for row in of_good if row.mark is Mark.BAD), of_good[-1])
        raise UserError(
            f"the good end {short(good)} is not good: {row.reason or 'the command failed'}{_log(session, row)}",
            advice.for_failing_good(session.plan, row, session.directory / row.directory / "run.log"),
        )
    if bad_passes:
        raise UserError(
            f"the bad end {short(bad)} is not bad: {_measured(of_bad)}",
            "name a commit that fails with --bad; if it fails only now and then, allow more runs with --repeat; or the command does not "
            "test its tree at all (python -I and -E pass over PYTHONPATH and find your checkout, if that is installed)",
        )


def side(rows: Sequence[Run], limit: Threshold | None) -> Mark:
    """What several runs of one point say together: what they agree on; else by the mean of what they measured, or by their number."""
    if len(marks := {row.mark for row in rows}) == 1:
        return marks.pop()
    values = [row.value for row in rows if isinstance(row.value, float)]
    if limit is not None and len(values) == len(rows):
        return Mark.GOOD if limit.passes(statistics.fmean(values)) else Mark.BAD
    return Mark.BAD if 2 * sum(row.mark is Mark.BAD for row in rows) > len(rows) else Mark.GOOD


def _measured(rows: Sequence[Run]) -> str:
    values = [row.value for row in rows if isinstance(row.value, float)]
    runs = f"{len(rows)} runs" if len(rows) > 1 else "its run"
    return f"{runs} passed" + (f", measured {', '.join(f'{value:.6g}' for value in values)}" if values else "")
