"""The conductor of a bisect: verify both ends, search, look closer, report.

- What to run next is a function of the plan and the journal, so an interrupted bisect goes on where it was.
- After every round the reports are written anew: whatever ends a bisect, its directory says how far it came.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from seatrial.evidence.git import git, text
from seatrial.evidence.redact import Redactor
from seatrial.launch.interrupt import Interruptible
from seatrial.loops.nightly import describe
from seatrial.model.errors import UserError
from seatrial.model.profile import Profile
from seatrial.regress.bisect import convict, descend
from seatrial.regress.bisect.align import aligned
from seatrial.regress.bisect.ends import verify
from seatrial.regress.bisect.environments.cache import BisectEnvironments
from seatrial.regress.bisect.forks import check_forks
from seatrial.regress.bisect.history import missing_words, read_history, told_apart
from seatrial.regress.bisect.judging.observe import threshold
from seatrial.regress.bisect.kept import HISTORY, Kept, recall
from seatrial.regress.bisect.logs import journal
from seatrial.regress.bisect.place import JOURNAL, PATCHES, STORES, load
from seatrial.regress.bisect.record import Answer, History, Mark, Plan, Run
from seatrial.regress.bisect.reports.report import write_reports
from seatrial.regress.bisect.reports.view import listed
from seatrial.regress.bisect.rounds import search
from seatrial.regress.bisect.running import cluster
from seatrial.regress.bisect.running.local import LocalRunner, clean_up
from seatrial.regress.bisect.running.prepare import Kitchen
from seatrial.regress.bisect.running.session import Owed, Session, Tell
from seatrial.regress.bisect.search.choose import Settings, answer, assess, rounds_needed
from seatrial.regress.bisect.trees.stores import Stores
from seatrial.report.markdown import code
from seatrial.trial.rundir import locked

UNVERIFIED = "the ends were not verified"


def conduct(directory: Path, redactor: Redactor, tell: Tell, profile: tuple[str, Profile] | None = None) -> Answer:
    """Begin or go on with the bisect in `directory`, to its answer."""
    with locked(directory), Interruptible(), cluster.no_leftovers(directory, tell):
        plan = load(directory)
        clean_up(directory)
        found = journal.read(directory / JOURNAL)
        for note in found.notes:
            tell(note)
        history = _history(directory, plan, redactor, frozen=False)
        session = _session(directory, plan, redactor, tell, profile, found.rows)
        _refuse_strangers(session, history)
        return _Conductor(session, history).run()


def judge(directory: Path, redactor: Redactor) -> Answer:
    """Answer from the directory alone, and write the reports anew; nothing is run."""
    plan = load(directory)
    with locked(directory):
        history, rows = _history(directory, plan, redactor, frozen=True), journal.read(directory / JOURNAL).rows
        session = _session(directory, plan, redactor, lambda _: None, None, rows, frozen=True)
        _refuse_strangers(session, history)
        found = standing(history, session.evidence(), settings(plan))
        try:
            found = _closer(session, history, found)
        except Owed:
            found = unchecked(found)
        write_reports(directory, plan, history, session.rows, found, redactor)
    return found


def histories(plan: Plan) -> History:
    """The points that a plan asks about."""
    read = [(repo, read_history(repo, plan.first_parent or len(plan.repos) > 1)) for repo in plan.repos]
    if any(patch.by_history for patch in plan.patches):
        read[0] = (read[0][0], told_apart(read[0][1]))
    return read[0][1] if len(read) == 1 else aligned(read)


def _history(directory: Path, plan: Plan, redactor: Redactor, *, frozen: bool) -> History:
    """The points, as they are kept beside the plan."""
    points = recall(directory / HISTORY, "", lambda: Kept(points=histories(plan).points), redactor, frozen=frozen).points
    if len(points) < 2:
        raise UserError(f"{directory / HISTORY}: has no two ends", "the file was edited: restore it, or delete it")
    return History(points)


def settings(plan: Plan) -> Settings:
    """How rows are read."""
    return Settings(plan.repeat, plan.confidence, threshold(plan.check) if plan.check and plan.repeat > 1 else None)


def _session(
    directory: Path,
    plan: Plan,
    redactor: Redactor,
    tell: Tell,
    profile: tuple[str, Profile] | None,
    rows: Sequence[Run],
    *,
    frozen: bool = False,
) -> Session:
    stores = Stores(directory / STORES, plan.repos, tell)
    named: tuple[str, ...] = ()
    if not frozen:
        stores.open()
        named = missing_words(Path(plan.repos[0].path), () if plan.trial else (*plan.command, *plan.extra), plan.repos[0].bad)
    kitchen = Kitchen(plan, stores, BisectEnvironments(), directory / PATCHES, tell, named)
    if plan.on is not None and profile is None and not frozen:
        raise UserError(f"{directory}: this bisect runs on {plan.on}, which is not configured here", "run it where seatrial.toml has it")
    runner = cluster.ClusterRunner(plan, _for_nightly(plan, profile[1]), profile[0], tell) if profile else LocalRunner(plan, redactor, tell)
    before = rows[-1].number if rows and not frozen else 0
    return Session(directory, plan, kitchen, runner, redactor, tell, list(rows), before=before, frozen=frozen)


def _for_nightly(plan: Plan, profile: Profile) -> Profile:
    """The profile with the nodes and GPUs that the script of a nightly asks for."""
    if plan.nightly is None:
        return profile
    main = plan.repos[0]
    found = describe(plan.nightly, text(git(Path(main.path), "show", f"{main.bad}:{plan.nightly}")))
    return profile.model_copy(update={"nodes": found.nodes, "gpus": found.gpus_per_node}) if found else profile


def _refuse_strangers(session: Session, history: History) -> None:
    """A journal of another history would be ignored row by row; that must not happen silently."""
    strange = [row for row in session.rows if row.history == 0 and row.stage != "conviction" and row.point not in history.by_id]
    if strange:
        message = f"{session.directory / JOURNAL}: row {strange[0].number} is of {strange[0].commit[:12]}, which is not between the ends"
        raise UserError(message, "was the history rewritten? start a new bisect, and give it the rows that still hold with --replay")


class _Conductor:
    def __init__(self, session: Session, history: History) -> None:
        self.session, self.history = session, history
        self.settings = settings(session.plan)

    def run(self) -> Answer:
        self.session.tell(announcement(self.history, self.session.evidence(), self.session.plan))
        try:
            verify(self.session, self.history)
            found = search(self.session, self.history, self.settings, lambda found: self._write(unchecked(found)))
            found = _closer(self.session, self.history, found)
        except BaseException:
            self._write(unchecked(standing(self.history, self.session.evidence(), self.settings)))
            raise
        self._write(found)
        return found

    def _write(self, found: Answer) -> None:
        write_reports(self.session.directory, self.session.plan, self.history, self.session.rows, found, self.session.redactor)


def _closer(session: Session, history: History, found: Answer) -> Answer:
    """The answer with what is known of other repositories, or of a submodule that the commit moves. Before this nobody is blamed."""
    found = check_forks(session, history, found)
    if len(session.plan.repos) > 1:
        return convict.convict(session, history, found)
    return descend.descend(session, history, found, settings(session.plan)) if session.plan.descend else found


def unchecked(found: Answer) -> Answer:
    """What the search alone says: whom it points to is named, and not blamed yet."""
    if found.state == "open":
        return found
    names = listed([code(suspect.commit[:12]) for suspect in found.suspects])
    why = f"the search points to {names}, not yet checked{f'; {found.why}' if found.why else ''}"
    return found.model_copy(update={"state": "open", "why": why})


def announcement(history: History, rows: Sequence[Run], plan: Plan) -> str:
    """What is ahead; where rows are known already, what is left of it."""
    count = left = len(history.points) - 1
    how = settings(plan)
    if standing(history, rows, how).why != UNVERIFIED:
        left = assess(history, rows, how).suspects.bit_count()
    run = {row.point for row in rows if row.stage == "ends"}
    ends = "" if {history.points[0].id, history.points[-1].id} <= run else "both ends, then "
    of = f"{left} of {count} commits are left" if left < count else f"{count} commits"
    rounds = rounds_needed(left, plan.jobs, plan.repeat > 1) if left > 1 else 0
    noise = f"; with noise more, at most {plan.repeat} runs of one point" if plan.repeat > 1 else ""
    return f"{of}, {plan.jobs} at a time: {ends}about {rounds} rounds{noise}"


def standing(history: History, rows: Sequence[Run], how: Settings) -> Answer:
    """What the rows say so far; nothing before both ends are known."""
    known = {(row.point, row.mark) for row in rows}
    if not {(history.points[0].id, Mark.GOOD), (history.points[-1].id, Mark.BAD)} <= known:
        return Answer(state="open", why=UNVERIFIED)
    return answer(assess(history, rows, how))
