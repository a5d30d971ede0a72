"""A branch that left the main line before the good end: is its first bad commit to blame, or was the branch bad from its start?

- The search takes whatever lies before the good end as good. A branch that forked off earlier lacks what was mended since, so it may
  have been bad all along; its first commit would be blamed for that.
- So the parents of suspects that lie outside of the history are run, with everything else as it is at the suspect: other repositories,
  or the superproject of a submodule. Where one is bad, nobody is blamed, and the way out is named.
"""

from __future__ import annotations

from seatrial.regress.bisect.convict import try_state
from seatrial.regress.bisect.record import Answer, History, Mark
from seatrial.regress.bisect.running.session import Session


def check_forks(session: Session, history: History, found: Answer, number: int = 0) -> Answer:
    """The answer, unless a suspect only continues what was bad before it. `number` is that of the history."""
    if found.state == "open":
        return found
    notes = list(found.notes)
    for suspect in found.suspects:
        point = history.points[history.by_id[suspect.point]]
        for parent in point.outside:
            pins = tuple(pin.model_copy(update={"commit": parent}) if pin.repo == point.repo else pin for pin in point.pins)
            what = f"{parent[:12]}, from which {point.commit[:12]} forked before the good end"
            mark = try_state(session, pins, point.repo, what, number)
            if mark is Mark.BAD:
                return _blames_nobody(session, found, point.commit, parent)
            if mark is None:
                notes.append(f"{parent[:12]}, the parent of {point.commit[:12]}, lies before the good end and could not be tested")
    return found.model_copy(update={"notes": tuple(notes)})


def _blames_nobody(session: Session, found: Answer, commit: str, parent: str) -> Answer:
    on_line = session.plan.first_parent or len(session.plan.repos) > 1
    way_out = "Name a good end that is on the line of first parents" if on_line else "To search the main line alone: --first-parent"
    forked = "its branch forked off before the good end, and was bad already"
    why = f"{commit[:12]} is bad, but so is {parent[:12]} before it: {forked}. {way_out}"
    return found.model_copy(update={"state": "open", "suspects": (), "confidence": 0.0, "last_good": None, "first_bad": None, "why": why})
