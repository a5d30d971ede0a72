"""Looks closer at the first bad commit: other repositories, submodules, merged branches.

- `check_other_repositories`: is the repository that was found guilty alone, and are the others innocent?
- `search_submodules`: when the commit moves a submodule, which commit of the submodule is it?
- `check_merged_branches`: was a branch that left before the good end bad from its start?
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from seatrial.bisect.bisect_records import BisectAnswer, History, Mark, Pin, Point, Repo, Standing
from seatrial.bisect.bisect_session import BisectSession
from seatrial.bisect.commit_history import CachedHistory, load_or_query, read_history
from seatrial.bisect.git_stores import TreeError
from seatrial.bisect.judge_run import threshold
from seatrial.bisect.posterior import SearchSettings
from seatrial.bisect.search_loop import search, side
from seatrial.bisect.step_preparer import BisectStep
from seatrial.bisect.worktrees import moved_submodules
from seatrial.core.errors import UserError
from seatrial.core.records import replace

RUNS = 3
"""Runs of one state where there may be noise: the majority, or the mean, decides."""


def check_other_repositories(session: BisectSession, history: History, found: BisectAnswer) -> BisectAnswer:
    """The answer with a verdict on every repository. A range that holds several repositories convicts none."""
    repos = {suspect.repo for suspect in found.suspects}
    if found.state == "open" or len(repos) != 1:
        why = f"the suspects are of several repositories: {', '.join(sorted(repos))}" if repos else "no commit is blamed"
        return replace(found, standings=tuple(_unknown(repo, why) for repo in session.plan.repos))
    guilty = repos.pop()
    bad = next(point for point in history.points if point.id == found.first_bad)
    commit = next(pin.commit for pin in bad.pins if pin.repo == guilty)
    mark = _test(session, {guilty: commit}, f"{guilty} at {commit[:12]}, all others at their good ends")
    named = found.suspects[0].commit if found.state == "found" else None
    mine = Standing(repo=guilty, verdict="unknown", commit=named, why="it could not be tested with the others at their good ends")
    if mark is Mark.BAD:
        mine = replace(mine, verdict="convicted", why="it fails with all other repositories at their good ends")
    elif mark is Mark.GOOD:
        mine = replace(mine, verdict="accomplice", why="it fails only together with what another repository brought")
    together = {pin.repo: {pin.repo: pin.commit, guilty: commit} for pin in bad.pins}
    others = [_standing_of_other(session, repo, mine, together[repo.name]) for repo in session.plan.repos if repo.name != guilty]
    if mine.verdict == "accomplice" and not any(one.verdict == "accomplice" for one in others):
        why = f"{guilty} {commit[:12]} needs what another repository brought, and no single one was seen to be it"
        others = [replace(one, verdict="unknown", why=why) if one.verdict == "acquitted" else one for one in others]
    return replace(found, standings=(mine, *others))


def _standing_of_other(session: BisectSession, repo: Repo, guilty: Standing, moved: Mapping[str, str]) -> Standing:
    mark = _test(session, {repo.name: repo.bad}, f"{repo.name} at its bad end, all others at their good ends")
    if mark is Mark.BAD:
        why = f"it fails by itself, too; to find its commit: --repo {repo.name}={repo.path} alone, with the others where they were good"
        return Standing(repo=repo.name, verdict="convicted", why=why)
    if mark is None:
        return _unknown(repo, "its bad end could not be tested with the others at their good ends")
    if guilty.verdict == "convicted":
        return Standing(repo=repo.name, verdict="acquitted", why="at its bad end, with the others at their good ends, all is well")
    if guilty.verdict == "unknown":
        return _unknown(repo, f"by itself all is well; whether {guilty.repo} needs it is not known, because that one was not tested alone")
    both = " and ".join(f"{name} {commit[:12]}" for name, commit in moved.items())
    together = _test(session, moved, f"{both}, all others at their good ends")
    if together is Mark.BAD:
        return Standing(repo=repo.name, verdict="accomplice", why=f"{both} fail together, and neither does alone")
    if together is None:
        return _unknown(repo, f"{both} could not be tested together")
    return Standing(repo=repo.name, verdict="acquitted", why="alone and together with the commit that was found all is well")


def _unknown(repo: Repo, why: str) -> Standing:
    return Standing(repo=repo.name, verdict="unknown", why=why)


def _test(session: BisectSession, moved: Mapping[str, str], what: str) -> Mark | None:
    """What a state says where only some repositories have moved from their good ends; None when it cannot be tested."""
    pins = tuple(Pin(repo=repo.name, commit=moved.get(repo.name, repo.good), place=repo.place) for repo in session.plan.repos)
    return try_state(session, pins, next(iter(moved)), what)


def try_state(session: BisectSession, pins: tuple[Pin, ...], name: str, what: str, number: int = 0) -> Mark | None:
    """Run one state that is on no history's line, as often as noise asks for; what an earlier session ran counts."""
    commit = next(pin.commit for pin in pins if pin.repo == name)
    point = Point(repo=name, commit=commit, subject=what, time=0, pins=pins, contents="")
    runs = min(RUNS, session.plan.repeat)
    session.tell(f"conviction: {what}")
    limit = threshold(session.plan.check) if session.plan.check else None
    while True:
        rows = session.convictions(point.id)
        if any(row.mark is Mark.SKIP for row in rows):
            return None
        if len(rows) >= runs:
            return side(rows, limit)
        session.execute([BisectStep(point, "conviction", 0, number)] * min(runs - len(rows), session.plan.jobs))


def check_merged_branches(session: BisectSession, history: History, found: BisectAnswer, number: int = 0) -> BisectAnswer:
    """The answer, unless a suspect only continues what was bad before it. `number` is that of the history."""
    if found.state == "open":
        return found
    notes = list(found.notes)
    for suspect in found.suspects:
        point = history.points[history.by_id[suspect.point]]
        for parent in point.outside:
            pins = tuple(replace(pin, commit=parent) if pin.repo == point.repo else pin for pin in point.pins)
            what = f"{parent[:12]}, from which {point.commit[:12]} forked before the good end"
            mark = try_state(session, pins, point.repo, what, number)
            if mark is Mark.BAD:
                on_line = session.plan.first_parent or len(session.plan.repos) > 1
                way_out = (
                    "Name a good end that is on the line of first parents" if on_line else "To search the main line alone: --first-parent"
                )
                forked = "its branch forked off before the good end, and was bad already"
                why = f"{point.commit[:12]} is bad, but so is {parent[:12]} before it: {forked}. {way_out}"
                return replace(found, state="open", suspects=(), confidence=0.0, last_good=None, first_bad=None, why=why)
            if mark is None:
                notes.append(f"{parent[:12]}, the parent of {point.commit[:12]}, lies before the good end and could not be tested")
    return replace(found, notes=tuple(notes))


NUMBERS = 100
"""The history inside the k-th submodule that a commit of history n moves has the number 100 n + k: the same in every session."""


@dataclass(frozen=True, slots=True)
class _Move:
    """A submodule that a point moves."""

    bad: Point
    pin: Pin
    """The submodule where it was before. Its name is none that a repository of the plan can have."""
    new: str
    outer: int
    number: int

    @property
    def path(self) -> str:
        return self.pin.place

    @property
    def key(self) -> str:
        """Equal exactly where the same commits lie inside."""
        return f"{self.bad.id} {self.path} {self.pin.commit} {self.new}"

    @property
    def text(self) -> str:
        return f"{self.bad.commit[:12]} moves {self.path} from {self.pin.commit[:12]} to {self.new[:12]}"


def search_submodules(session: BisectSession, history: History, found: BisectAnswer, how: SearchSettings) -> BisectAnswer:
    """The answer, with the submodule's commit in it when a move of a submodule is guilty."""
    if found.state != "found":
        return found
    bad = next(point for point in history.points if point.id == found.suspects[0].point)
    return _below(session, found, bad, lambda: session.preparer.stores.git_dir(session.plan.repos[0].name), how, 0)


def _below(
    session: BisectSession, found: BisectAnswer, bad: Point, git_dir: Callable[[], Path], how: SearchSettings, outer: int
) -> BisectAnswer:
    """Look into every submodule that the last commit of a bad point moves; `git_dir` says where that commit is."""
    top, moves = bad.pins[-1], []
    for place, (inner, old, new) in enumerate(_moved(session, git_dir, top.commit, outer), start=1):
        path = inner if top.place == "." else f"{top.place}/{inner}"
        if old is None:
            note = f"{bad.commit[:12]} adds the submodule {path} at {new[:12]}: there is nothing before it to compare with"
            found = replace(found, notes=(*found.notes, note))
        else:
            pin = Pin(repo=f"{session.plan.repos[0].name}/{path}", commit=old, place=path)
            moves.append(_Move(bad, pin, new, outer, NUMBERS * outer + place))
    together = _before(session, moves) if len(moves) > 1 else None
    if together is Mark.BAD:
        why = f"{bad.commit[:12]} fails with all of its submodules as they were before, too"
        return _with(found, *(Standing(repo=move.path, verdict="acquitted", why=why) for move in moves))
    marks = [_before(session, [move]) for move in moves]
    # Others may hide what a submodule does: only where one of them is guilty, or where it is the only one, is it known to be innocent.
    decided = len(moves) == 1 or Mark.GOOD in marks
    for move, mark in zip(moves, marks, strict=True):
        if mark is Mark.GOOD:
            found = _guilty(session, found, move, how)
            continue
        standing = Standing(repo=move.path, verdict="unknown", why=f"{move.text}; as it was before it cannot be tested")
        if mark is not None:
            why = f"{move.bad.commit[:12]} fails with the submodule as it was before, too"
            hidden = f"{why}, but another submodule moves there as well, which may hide it"
            standing = replace(standing, verdict="acquitted" if decided else "unknown", why=why if decided else hidden)
        found = _with(found, standing)
    return found


def _moved(session: BisectSession, git_dir: Callable[[], Path], commit: str, outer: int) -> tuple[tuple[str, str | None, str], ...]:
    def ask() -> CachedHistory:
        return CachedHistory(moves=moved_submodules(git_dir(), commit))

    return load_or_query(session.directory / f"moves-{outer}.json", commit, ask, session.redactor, frozen=session.frozen).moves


def _before(session: BisectSession, moves: Sequence[_Move]) -> Mark | None:
    """What the bad point says with these submodules as they were before."""
    first, paths = moves[0], " and ".join(move.path for move in moves)
    what = f"{first.bad.commit[:12]} with {paths} as {'it was' if len(moves) == 1 else 'they were'} before"
    return try_state(session, (*first.bad.pins, *(move.pin for move in moves)), first.pin.repo, what, first.number)


def _guilty(session: BisectSession, found: BisectAnswer, move: _Move, how: SearchSettings) -> BisectAnswer:
    why = f"{move.bad.commit[:12]} is good with the submodule as it was before"
    file = session.directory / f"history-{move.number}.json"

    def ask() -> CachedHistory:
        """The commits between, or why they cannot be searched, without the words of the command line, which nobody gave for a submodule."""
        try:
            return CachedHistory(points=_history(session, move, _store(session, move)).points)
        except TreeError as error:
            return CachedHistory(why=error.message)
        except UserError:
            return CachedHistory(why=f"{move.new[:12]} does not come after {move.pin.commit[:12]}: it was moved back, or to another branch")

    kept = load_or_query(file, move.key, ask, session.redactor, frozen=session.frozen)
    if kept.why:
        why = f"{why}; its own commits cannot be searched: {kept.why}"
        return _with(found, Standing(repo=move.path, verdict="convicted", why=why))
    inner = History(kept.points)
    session.tell(f"{move.text}, and that is the cause: {len(inner.points) - 1} commits of {move.path} to search")
    _take_ends(session, inner, move)
    deeper = check_merged_branches(session, inner, search(session, inner, how, lambda _: None, move.number), move.number)
    notes = deeper.notes
    if deeper.state != "found":
        names = ", ".join(suspect.commit[:12] for suspect in deeper.suspects)
        notes = (*notes, f"{move.path}: {f'one of {names}: ' if names else ''}{deeper.why}")
    found = replace(found, notes=(*found.notes, *notes), flaky=(*found.flaky, *deeper.flaky))
    if deeper.state != "found":
        return _with(found, Standing(repo=move.path, verdict="convicted", why=why))
    bad = next(point for point in inner.points if point.id == deeper.suspects[0].point)
    standing = Standing(repo=move.path, verdict="convicted", commit=bad.commit, subject=bad.subject, confidence=deeper.confidence, why=why)
    return _below(session, _with(found, standing), bad, lambda: _store(session, move), how, move.number)


def _store(session: BisectSession, move: _Move) -> Path:
    main, stores = move.bad.pins[0], session.preparer.stores
    return [stores.submodule(main.repo, move.path, commit, at=main.commit) for commit in (move.pin.commit, move.new)][-1]


def _history(session: BisectSession, move: _Move, git_dir: Path) -> History:
    bad, pin = move.bad, move.pin
    repo = Repo(name=pin.repo, path=str(git_dir), good=pin.commit, bad=move.new, place=pin.place)
    return History(
        tuple(
            replace(point, pins=(*bad.pins, *point.pins), contents=f"{bad.contents}:{pin.place}:{point.contents}")
            for point in read_history(repo, session.plan.first_parent).points
        )
    )


def _take_ends(session: BisectSession, inner: History, move: _Move) -> None:
    """Both ends are known: the state before was just tried, and the state after is the bad point itself. A session that was killed
    in between has noted some of it."""
    good, bad = inner.points[0], inner.points[-1]
    known = [row for row in session.evidence(move.outer) if row.point == move.bad.id and row.mark is not Mark.SKIP]
    before, after = f"{move.path} as it was before", f"{move.bad.commit[:12]} moves {move.path} to this commit"
    for end, rows, what in ((good, session.convictions(good.id), before), (bad, known, after)):
        noted = sum(row.stage == "ends" and row.point == end.id for row in session.evidence(move.number))
        for row in rows[noted:]:
            session.note(BisectStep(end, "ends", 0, move.number), row, f"known from run {row.number}: {what}")


def _with(found: BisectAnswer, *standings: Standing) -> BisectAnswer:
    return replace(found, standings=(*found.standings, *standings))
