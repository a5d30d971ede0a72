"""The isolation matrix: each rerun beside the original, and what they say together.

- Missed checks identify a failure: it is gone when the rerun reached its steps and meets every one of them.
- Without a missed check the crash does: it is gone when every process of the rerun ended well, still there when the same
  known failure or the same cause ends it again.
- What was Blocked, skipped or run in another environment is no evidence.
- A single Pass points to a suspect and proves nothing; without the failure in the unchanged rerun it is not even that.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from seatrial.model.isolation import Failure, Measured, Rerun
from seatrial.model.record import LevelResult, Trial
from seatrial.model.verdict import Verdict
from seatrial.trial.finish import FINAL

VARYING = re.compile(r"(/[^\s/'\"]+)+/|0x[0-9a-f]+|\b\d{4,}\b")
"""Directories, addresses, process numbers and ports: two runs never share them."""
PARITY = "run Bridge logits/import/export parity next"


def first_missed(result: LevelResult) -> Measured | None:
    """The check that the level missed first."""
    missed = next((check for check in result.checks if not check.passed), None)
    return Measured(name=missed.name, value=missed.value, threshold=missed.threshold) if missed else None


def compared(rerun: Rerun, original: Trial, failed: LevelResult, trial: Trial) -> Rerun:
    """The rerun with its verdict and with what became of the original failure."""
    result = next((level for level in trial.levels if level.number == failed.number), None)
    if result is None:
        return rerun.model_copy(update={"reason": trial.reason, "verdict": trial.verdict, "failure": "no evidence"})
    failure, note = _failure(failed, result)
    if result.verdict in FINAL and _other_environment(original, trial):
        failure, note = "no evidence", "it ran in another environment than the original"
    log = Path(rerun.directory) / result.directory / "run.log" if result.directory else None
    return rerun.model_copy(
        update={
            "verdict": result.verdict,
            "reason": result.reason,
            "failure": failure,
            "note": note,
            "measured": _same_check(failed, result),
            "log": str(log or ""),
        }
    )


def _other_environment(original: Trial, trial: Trial) -> bool:
    before, after = original.environment, trial.environment
    return before is not None and after is not None and before.fingerprint != after.fingerprint


def _failure(failed: LevelResult, result: LevelResult) -> tuple[Failure, str]:
    """What became of the failure, and a note where it needs one."""
    if result.verdict not in FINAL:
        return "no evidence", ""
    if result.verdict is Verdict.PASS:
        return "gone", ""
    missed = {check.name for check in failed.checks if not check.passed}
    return _of_checks(missed, result) if missed else _of_crash(failed, result)


def _of_checks(missed: set[str], result: LevelResult) -> tuple[Failure, str]:
    now = {check.name: check.passed for check in result.checks if check.name in missed}
    if not all(now.values()):
        return "still there", ""
    if set(now) != missed or not _reached(result):
        return "another failure", "what the original missed was not measured"
    return "gone", "the rerun fails for another reason"


def _of_crash(failed: LevelResult, result: LevelResult) -> tuple[Failure, str]:
    if result.phases and _reached(result) and all(phase.ended == "exited" and phase.exit_code == 0 for phase in result.phases):
        return "gone", "the rerun fails for another reason"
    return ("still there", "") if _end(failed) == _end(result) else ("another failure", "it ends in another way than the original")


def _end(result: LevelResult) -> tuple[str, str]:
    """What tells one crash from another: its known failure, or its cause without what differs from run to run, or how it was cut."""
    found = result.diagnosis
    if found is not None and found.signature is not None:
        return "known", found.signature
    if found is not None and found.cause:
        return "cause", VARYING.sub("", found.cause)
    return "ended", ", ".join(f"{phase.name} {phase.ended} {phase.exit_code}" for phase in result.phases)


def _reached(result: LevelResult) -> bool:
    expected, reached = result.steps_expected, result.steps_reached
    return expected is None or (reached is not None and reached >= expected)


def _same_check(failed: LevelResult, result: LevelResult) -> Measured | None:
    """The check that the original missed first, as the rerun measured it."""
    missed = first_missed(failed)
    found = next((check for check in result.checks if missed and check.name == missed.name), None)
    return Measured(name=found.name, value=found.value, threshold=found.threshold) if found else None


def conclude(reruns: Sequence[Rerun], crashed: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Suspects and sentences; the first rerun is the one that changes nothing."""
    control, others = reruns[0], reruns[1:]
    ran = [item for item in others if item.failure != "not run"]
    lines: list[str] = []
    gone = [item for item in others if item.failure == "gone"]
    unstable = control.failure in ("gone", "another failure")
    if unstable:
        how = "does not show it" if control.failure == "gone" else "fails in another way"
        lines.append(f"the failure does not repeat: the unchanged rerun {how}, so no suspect can be named")
    elif gone:
        lines += [_suspect(item) for item in gone]
        if control.failure != "still there":
            why = "was not run" if control.failure == "not run" else f"is {control.failure}"
            lines.append(f"the unchanged rerun {why}: that the failure comes and goes is not excluded")
    elif ran and all(item.failure == "still there" for item in others):
        lines.append(f"the failure is not in any of these: {'read its first cause in the log again' if crashed else PARITY}")
    elif ran:
        lines.append("no rerun took the failure away so far")
    else:
        lines.append("no rerun but the unchanged one was judged")
    lines += [f"{item.name} is no evidence: {item.note or item.reason}" for item in reruns if item.failure == "no evidence"]
    lines += [f"{item.name} failed in another way: {item.reason}" for item in others if item.failure == "another failure"]
    left = [item.name for item in reruns if item.failure == "not run"]
    if left:
        lines.append(f"not run: {', '.join(left)}")
    lines.append("the original stays a Fail")
    suspects = () if unstable else tuple(item.suspect for item in gone)
    return suspects, tuple(lines)


def _suspect(item: Rerun) -> str:
    """One rerun without the failure."""
    if item.verdict is Verdict.PASS:
        how = "reduced-optimization pass" if item.reduced else "passes"
    else:
        how = f"does not show the failure, though it is no Pass ({item.reason})"
    return f"{item.name}: {how}; it points to {item.suspect}"
