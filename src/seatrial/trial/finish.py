"""The end of a trial: from the results of its levels to a stored verdict and every report.

Used by whoever ends it: the conductor, and the one who finds that the conductor was ended by its cluster.
"""

from __future__ import annotations

from pathlib import Path

from seatrial.files import write_json
from seatrial.model.errors import UserError
from seatrial.model.knowledge import Level
from seatrial.model.loop import Loop
from seatrial.model.record import LevelResult, PlannedLevel, SideResult, Trial
from seatrial.model.series import Metrics
from seatrial.model.verdict import Boundary, Verdict, worst
from seatrial.report.write import write_reports
from seatrial.trial import digests, rundir
from seatrial.trial.level_files import read_level_metrics

FINAL = (Verdict.PASS, Verdict.FAIL)
"""Verdicts that `resume` keeps. What was Blocked or cut short is run again."""


def is_final(result: LevelResult | SideResult) -> bool:
    """Whether a run came to a verdict of its own, whatever the comparison with its base made of it."""
    return (result.own.verdict if result.own else result.verdict) in FINAL


def not_run(level: Level, planned: PlannedLevel, verdict: Verdict, reason: str, boundary: Boundary | None = None) -> LevelResult:
    """The result of a level of which no process ran, or of which nothing is stored."""
    return LevelResult(
        number=planned.number,
        name=planned.name,
        title=planned.title,
        verdict=verdict,
        reason=reason,
        boundary=boundary,
        proves=level.proves,
    )


def conclude(trial: Trial, results: tuple[LevelResult, ...], finished: bool) -> Trial:
    """The trial with the verdict that its levels, and the tests before them, give; one that is not finished can be resumed."""
    judged = [(result.verdict, f"level {result.number}: {result.reason}") for result in results]
    judged += [(Verdict.SKIPPED, f"part of level {result.number}: {why}") for result in results for why in result.left_out]
    judged += [(side.verdict, f"{side.name}{f' at {side.boundary}' if side.boundary else ''}: {side.reason}") for side in trial.sides]
    if not trial.plan.levels:  # whatever else passed, no level did
        judged.append((Verdict.SKIPPED, "nothing to run: the changed paths are known to need no level"))
    verdict = worst(found for found, _ in judged)
    decisive = next((reason for found, reason in judged if found is verdict), None)
    reason = decisive if decisive and verdict is not Verdict.PASS else "every requested level passed"
    status = "done" if finished else "running"
    return trial.model_copy(update={"levels": results, "verdict": verdict, "reason": reason, "status": status, "ended": rundir.now()})


def store(path: Path, loop: Loop, trial: Trial) -> None:
    """Write the trial and its reports. The caller holds the directory."""
    write_json(path / digests.EVIDENCE / digests.IMPORTS, [item.model_dump(mode="json") for item in trial.imports])
    rundir.save(path, trial)
    report(path, loop, trial)


def report(path: Path, loop: Loop, trial: Trial) -> None:
    """Write the reports of a trial."""
    write_reports(path, trial, loop.title, loop.levels(), _metrics(path, loop, trial))


def _metrics(path: Path, loop: Loop, trial: Trial) -> dict[str, Metrics]:
    """Metrics by the name of the level directory."""
    found = {}
    for place in (Path(result.directory) for result in trial.levels if result.directory):
        try:
            found[place.name] = read_level_metrics(loop, path / place)
        except UserError:
            if not trial.alterations:  # which name the file
                raise
    return found
