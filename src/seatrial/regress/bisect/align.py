"""Several histories as one: the states that somebody who always took the newest of each repository would have seen.

- Each point moves one repository by one commit of its line of first parents and pins all of them.
- The order is that of commit times, and each repository's own order is kept: a commit whose clock was wrong counts as
  made when the newest before it was.
- The first point has every repository at its good end, the last one every repository at its bad end.
- The order between repositories is that of the clocks, which nobody ran at the time: what is found says which move broke the
  combination, and a conviction needs further runs.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Sequence

from seatrial.model.errors import UserError
from seatrial.regress.bisect.record import History, Point, Repo


def aligned(histories: Sequence[tuple[Repo, History]]) -> History:
    """One line of points over all repositories. The histories must be read with `first_parent`."""
    names = Counter(repo.name for repo, _ in histories)
    twice = [name for name, count in names.items() if count > 1]
    if twice:
        raise UserError(f"two repositories have the name {twice[0]}", "give each a name of its own")
    for repo, history in histories:
        _check_line(repo, history)
    standing = [history.points[0] for _, history in histories]
    points = [_joined(standing, 0, ())]
    for _, which, place in heapq.merge(*(_moves(which, history) for which, (_, history) in enumerate(histories))):
        standing[which] = histories[which][1].points[place]
        points.append(_joined(standing, which, (len(points) - 1,)))
    return History(tuple(points))


def _moves(which: int, history: History) -> Iterator[tuple[int, int, int]]:
    """Time, repository and index of each commit after the good end; times never go back."""
    time = history.points[0].time
    for place, point in enumerate(history.points[1:], start=1):
        time = max(time, point.time)
        yield time, which, place


def _joined(standing: Sequence[Point], moved: int, parents: tuple[int, ...]) -> Point:
    return standing[moved].model_copy(
        update={
            "parents": parents,
            "pins": tuple(pin for point in standing for pin in point.pins),
            "contents": "+".join(point.contents for point in standing),
        }
    )


def _check_line(repo: Repo, history: History) -> None:
    """Side branches would be laid one after the other, as states that never were."""
    for place, point in enumerate(history.points):
        # The line may pass beside the good end; then its first commit has no parent here.
        allowed = ((), (0,)) if place == 1 else ((),) if place == 0 else ((place - 1,),)
        if point.parents not in allowed:
            raise ValueError(f"{repo.name}: the history is not a line at {point.commit}: read it with first_parent")
