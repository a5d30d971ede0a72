"""From the verdict of the ladder to that of the whole probe: the Bridge's own tests join it, and an edited checkout takes a Pass back.

Nothing here makes a verdict better.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from seatrial.evidence.redact import Redactor
from seatrial.evidence.repos import differs
from seatrial.model.record import RepoState
from seatrial.model.verdict import Boundary, Verdict, worst
from seatrial.proving.bridge.own_tests import OwnTests, own_tests
from seatrial.proving.bridge.record import Judged
from seatrial.proving.bridge.run import Setup
from seatrial.proving.driver import Tell


def run_own_tests(setup: Setup, judged: Judged, left_s: float, tell: Tell) -> Judged:
    """The Bridge's own unit tests that match the diff, when a change of a Bridge is under test, in the time that is left."""
    repo = next((state for state in setup.changes if "megatron.bridge" in state.packages), None)
    if repo is None:
        return judged
    if repo.base is None or not repo.changed:
        note = f"{repo.name}: its own tests were not run: no change against a base is known (name --base)"
        return judged.model_copy(update={"limitations": (*judged.limitations, note)})
    if left_s <= 0:
        late = "not run: no time was left of the deadline (raise --deadline, or leave them out with --no-tests)"
        return joined(judged, OwnTests(verdict=Verdict.BLOCKED, reason=late))
    return joined(judged, own_tests(setup.python, repo, setup.out / "own-tests", left_s, repo.base, tell))


def joined(judged: Judged, found: OwnTests) -> Judged:
    """What the ladder and the Bridge's own tests prove together: the worse of the two. The tests are a deliverable of their own.

    A checkout that has none of them is no worse for it: that is said among the limitations.
    """
    said: dict[str, object] = {
        "own_tests": found,
        "limitations": (*judged.limitations, *(f"own tests: {note}" for note in found.notes)),
    }
    if found.dead:
        first = "; ".join(found.dead[:3])
        dead = f"{len(found.dead)} paths that upstream's skills name are dead: {first}; all in probe.json"
        said["follow_ups"] = (*judged.follow_ups, dead)
    if found.verdict is Verdict.SKIPPED:
        said["limitations"] = (*judged.limitations, f"own tests: none ran: {found.reason}", *(f"own tests: {note}" for note in found.notes))
    verdict = worst((judged.verdict, found.verdict))
    if verdict is not judged.verdict and found.verdict is not Verdict.SKIPPED:
        boundary = Boundary.PROVIDER if verdict is Verdict.FAIL else Boundary.ENVIRONMENT
        said |= {"verdict": verdict, "reason": f"the Bridge's own tests: {found.reason}", "boundary": boundary}
    return judged.model_copy(update=said)


def unless_edited(judged: Judged, changes: Sequence[RepoState], evidence: Path) -> Judged:
    """A checkout that was edited while the ladder ran is not the one that was recorded in `evidence`: no Pass."""
    if judged.verdict is not Verdict.PASS:
        return judged
    redactor = Redactor(os.environ)
    for repo in changes:
        how = differs(repo, evidence, redactor)
        if how is not None:
            reason = f"{repo.path} was edited while it was probed: {how}"
            return judged.model_copy(update={"verdict": Verdict.BLOCKED, "reason": reason, "boundary": Boundary.ENVIRONMENT})
    return judged
