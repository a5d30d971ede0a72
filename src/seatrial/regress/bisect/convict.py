"""Several repositories: is the one that was found guilty alone, and are the others innocent?

Histories were put in order of time, so the first bad point names one commit of one repository. That alone is no conviction: another
repository may break it as well, or the commit may need what another one brought. So, with everything else at its good end:
- the repository at its first bad commit: bad convicts it alone; good says that it needs another one;
- every other repository at its bad end: good acquits it, bad convicts it too, of a commit that is still to be found;
- when the found one needs another: both together, the other as it was at the first bad point; bad makes it an accomplice. When no
  single other one is enough, it takes several, and none of them is acquitted.
"""

from __future__ import annotations

from collections.abc import Mapping

from seatrial.regress.bisect.ends import side
from seatrial.regress.bisect.judging.observe import threshold
from seatrial.regress.bisect.record import Answer, History, Mark, Pin, Point, Repo, Standing
from seatrial.regress.bisect.running.session import Session, Wanted

RUNS = 3
"""Runs of one state where there may be noise: the majority, or the mean, decides."""


def convict(session: Session, history: History, found: Answer) -> Answer:
    """The answer with a verdict on every repository. A range that holds several repositories convicts none."""
    repos = {suspect.repo for suspect in found.suspects}
    if found.state == "open" or len(repos) != 1:
        why = f"the suspects are of several repositories: {', '.join(sorted(repos))}" if repos else "no commit is blamed"
        return found.model_copy(update={"standings": tuple(_unknown(repo, why) for repo in session.plan.repos)})
    guilty = repos.pop()
    bad = next(point for point in history.points if point.id == found.first_bad)
    commit = next(pin.commit for pin in bad.pins if pin.repo == guilty)
    mine = _standing_of_found(session, guilty, commit, found)
    together = {pin.repo: {pin.repo: pin.commit, guilty: commit} for pin in bad.pins}
    others = [_standing_of_other(session, repo, mine, together[repo.name]) for repo in session.plan.repos if repo.name != guilty]
    if mine.verdict == "accomplice" and not any(one.verdict == "accomplice" for one in others):
        why = f"{guilty} {commit[:12]} needs what another repository brought, and no single one was seen to be it"
        others = [one.model_copy(update={"verdict": "unknown", "why": why}) if one.verdict == "acquitted" else one for one in others]
    return found.model_copy(update={"standings": (mine, *others)})


def _standing_of_found(session: Session, name: str, commit: str, found: Answer) -> Standing:
    mark = _test(session, {name: commit}, f"{name} at {commit[:12]}, all others at their good ends")
    named = found.suspects[0].commit if found.state == "found" else None
    if mark is Mark.BAD:
        return Standing(repo=name, verdict="convicted", commit=named, why="it fails with all other repositories at their good ends")
    if mark is Mark.GOOD:
        why = "it fails only together with what another repository brought"
        return Standing(repo=name, verdict="accomplice", commit=named, why=why)
    return Standing(repo=name, verdict="unknown", commit=named, why="it could not be tested with the others at their good ends")


def _standing_of_other(session: Session, repo: Repo, guilty: Standing, moved: Mapping[str, str]) -> Standing:
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


def _test(session: Session, moved: Mapping[str, str], what: str) -> Mark | None:
    """What a state says where only some repositories have moved from their good ends; None when it cannot be tested."""
    pins = tuple(Pin(repo=repo.name, commit=moved.get(repo.name, repo.good), place=repo.place) for repo in session.plan.repos)
    return try_state(session, pins, next(iter(moved)), what)


def try_state(session: Session, pins: tuple[Pin, ...], name: str, what: str, number: int = 0) -> Mark | None:
    """Run one state that is on no history's line, as often as noise asks for; what an earlier sitting ran counts."""
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
        session.execute([Wanted(point, "conviction", 0, number)] * min(runs - len(rows), session.plan.jobs))
