"""A branch that left the main line before the good end: is its first bad commit to blame, or was the branch bad from its start?

- The search takes whatever lies before the good end as good. A branch that forked off earlier lacks what was mended since, so it may
  have been bad all along; its first commit would be blamed for that.
- So the parents of suspects that lie outside of the history are run. Where one is bad, nobody is blamed, and the way out is named.
"""

from __future__ import annotations

from pathlib import Path

from seatrial.evidence.git import git, line
from seatrial.regress.bisect.convict import try_state
from seatrial.regress.bisect.record import Answer, History, Mark, Pin, Repo
from seatrial.regress.bisect.running.session import Session


def check_forks(session: Session, history: History, found: Answer) -> Answer:
    """The answer, unless a suspect only continues what was bad before it. For one repository."""
    if found.state == "open":
        return found
    repo, notes = session.plan.repos[0], list(found.notes)
    for suspect in found.suspects:
        for parent in _outside(session, history, repo, suspect.commit):
            pins = (Pin(repo=repo.name, commit=parent, place=repo.place),)
            mark = try_state(session, pins, repo.name, f"{parent[:12]}, from which {suspect.commit[:12]} forked before the good end")
            if mark is Mark.BAD:
                return _blames_nobody(found, suspect.commit, parent)
            if mark is None:
                notes.append(f"{parent[:12]}, the parent of {suspect.commit[:12]}, lies before the good end and could not be tested")
    return found.model_copy(update={"notes": tuple(notes)})


def _outside(session: Session, history: History, repo: Repo, commit: str) -> list[str]:
    """The parents that no point of the history stands for; a child of the good end has none."""
    parents = line(git(Path(repo.path), "--no-replace-objects", "rev-list", "--parents", "--max-count=1", commit)).split()[1:]
    return [parent for parent in parents[: 1 if session.plan.first_parent else None] if parent not in history.by_id]


def _blames_nobody(found: Answer, commit: str, parent: str) -> Answer:
    why = (
        f"{commit[:12]} is bad, but so is {parent[:12]} before it: its branch forked off before the good end, and was bad already. "
        "To search the main line alone: --first-parent"
    )
    return found.model_copy(update={"state": "open", "suspects": (), "confidence": 0.0, "last_good": None, "first_bad": None, "why": why})
