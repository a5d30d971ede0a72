"""Verifies both ends, then runs rounds until the rows give an answer.

- The good end must be good and the bad end bad, here and now; otherwise the error says what would help.
- How the bad end fails is what every bad run must look like.
- The history and the rows alone decide what to run next, so an interrupted search resumes where it was.
"""

from __future__ import annotations

import itertools
import math
import re
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from seatrial.bisect.bisect_dir import resume_command
from seatrial.bisect.bisect_records import BisectAnswer, BisectPlan, BisectRun, Failure, History, Mark, Point, SkipKind
from seatrial.bisect.bisect_session import BisectSession, short
from seatrial.bisect.bisect_view import percent
from seatrial.bisect.commit_history import exists, inside_tree
from seatrial.bisect.judge_run import threshold
from seatrial.bisect.noise_models import Threshold
from seatrial.bisect.posterior import (
    NOISY_ENDS,
    STEADY_ENDS,
    Assessment,
    SearchSettings,
    answer,
    assess,
    choose_points,
    known_by_contents,
    useless,
)
from seatrial.bisect.step_preparer import BisectStep
from seatrial.core.errors import BlockedError, UserError
from seatrial.core.verdict import Boundary

_FLAG = re.compile(r"(^|\s)(--[a-z]|git )")
_MODULE = re.compile(r"No module named '?([A-Za-z_]\w*)")


def for_skip(plan: BisectPlan, row: BisectRun, name: str) -> tuple[str, str]:
    """Why an end (`good` or `bad`) cannot be judged, and what helps; some reasons say that themselves."""
    another = f"name another commit with --{name}"
    why, separator, remedy = row.reason.rpartition("; ")
    if row.skip in (SkipKind.BUILD, SkipKind.BUILD_COMMAND, SkipKind.TREE) and separator and _FLAG.search(remedy):
        return why, f"{remedy}; or {another}"
    fixes = {
        SkipKind.BUILD_COMMAND: f"correct --build, or {another}",
        SkipKind.BUILD: f"choose another lock or none with --env, or another version with --python; or {another}",
        SkipKind.UNEDITED: f"correct the file of --edit, or {another} that has it",
        SkipKind.ABSENT: f"{another} that has it; or bring it with --patch, or give the command a copy that lies outside of the tree",
    }
    if plan.failure is not None:
        other = "; it fails there, if in another way" if name == "good" else ""
        fixes[SkipKind.OTHER_FAILURE] = f"correct --failure, which must match one line of the log{other}; or {another}"
    return row.reason, fixes.get(row.skip or SkipKind.HAND, f"{another}, or correct the command")


def for_failing_good(plan: BisectPlan, row: BisectRun, log: Path) -> str:
    """For a good end that fails."""
    failure, older = row.failure, "name an older commit with --good"
    text = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
    if file := _not_committed(plan, text):
        return (
            f"{file} is not committed, so no tree has it: give the command a copy that lies outside of the tree, or bring it with --patch"
        )
    if failure and failure.kind == "timeout":
        return f"allow more time with --minutes (now {plan.minutes:g}), or {older}"
    if failure and failure.missed:
        return f"correct the threshold of the check, or {older}"
    if module := _MODULE.search(failure.shown if failure and failure.shown else row.reason) or _MODULE.search(text):
        if plan.environment.kind == "none":
            return f"install {module[1]} where you call from, or let an environment be built for each commit: --env pip:LOCKFILE"
        return f"add the package to the environments with --with {module[1]}, or use your own for all commits: --env none; or {older}"
    return f"{older}; or the command fails for a reason that has nothing to do with the commits: read the log"


def _not_committed(plan: BisectPlan, log: str) -> str | None:
    """A file that the command names, that the checkout has and the good end has not, and that the log complains about."""
    main = plan.repos[0]
    for word in (*plan.command, *plan.extra):
        for part in (word, word.partition("=")[2]):
            path = inside_tree(part)
            if path and Path(path).name in log and Path(main.path, path).is_file() and not exists(Path(main.path), main.good, path):
                return path
    return None


MOST = 10
"""Runs of an end, at most, before it counts as being on the wrong side."""


def verify_endpoints(session: BisectSession, history: History, number: int = 0) -> None:
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
        session.execute([BisectStep(end, "ends", 0, number, measured=end is good) for end in owed[: session.plan.jobs]])
        _refuse_unmeasured(session, good, number)
        _refuse_skips(session, good, "good", number)
        _refuse_skips(session, bad, "bad", number)
    _judge(session, good, bad, number, limit)
    _refuse_failing_good(session, good, bad, number)
    failures = [row.failure for row in _rows(session, bad, number) if row.mark is Mark.BAD and row.failure]
    found: list[Failure] = []
    for failure in failures:
        if not any(failure.same(other) for other in found):
            found.append(failure)
    session.failures[:] = found


def _owed(session: BisectSession, end: Point, bad: Point, number: int, limit: Threshold | None) -> int:
    """Runs that an end still needs: few when they agree, more when they do not, and most when they say the opposite of what was said."""
    rows, said = _rows(session, end, number), Mark.BAD if end is bad else Mark.GOOD
    wanted = STEADY_ENDS if len({row.mark for row in rows}) < 2 else NOISY_ENDS
    if rows and (side(rows, limit) is not said):
        wanted = MOST
    return max(0, min(wanted, session.plan.repeat) - len(rows))


def _rows(session: BisectSession, end: Point, number: int) -> list[BisectRun]:
    """What was run of an end; what was replayed from a log of others has no failure to compare with, and does not count."""
    return [row for row in session.evidence(number) if row.point == end.id and row.stage == "ends"]


def _refuse_skips(session: BisectSession, end: Point, name: str, number: int) -> None:
    """An end that cannot be judged leaves nothing to search between."""
    row = next((row for row in reversed(_rows(session, end, number)) if row.mark is Mark.SKIP), None)
    if row is None:
        return
    why, fix = for_skip(session.plan, row, name)
    message = f"the {name} end {short(end)} cannot be judged: "
    log = _log(session, row)
    if row.skip in (SkipKind.ENVIRONMENT, SkipKind.TRIAL):
        raise BlockedError(Boundary.ENVIRONMENT, message + row.reason + log, f"repair it, then: {resume_command(session.directory)}")
    raise UserError(message + why + log, fix)


def _refuse_unmeasured(session: BisectSession, good: Point, number: int) -> None:
    """A good end without its metric is no matter of chance: more runs of it would say nothing more."""
    failed = [(row, row.failure) for row in _rows(session, good, number) if row.failure and row.failure.kind == "check"]
    row = next((row for row, failure in failed if not failure.missed), None)
    if row is not None:
        raise UserError(
            f"the good end {short(good)} cannot be judged: {row.reason}{_log(session, row)}",
            "correct the check, or say with --metrics where the command leaves its metrics (it may write to {output})",
        )


def _refuse_failing_good(session: BisectSession, good: Point, bad: Point, number: int) -> None:
    """A good end that passes its check and fails all the same counts only if the bad end fails so, too: as every commit between them."""
    row = next((row for row in _rows(session, good, number) if row.mark is Mark.GOOD and row.exit_code), None)
    known = [row.failure.exit_code for row in _rows(session, bad, number) if row.failure and row.failure.kind == "check"]
    if row is not None and row.exit_code not in known:
        raise UserError(
            f"the good end {short(good)} cannot be judged: {row.reason}; the bad end does not end so{_log(session, row)}",
            "name a good commit whose command ends with 0, or let the command end with 0 wherever its metrics are to decide",
        )


def _log(session: BisectSession, row: BisectRun) -> str:
    """Where the log is; what could not be made has none."""
    file = session.directory / row.directory / "run.log"
    return f" (log: {file})" if row.directory and file.is_file() else ""


def _judge(session: BisectSession, good: Point, bad: Point, number: int, limit: Threshold | None) -> None:
    of_good, of_bad = _rows(session, good, number), _rows(session, bad, number)
    good_fails = side(of_good, limit) is Mark.BAD
    # Without a metric one bad run is enough: a flaky failure need not show often.
    never_bad = all(row.mark is not Mark.BAD for row in of_bad)
    bad_passes = never_bad or (limit is not None and side(of_bad, limit) is Mark.GOOD)
    if good_fails and bad_passes:
        raise UserError(
            f"the ends are swapped: {short(good)}, said to be good, fails, and {short(bad)}, said to be bad, passes",
            "to find the commit that mended it, negate the command; to find the one that broke it, swap --good and --bad",
        )
    if good_fails:
        row = next((row for row in of_good if row.mark is Mark.BAD), of_good[-1])
        raise UserError(
            f"the good end {short(good)} is not good: {row.reason or 'the command failed'}{_log(session, row)}",
            for_failing_good(session.plan, row, session.directory / row.directory / "run.log"),
        )
    if bad_passes:
        values = [f"{row.value:.6g}" for row in of_bad if isinstance(row.value, float)]
        runs = f"{len(of_bad)} runs" if len(of_bad) > 1 else "its run"
        raise UserError(
            f"the bad end {short(bad)} is not bad: {runs} passed" + (f", measured {', '.join(values)}" if values else ""),
            "name a commit that fails with --bad; if it fails only now and then, allow more runs with --repeat; or the command does not "
            "test its tree at all (python -I and -E pass over PYTHONPATH and find your checkout, if that is installed)",
        )


def side(rows: Sequence[BisectRun], limit: Threshold | None) -> Mark:
    """What several runs of one point say together: what they agree on; else by the mean of what they measured, or by their number."""
    if len(marks := {row.mark for row in rows}) == 1:
        return marks.pop()
    values = [row.value for row in rows if isinstance(row.value, float)]
    if limit is not None and len(values) == len(rows):
        return Mark.GOOD if limit.passes(statistics.fmean(values)) else Mark.BAD
    return Mark.BAD if 2 * sum(row.mark is Mark.BAD for row in rows) > len(rows) else Mark.GOOD


def search(
    session: BisectSession, history: History, how: SearchSettings, write: Callable[[BisectAnswer], None], number: int = 0
) -> BisectAnswer:
    """Run points until there is an answer; `write` is told how it stands before every round."""
    last = max((row.round for row in session.evidence(number)), default=0)
    while True:
        for like in known_by_contents(history, session.evidence(number)):
            point = history.points[history.by_id[like.point]]
            # It is a copy: with noise it would count as a run of its own.
            session.note(BisectStep(point, "search", last, number), like, like.reason, like.notes, copied=True)
        state = assess(history, session.evidence(number), how)
        found = answer(state)
        write(found)
        picked = choose_points(state, session.plan.jobs) if found.state == "open" else []
        if not picked:
            return found
        last += 1
        session.tell(f"round {last}: {progress(state, found)}, running {len(picked)}")
        _round(session, history, how, picked, last, number)


def progress(state: Assessment, found: BisectAnswer) -> str:
    """How far it is. With noise no commit is ever ruled out, so the leading one says more than their number."""
    if not state.noisy or not found.suspects:
        return f"{state.suspects.bit_count()} suspects left"
    top = found.suspects[0]
    tied = sum(math.isclose(one.probability, top.probability, rel_tol=1e-6) for one in found.suspects)
    others = len(found.suspects) - tied
    more = f" ({others} more for {percent(state.settings.confidence)})" if others else ""
    if tied > 1:
        return f"most likely one of {tied} commits with {percent(top.probability)} each{more}"
    return f"most likely {top.commit[:12]} with {percent(top.probability)}{more}"


def _round(session: BisectSession, history: History, how: SearchSettings, picked: Sequence[int], last: int, number: int) -> None:
    """Run the picked points; as long as all that was learnt is that points cannot be tested, others take their place."""
    while picked:
        wanted = [BisectStep(history.points[index], "search", last, number) for index in picked]

        def superfluous(running: Sequence[BisectStep]) -> set[int]:
            state = assess(history, session.evidence(number), how)
            indices = [history.by_id[one.point.id] for one in running]
            gone = useless(state, indices)
            return {place for place, index in enumerate(indices) if index in gone}

        rows = session.execute(wanted, superfluous)
        if any(row.mark is not Mark.SKIP for row in rows):
            return
        state = assess(history, session.evidence(number), how)
        picked = choose_points(state, session.plan.jobs) if answer(state).state == "open" else []
