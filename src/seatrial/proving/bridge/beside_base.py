"""A ladder that failed, beside the same ladder on the base of the change: what fails there too is Blocked.

- Without a known base, or where it cannot be run, a failure without a measured check is Blocked: an import or a call that does
  not fit may be the machine's, or older than the change. What was measured and missed stays a Fail.
- Nothing here makes a Pass.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from seatrial.model.errors import BlockedError, UserError
from seatrial.model.record import OwnVerdict
from seatrial.model.verdict import Verdict
from seatrial.proving.bridge.record import Judged
from seatrial.proving.bridge.run import Setup, prove
from seatrial.proving.driver import Tell
from seatrial.trial.base import same_files, shown
from seatrial.trial.gate_base import fresh, uncompared
from seatrial.trial.unchanged import unchanged

BEFORE = "before"
"""Below the probe's directory: facts and logs of the base."""
LEAST_S = 30.0
"""With less time left the base is not begun."""


def beside_base(setup: Setup, judged: Judged, left_s: float, tell: Tell) -> Judged:
    """The verdict beside the base; a verdict that is no Fail stays."""
    if judged.verdict is not Verdict.FAIL or not setup.changes:
        return judged
    why, note = _excuse(setup, judged, left_s, tell)
    if why:
        own = OwnVerdict(verdict=judged.verdict, reason=judged.reason, boundary=judged.boundary)
        return judged.model_copy(update={"verdict": Verdict.BLOCKED, "reason": f"{why}: {judged.reason}", "own": own})
    return judged.model_copy(update={"limitations": (*judged.limitations, note)})


def _excuse(setup: Setup, judged: Judged, left_s: float, tell: Tell) -> tuple[str, str]:
    """Why the failures are not the change's, or nothing; and a note on what was compared."""
    found = _as_stored(judged)
    bases = [(repo, repo.base) for repo in setup.changes if repo.base]
    states = tuple(repo.model_copy(update={"commit": commit}) for repo, commit in bases)
    if len(bases) < len(setup.changes):
        return uncompared(found, "the state before the change is not known: name --base")
    if same_files(setup.changes):
        return f"nothing differs from the base ({shown(states)}), so there is no change to hold this against", ""
    if left_s < LEAST_S:
        return uncompared(found, "no time was left of the deadline: raise --deadline")
    tell(f"the ladder failed: climbing it at the base ({shown(states)}), to compare")
    try:
        with unchanged(bases, setup.out / f"{BEFORE}-src") as trees:
            before = prove(replace(setup, out=setup.out / BEFORE, changes=trees, deadline_s=left_s), tell)
    except (BlockedError, UserError) as error:
        return uncompared(found, f"the state before the change cannot be run: {error.message}")
    if before.verdict in (Verdict.BLOCKED, Verdict.SKIPPED):
        return uncompared(found, f"the base is {before.verdict}: {before.reason}")
    new = fresh(found, _as_stored(before) if before.verdict is Verdict.FAIL else None)
    if new is None:
        return f"the base ({shown(states)}) fails in the same way", ""
    what = ": ".join(part for part in (new.model, new.rung, new.check) if part)
    return "", f"compared with the base ({shown(states)}): this is new{f': {what}' if what else ''}"


def _as_stored(judged: Judged) -> dict[str, Any]:
    """As probe.json holds it."""
    return {"judged": judged.model_dump(mode="json")}
