"""Into a submodule: when the first bad commit moves one, which commit of the submodule is it?

- First the superproject at its first bad commit is tried with the submodule where it was before. Good: the move is guilty, and the
  commits in between are searched, each with the superproject at that commit. Bad: the superproject's own part of the commit is guilty,
  and the submodule is acquitted. What is found inside may move a submodule in turn, and is followed likewise.
- Of several submodules that move at once, all are first tried together where they were before. If that is good, but none of them alone
  is, nobody can say which one it is.
- A submodule that was moved back, or to another branch, is named, not searched: nothing lies between.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from seatrial.model.errors import UserError
from seatrial.regress.bisect.convict import try_state
from seatrial.regress.bisect.forks import check_forks
from seatrial.regress.bisect.history import read_history
from seatrial.regress.bisect.kept import Kept, recall
from seatrial.regress.bisect.record import Answer, History, Mark, Pin, Point, Repo, Standing
from seatrial.regress.bisect.rounds import search
from seatrial.regress.bisect.running.session import Session, Wanted
from seatrial.regress.bisect.search.choose import Settings
from seatrial.regress.bisect.trees.making import moved_submodules
from seatrial.regress.bisect.trees.stores import TreeError

NUMBERS = 100
"""The history inside the k-th submodule that a commit of history n moves has the number 100 n + k: the same in every sitting."""


@dataclass(frozen=True, slots=True)
class _Move:
    """A submodule that a point moves."""

    bad: Point
    pin: Pin
    """The submodule where it was before. Its name is none that a repository of the plan can have."""
    new: str
    outer: int
    """Number of the history of `bad`."""
    number: int
    """Number of the history inside."""

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


def descend(session: Session, history: History, found: Answer, how: Settings) -> Answer:
    """The answer, with the submodule's commit in it when a move of a submodule is guilty."""
    if found.state != "found":
        return found
    bad = next(point for point in history.points if point.id == found.suspects[0].point)
    return _below(session, found, bad, lambda: session.kitchen.stores.git_dir(session.plan.repos[0].name), how, 0)


def _below(session: Session, found: Answer, bad: Point, git_dir: Callable[[], Path], how: Settings, outer: int) -> Answer:
    """Look into every submodule that the last commit of a bad point moves; `git_dir` says where that commit is."""
    top, moves = bad.pins[-1], []
    for place, (inner, old, new) in enumerate(_moved(session, git_dir, top.commit, outer), start=1):
        path = inner if top.place == "." else f"{top.place}/{inner}"
        if old is None:
            note = f"{bad.commit[:12]} adds the submodule {path} at {new[:12]}: there is nothing before it to compare with"
            found = found.model_copy(update={"notes": (*found.notes, note)})
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
        found = _guilty(session, found, move, how) if mark is Mark.GOOD else _with(found, _not_guilty(move, mark, decided))
    return found


def _moved(session: Session, git_dir: Callable[[], Path], commit: str, outer: int) -> tuple[tuple[str, str | None, str], ...]:
    def ask() -> Kept:
        return Kept(moves=moved_submodules(git_dir(), commit))

    return recall(session.directory / f"moves-{outer}.json", commit, ask, session.redactor, frozen=session.frozen).moves


def _before(session: Session, moves: Sequence[_Move]) -> Mark | None:
    """What the bad point says with these submodules as they were before."""
    first, paths = moves[0], " and ".join(move.path for move in moves)
    what = f"{first.bad.commit[:12]} with {paths} as {'it was' if len(moves) == 1 else 'they were'} before"
    return try_state(session, (*first.bad.pins, *(move.pin for move in moves)), first.pin.repo, what, first.number)


def _not_guilty(move: _Move, mark: Mark | None, decided: bool) -> Standing:
    if mark is None:
        return Standing(repo=move.path, verdict="unknown", why=f"{move.text}; as it was before it cannot be tested")
    why = f"{move.bad.commit[:12]} fails with the submodule as it was before, too"
    if not decided:
        return Standing(repo=move.path, verdict="unknown", why=f"{why}, but another submodule moves there as well, which may hide it")
    return Standing(repo=move.path, verdict="acquitted", why=why)


def _guilty(session: Session, found: Answer, move: _Move, how: Settings) -> Answer:
    """Search the submodule's own commits."""
    why = f"{move.bad.commit[:12]} is good with the submodule as it was before"
    file = session.directory / f"history-{move.number}.json"
    kept = recall(file, move.key, lambda: _inside(session, move), session.redactor, frozen=session.frozen)
    if kept.why:
        why = f"{why}; its own commits cannot be searched: {kept.why}"
        return _with(found, Standing(repo=move.path, verdict="convicted", why=why))
    inner = History(kept.points)
    session.tell(f"{move.text}, and that is the cause: {len(inner.points) - 1} commits of {move.path} to search")
    _take_ends(session, inner, move)
    deeper = check_forks(session, inner, search(session, inner, how, lambda _: None, move.number), move.number)
    notes = deeper.notes
    if deeper.state != "found":
        names = ", ".join(suspect.commit[:12] for suspect in deeper.suspects)
        notes = (*notes, f"{move.path}: {f'one of {names}: ' if names else ''}{deeper.why}")
    found = found.model_copy(update={"notes": (*found.notes, *notes), "flaky": (*found.flaky, *deeper.flaky)})
    if deeper.state != "found":
        return _with(found, Standing(repo=move.path, verdict="convicted", why=why))
    bad = next(point for point in inner.points if point.id == deeper.suspects[0].point)
    standing = Standing(repo=move.path, verdict="convicted", commit=bad.commit, subject=bad.subject, confidence=deeper.confidence, why=why)
    return _below(session, _with(found, standing), bad, lambda: _store(session, move), how, move.number)


def _inside(session: Session, move: _Move) -> Kept:
    """The commits between, or why they cannot be searched."""
    try:
        return Kept(points=_history(session, move, _store(session, move)).points)
    except (UserError, TreeError) as error:
        return Kept(why=_why_not(error, move))


def _why_not(error: UserError | TreeError, move: _Move) -> str:
    """Without the words of the command line, which nobody gave for a submodule."""
    if isinstance(error, TreeError):
        return error.message
    return f"{move.new[:12]} does not come after {move.pin.commit[:12]}: it was moved back, or to another branch"


def _store(session: Session, move: _Move) -> Path:
    """A store that holds both ends."""
    main, stores = move.bad.pins[0], session.kitchen.stores
    return [stores.submodule(main.repo, move.path, commit, at=main.commit) for commit in (move.pin.commit, move.new)][-1]


def _history(session: Session, move: _Move, git_dir: Path) -> History:
    """The submodule's commits, each with everything else as it is at the bad point."""
    bad, pin = move.bad, move.pin
    repo = Repo(name=pin.repo, path=str(git_dir), good=pin.commit, bad=move.new, place=pin.place)
    return History(
        tuple(
            point.model_copy(update={"pins": (*bad.pins, *point.pins), "contents": f"{bad.contents}:{pin.place}:{point.contents}"})
            for point in read_history(repo, session.plan.first_parent).points
        )
    )


def _take_ends(session: Session, inner: History, move: _Move) -> None:
    """Both ends are known: the state before was just tried, and the state after is the bad point itself. A sitting that was killed
    in between has noted some of it."""
    good, bad = inner.points[0], inner.points[-1]
    known = [row for row in session.evidence(move.outer) if row.point == move.bad.id and row.mark is not Mark.SKIP]
    before, after = f"{move.path} as it was before", f"{move.bad.commit[:12]} moves {move.path} to this commit"
    for end, rows, what in ((good, session.convictions(good.id), before), (bad, known, after)):
        noted = sum(row.stage == "ends" and row.point == end.id for row in session.evidence(move.number))
        for row in rows[noted:]:
            session.note(Wanted(end, "ends", 0, move.number), row.mark, f"known from run {row.number}: {what}", row)


def _with(found: Answer, *standings: Standing) -> Answer:
    """The answer with what is known of submodules."""
    return found.model_copy(update={"standings": (*found.standings, *standings)})
