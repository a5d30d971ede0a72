"""Runs a bisect: verify both ends, search, look closer, report.

- What to run next is a function of the plan and the journal, so an interrupted bisect goes on where it was.
- After every round the reports are written anew: whatever ends a bisect, its directory says how far it came.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from seatrial.bisect import bisect_dir, culprit, runners
from seatrial.bisect.bisect_dir import JOURNAL, PATCHES, STORES, load_plan
from seatrial.bisect.bisect_records import BisectAnswer, BisectPlan, BisectRun, History, Mark
from seatrial.bisect.bisect_report import write_reports
from seatrial.bisect.bisect_session import BisectSession, MissingRun, Tell
from seatrial.bisect.bisect_view import listed
from seatrial.bisect.commit_history import HISTORY, CachedHistory, aligned, contents_by_commit, load_or_query, missing_words, read_history
from seatrial.bisect.culprit import check_merged_branches
from seatrial.bisect.environment_cache import BisectEnvironments
from seatrial.bisect.git_stores import Stores
from seatrial.bisect.judge_run import threshold
from seatrial.bisect.posterior import SearchSettings, answer, assess, rounds_needed
from seatrial.bisect.runners import LocalRunner, end_local_leftovers
from seatrial.bisect.search_loop import search, verify_endpoints
from seatrial.bisect.step_preparer import StepPreparer
from seatrial.core.errors import UserError
from seatrial.core.jobs import Profile
from seatrial.core.records import replace
from seatrial.evidence.git import git, text
from seatrial.evidence.redact import Redactor
from seatrial.loops.nightly_scripts import describe_nightly
from seatrial.report.markdown import code
from seatrial.runtime.interrupt import Interruptible
from seatrial.trial.run_dir import locked


def run_bisect(directory: Path, redactor: Redactor, tell: Tell, profile: tuple[str, Profile] | None = None) -> BisectAnswer:
    """Begin or go on with the bisect in `directory`, to its answer."""
    with locked(directory), Interruptible(), runners.no_leftovers(directory, tell):
        plan = load_plan(directory)
        end_local_leftovers(directory)
        found = bisect_dir.read_runs(directory / JOURNAL)
        for note in found.notes:
            tell(note)
        history = _history(directory, plan, redactor, frozen=False)
        session = _session(directory, plan, redactor, tell, profile, found.rows)
        _refuse_strangers(session, history)
        settings = search_settings(plan)

        def write(found: BisectAnswer) -> None:
            write_reports(directory, plan, history, session.rows, found, redactor)

        tell(announcement(history, session.evidence(), plan))
        try:
            verify_endpoints(session, history)
            answered = _look_closer(session, history, search(session, history, settings, lambda found: write(unchecked(found))))
        except BaseException:
            write(unchecked(current_answer(history, session.evidence(), settings)))
            raise
        write(answered)
        return answered


def judge_bisect(directory: Path, redactor: Redactor) -> BisectAnswer:
    """Answer from the directory alone, and write the reports anew; nothing is run."""
    plan = load_plan(directory)
    with locked(directory):
        history, rows = _history(directory, plan, redactor, frozen=True), bisect_dir.read_runs(directory / JOURNAL).rows
        session = _session(directory, plan, redactor, lambda _: None, None, rows, frozen=True)
        _refuse_strangers(session, history)
        found = current_answer(history, session.evidence(), search_settings(plan))
        try:
            found = _look_closer(session, history, found)
        except MissingRun:
            found = unchecked(found)
        write_reports(directory, plan, history, session.rows, found, redactor)
    return found


def read_histories(plan: BisectPlan) -> History:
    read = [(repo, read_history(repo, plan.first_parent or len(plan.repos) > 1)) for repo in plan.repos]
    if any(patch.by_history for patch in plan.patches):
        read[0] = (read[0][0], contents_by_commit(read[0][1]))
    return read[0][1] if len(read) == 1 else aligned(read)


def _history(directory: Path, plan: BisectPlan, redactor: Redactor, *, frozen: bool) -> History:
    """The points, as they are kept beside the plan."""
    points = load_or_query(
        directory / HISTORY, "", lambda: CachedHistory(points=read_histories(plan).points), redactor, frozen=frozen
    ).points
    if len(points) < 2:
        raise UserError(f"{directory / HISTORY}: has no two ends", "the file was edited: restore it, or delete it")
    return History(points)


def search_settings(plan: BisectPlan) -> SearchSettings:
    return SearchSettings(plan.repeat, plan.confidence, threshold(plan.check) if plan.check and plan.repeat > 1 else None)


def _session(
    directory: Path,
    plan: BisectPlan,
    redactor: Redactor,
    tell: Tell,
    profile: tuple[str, Profile] | None,
    rows: Sequence[BisectRun],
    *,
    frozen: bool = False,
) -> BisectSession:
    stores = Stores(directory / STORES, plan.repos, tell)
    named: tuple[str, ...] = ()
    if not frozen:
        stores.open()
        named = missing_words(Path(plan.repos[0].path), () if plan.trial else (*plan.command, *plan.extra), plan.repos[0].bad)
    preparer = StepPreparer(plan, stores, BisectEnvironments(), directory / PATCHES, tell, named)
    if plan.on is not None and profile is None and not frozen:
        raise UserError(f"{directory}: this bisect runs on {plan.on}, which is not configured here", "run it where seatrial.toml has it")
    runner = runners.SlurmRunner(plan, _for_nightly(plan, profile[1]), profile[0], tell) if profile else LocalRunner(plan, redactor, tell)
    before = rows[-1].number if rows and not frozen else 0
    return BisectSession(directory, plan, preparer, runner, redactor, tell, list(rows), before=before, frozen=frozen)


def _for_nightly(plan: BisectPlan, profile: Profile) -> Profile:
    if plan.nightly is None:
        return profile
    main = plan.repos[0]
    found = describe_nightly(plan.nightly, text(git(Path(main.path), "show", f"{main.bad}:{plan.nightly}")))
    return replace(profile, nodes=found.nodes, gpus=found.gpus_per_node) if found else profile


def _refuse_strangers(session: BisectSession, history: History) -> None:
    """A journal of another history would be ignored row by row; that must not happen silently."""
    strange = [row for row in session.rows if row.history == 0 and row.stage != "conviction" and row.point not in history.by_id]
    if strange:
        message = f"{session.directory / JOURNAL}: row {strange[0].number} is of {strange[0].commit[:12]}, which is not between the ends"
        raise UserError(message, "was the history rewritten? start a new bisect, and give it the rows that still hold with --replay")


def _look_closer(session: BisectSession, history: History, found: BisectAnswer) -> BisectAnswer:
    """The answer with what is known of other repositories, or of a submodule that the commit moves. Before this nobody is blamed."""
    found = check_merged_branches(session, history, found)
    if len(session.plan.repos) > 1:
        return culprit.check_other_repositories(session, history, found)
    return culprit.search_submodules(session, history, found, search_settings(session.plan)) if session.plan.descend else found


def unchecked(found: BisectAnswer) -> BisectAnswer:
    """What the search alone says: whom it points to is named, and not blamed yet."""
    if found.state == "open":
        return found
    names = listed([code(suspect.commit[:12]) for suspect in found.suspects])
    why = f"the search points to {names}, not yet checked{f'; {found.why}' if found.why else ''}"
    return replace(found, state="open", why=why)


def announcement(history: History, rows: Sequence[BisectRun], plan: BisectPlan) -> str:
    """What is ahead; where rows are known already, what is left of it."""
    count = left = len(history.points) - 1
    how = search_settings(plan)
    if _ends_known(history, rows):
        left = assess(history, rows, how).suspects.bit_count()
    run = {row.point for row in rows if row.stage == "ends"}
    ends = "" if {history.points[0].id, history.points[-1].id} <= run else "both ends, then "
    of = f"{left} of {count} commits are left" if left < count else f"{count} commits"
    rounds = rounds_needed(left, plan.jobs, plan.repeat > 1) if left > 1 else 0
    noise = f"; with noise more, at most {plan.repeat} runs of one point" if plan.repeat > 1 else ""
    return f"{of}, {plan.jobs} at a time: {ends}about {rounds} rounds{noise}"


def current_answer(history: History, rows: Sequence[BisectRun], how: SearchSettings) -> BisectAnswer:
    """What the rows say so far; nothing before both ends are known."""
    if not _ends_known(history, rows):
        return BisectAnswer(state="open", why="the ends were not verified")
    return answer(assess(history, rows, how))


def _ends_known(history: History, rows: Sequence[BisectRun]) -> bool:
    known = {(row.point, row.mark) for row in rows}
    return {(history.points[0].id, Mark.GOOD), (history.points[-1].id, Mark.BAD)} <= known
