"""The search itself: rounds of runs until the rows give an answer.

- What to run next is a function of the history and the rows, so a search that was interrupted goes on where it was.
- A round is what runs at once. Points that turn out to be untestable are replaced within the round.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from seatrial.regress.bisect.record import Answer, History, Mark
from seatrial.regress.bisect.reports.view import percent
from seatrial.regress.bisect.running.session import Session, Wanted
from seatrial.regress.bisect.search.choose import Assessment, Settings, answer, assess, choose, known_by_contents, useless


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
        session.tell(f"round {last}: {progress(state, found)}, running {len(picked)}")
        _round(session, history, how, picked, last, number)


def progress(state: Assessment, found: Answer) -> str:
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
