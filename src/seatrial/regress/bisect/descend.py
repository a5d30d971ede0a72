"""Into a submodule: when the first bad commit moves one, which commit of the submodule is it?

- First the superproject at its first bad commit is tried with the submodule where it was before. Good: the move is guilty, and the
  commits in between are searched, each with the superproject at that commit. Bad: the superproject's own part of the commit is guilty,
  and the submodule is acquitted.
- A submodule that was moved back, or to another branch, is named, not searched: nothing lies between.
"""

from __future__ import annotations

from pathlib import Path

from seatrial.model.errors import UserError
from seatrial.regress.bisect.convict import try_state
from seatrial.regress.bisect.history import read_history
from seatrial.regress.bisect.record import Answer, History, Mark, Pin, Point, Repo, Standing
from seatrial.regress.bisect.rounds import search
from seatrial.regress.bisect.running.session import Session, Wanted
from seatrial.regress.bisect.search import Settings
from seatrial.regress.bisect.trees.making import moved_submodules
from seatrial.regress.bisect.trees.stores import TreeError


def descend(session: Session, history: History, found: Answer, how: Settings) -> Answer:
    """The answer, with the submodule's commit in it when a move of a submodule is guilty."""
    if found.state != "found":
        return found
    main = session.plan.repos[0]
    bad = next(point for point in history.points if point.id == found.suspects[0].point)
    for number, (path, old, new) in enumerate(moved_submodules(session.kitchen.stores.git_dir(main.name), bad.commit), start=1):
        found = _into(session, found, bad, (path, old, new), how, number)
    return found


def _into(session: Session, found: Answer, bad: Point, move: tuple[str, str | None, str], how: Settings, number: int) -> Answer:
    path, old, new = move
    moved = f"{bad.commit[:12]} moves {path} from {(old or 'nothing')[:12]} to {new[:12]}"
    if old is None:
        return _noted(found, f"{moved}: the submodule is new there, so there is nothing before it to compare with")
    before = (*bad.pins, Pin(repo=path, commit=old, place=path))
    mark = try_state(session, before, path, f"{bad.commit[:12]} with {path} as it was before", number)
    if mark is None:
        return _noted(found, f"{moved}; with the submodule as it was before it cannot be tested")
    if mark is Mark.BAD:
        why = f"{bad.commit[:12]} fails with the submodule as it was before, too"
        return _with(found, Standing(repo=path, verdict="acquitted", commit=None, why=why))
    try:
        inner = _history(session, bad, Repo(name=path, path=str(_store(session, bad, path, (old, new))), good=old, bad=new, place=path))
    except (UserError, TreeError) as error:
        return _noted(found, f"{moved}, and that is the cause; its own commits cannot be searched: {error.message}")
    session.tell(f"{moved}, and that is the cause: {len(inner.points) - 1} commits of {path} to search")
    _take_ends(session, inner, bad, number)
    deeper = search(session, inner, how, lambda _: None, number)
    commit = deeper.suspects[0].commit if deeper.state == "found" else None
    why = f"{bad.commit[:12]} is good with the submodule as it was before"
    return _with(found, Standing(repo=path, verdict="convicted", commit=commit, why=why), deeper)


def _store(session: Session, bad: Point, path: str, commits: tuple[str, str]) -> Path:
    """A store that holds both."""
    main = session.plan.repos[0].name
    return [session.kitchen.stores.submodule(main, path, commit, at=bad.commit) for commit in commits][-1]


def _history(session: Session, bad: Point, repo: Repo) -> History:
    """The submodule's commits, each with the superproject at its first bad commit."""
    inner = read_history(repo, session.plan.first_parent)
    return History(
        tuple(
            point.model_copy(update={"pins": (*bad.pins, *point.pins), "contents": f"{bad.contents}:{repo.place}:{point.contents}"})
            for point in inner.points
        )
    )


def _take_ends(session: Session, inner: History, bad: Point, number: int) -> None:
    """Both ends are known: the state before was just tried, and the state after is the first bad commit itself."""
    if any(row.history == number and row.stage == "ends" for row in session.rows):
        return
    good_rows = session.convictions(inner.points[0].id)
    bad_rows = [row for row in session.evidence() if row.point == bad.id and row.mark is Mark.BAD]
    for row in good_rows:
        session.note(Wanted(inner.points[0], "ends", 0, number), row.mark, f"run {row.number}", row)
    for row in bad_rows:
        session.note(Wanted(inner.points[-1], "ends", 0, number), row.mark, f"run {row.number}: {bad.commit[:12]} as it is", row)


def _noted(found: Answer, note: str) -> Answer:
    return found.model_copy(update={"notes": (*found.notes, note)})


def _with(found: Answer, standing: Standing, deeper: Answer | None = None) -> Answer:
    """The answer with what is known of a submodule."""
    notes = (*found.notes, *(deeper.notes if deeper else ()))
    if deeper is not None and deeper.state == "range":
        notes = (*notes, f"{standing.repo}: one of {', '.join(suspect.commit[:12] for suspect in deeper.suspects)}: {deeper.why}")
    return found.model_copy(update={"standings": (*found.standings, standing), "notes": notes})
