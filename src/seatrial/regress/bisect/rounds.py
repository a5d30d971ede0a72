"""The search itself: rounds of runs until the rows give an answer.

- What to run next is a function of the history and the rows, so a search that was interrupted goes on where it was.
- A round is what runs at once. Points that turn out to be untestable are replaced within the round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from seatrial.regress.bisect.record import Answer, History, Mark
from seatrial.regress.bisect.running.session import Session, Wanted
from seatrial.regress.bisect.search.choose import Settings, answer, assess, choose, known_by_contents, useless


def search(session: Session, history: History, how: Settings, write: Callable[[Answer], None], number: int = 0) -> Answer:
    """Run points until there is an answer; `write` is told how it stands before every round."""
    last = max((row.round for row in session.evidence(number)), default=0)
    while True:
        for like in known_by_contents(history, session.evidence(number)):
            point = history.points[history.by_id[like.point]]
            # The notes say that it is a copy: with noise it would count as a run of its own.
            session.note(Wanted(point, "search", last, number), like.mark, like.reason, like, like.notes)
        state = assess(history, session.evidence(number), how)
        found = answer(state)
        write(found)
        picked = choose(state, session.plan.jobs) if found.state == "open" else []
        if not picked:
            return found
        last += 1
        session.tell(f"round {last}: {state.suspects.bit_count()} suspects left, running {len(picked)}")
        _round(session, history, how, picked, last, number)


def _round(session: Session, history: History, how: Settings, picked: Sequence[int], last: int, number: int) -> None:
    """Run the picked points; as long as all that was learnt is that points cannot be tested, others take their place."""
    while picked:
        wanted = [Wanted(history.points[index], "search", last, number) for index in picked]

        def superfluous(running: Sequence[Wanted]) -> set[int]:
            state = assess(history, session.evidence(number), how)
            indices = [history.by_id[one.point.id] for one in running]
            gone = useless(state, indices)
            return {place for place, index in enumerate(indices) if index in gone}

        rows = session.execute(wanted, superfluous)
        if any(row.mark is not Mark.SKIP for row in rows):
            return
        state = assess(history, session.evidence(number), how)
        picked = choose(state, session.plan.jobs) if answer(state).state == "open" else []
