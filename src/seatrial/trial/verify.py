"""Reads a stored trial again: what its files support now, and what a resume must share with the beginning."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from seatrial.core.errors import BlockedError, UserError
from seatrial.core.files import read_json, read_model
from seatrial.core.loop import Context
from seatrial.core.records import (
    Alteration,
    CheckResult,
    EnvironmentRecord,
    LevelResult,
    PhaseOutcome,
    RepoState,
    SideResult,
    Trial,
    replace,
)
from seatrial.core.text import unique
from seatrial.core.verdict import Boundary, Verdict, worst
from seatrial.evidence.redact import Redactor
from seatrial.evidence.repos import differs
from seatrial.loops import loop_of
from seatrial.metrics.read import read_metrics
from seatrial.report.outcomes import RECORD, altered_words
from seatrial.trial import run_dir
from seatrial.trial.conclude import assess, conclude, is_final
from seatrial.trial.level import Limits, RunContext
from seatrial.trial.staging import environment_differences

Result = TypeVar("Result", LevelResult, SideResult)
_SETTLED = {"verdict", "reason", "boundary", "own", "follow_ups"}
"""What the comparison with the base may have written to one of the two records of a level, when Seatrial was killed."""
_ODD: tuple[type[Exception], ...] = (UserError, BlockedError, OSError, ArithmeticError, AssertionError, AttributeError, LookupError)
_ODD += (RecursionError, TypeError, ValueError)
"""What a judge may stumble over in files that somebody altered."""


def load(path: Path) -> Trial:
    """The trial of a run directory, as its files support it."""
    return verified(path, run_dir.read(path))


def verified(path: Path, trial: Trial) -> Trial:
    """The trial as its files support it, with what was altered; the same where nothing was."""
    found = examine(path, trial)
    if not found:
        return replace(trial, alterations=())
    levels = tuple(_level(path, trial, level, _of(found, level)) for level in trial.levels)
    sides = tuple(_blocked(side, _of(found, side)) if side.verdict is Verdict.PASS else side for side in trial.sides)
    made = replace(trial, levels=levels, sides=sides, alterations=found)
    if trial.verdict is None:
        return made
    judged = conclude(made, levels, finished=True)
    update: dict[str, object] = {"verdict": judged.verdict, "reason": judged.reason}
    if judged.verdict is not trial.verdict and worst([trial.verdict, judged.verdict or Verdict.BLOCKED]) is trial.verdict:
        update = {"verdict": trial.verdict, "reason": trial.reason}
    whole = [one for one in found if not one.owner]
    if whole and update["verdict"] not in (Verdict.FAIL, Verdict.BLOCKED):
        update = {"verdict": Verdict.BLOCKED, "reason": altered_words(whole)}
    return replace(made, **update)


def examine(path: Path, trial: Trial) -> tuple[Alteration, ...]:
    """Everything of a trial that is not as it was recorded. Results that are no verdict run again, and are left alone."""
    if not trial.files and not trial.seal:
        return (Alteration(path=RECORD, code="unrecorded"),)
    found = [] if run_dir.is_sealed(path) else [Alteration(path=RECORD, code="edited")]
    found += run_dir.compare_digests(path, trial, run_dir.EVIDENCE)
    if trial.status == "done" and trial.ended and not _same_imports(path, trial):
        found.append(Alteration(path=f"{run_dir.EVIDENCE}/{run_dir.IMPORTS}", code="changed"))
    for side in trial.sides:
        if is_final(side):
            found += run_dir.compare_digests(path, trial, side.directory or f"sides/{side.key}")
    for level in trial.levels:
        if is_final(level):
            directory = level.directory or f"levels/{level.number}-{level.name}"
            found += run_dir.compare_digests(path, trial, directory)
            found += _own_record(path, trial, level, directory)
    return tuple(found)


def _of(found: Sequence[Alteration], result: LevelResult | SideResult) -> list[Alteration]:
    """What concerns one result; nothing proves a level of a trial without digests."""
    place = result.directory or (f"levels/{result.number}-{result.name}" if isinstance(result, LevelResult) else f"sides/{result.key}")
    return [one for one in found if one.owner == place or (one.path == RECORD and one.code == "unrecorded")]


def _blocked(result: Result, found: Sequence[Alteration]) -> Result:
    if not found:
        return result
    return replace(result, verdict=Verdict.BLOCKED, boundary=Boundary.ENVIRONMENT, reason=altered_words(found))


def _level(path: Path, trial: Trial, level: LevelResult, found: Sequence[Alteration]) -> LevelResult:
    """A level whose files were altered: its Pass is Blocked, or a Fail where the files show one."""
    if not found or level.verdict is not Verdict.PASS:
        return level
    fix = "start a new trial: what was altered proves nothing"
    made = replace(_blocked(level, found), follow_ups=unique((*level.follow_ups, fix)))
    shown = _failure(path, trial, level, {one.path for one in found})
    if shown is None:
        return made
    return replace(made, verdict=Verdict.FAIL, boundary=shown[1], reason=f"{made.reason}; now it shows: {shown[0]}")


def _failure(path: Path, trial: Trial, level: LevelResult, altered: set[str]) -> tuple[str, Boundary] | None:
    """What the files of an altered level show that makes it a Fail."""
    directory = path / level.directory
    gone = [name for name in ("run.log", "metrics.jsonl") if not (directory / name).is_file()]
    if not level.directory or gone:
        return f"{' and '.join(gone) or 'everything'} of the level is gone", Boundary.METRICS
    if any(os.path.lexists(path / name) and not (path / name).is_file() for name in altered):
        return None  # a pipe, a device, a link to nothing: nothing there is read
    own = _stored(directory)
    if own is not None and own.verdict is Verdict.FAIL:
        return f"{run_dir.RESULT}: {own.reason}", own.boundary or Boundary.METRICS
    for shown in (_missed(directory, level, altered), _broken(directory, level, altered)):
        if shown is not None:
            return shown
    try:
        anew = _judged(path, trial, level, directory)
    except _ODD:
        return None
    return (anew.reason, anew.boundary or Boundary.METRICS) if anew is not None and anew.verdict is Verdict.FAIL else None


def _stored(directory: Path) -> LevelResult | None:
    try:
        return read_model(directory / run_dir.RESULT, LevelResult)
    except UserError:
        return None


def _missed(directory: Path, level: LevelResult, altered: set[str]) -> tuple[str, Boundary] | None:
    if f"{level.directory}/checks.json" not in altered:
        return None
    try:
        checks = _validated(tuple[CheckResult, ...], directory / "checks.json")
    except _ODD:
        return None
    missed = next((check for check in checks if not check.passed), None)
    return (f"checks.json: missed: {missed.name}", missed.boundary) if missed else None


def _broken(directory: Path, level: LevelResult, altered: set[str]) -> tuple[str, Boundary] | None:
    if f"{level.directory}/metrics.jsonl" not in altered:
        return None
    try:
        metrics = read_metrics([directory / "metrics.jsonl"])
    except _ODD:
        return None
    wrong = next((series for series in metrics.series.values() if series.non_finite()), None)
    return (f"metrics.jsonl: {wrong.tag} is not finite at step {wrong.non_finite()[0]}", Boundary.METRICS) if wrong else None


def _judged(path: Path, trial: Trial, level: LevelResult, directory: Path) -> LevelResult | None:
    loop = loop_of(trial.plan)
    known = next((one for one in loop.levels() if (one.number, one.name) == (level.number, level.name)), None)
    if known is None or trial.environment is None:
        return None
    outcomes = _validated(tuple[PhaseOutcome, ...], directory / "phases.json")
    context = Context.of(trial.plan, path, Path(trial.environment.python))
    bench = RunContext(loop, context, path / "instruments", {}, Redactor(os.environ), Limits(), lambda _: None)
    return assess(bench, known, directory, outcomes)[0]


def _validated(kind: Any, file: Path) -> Any:
    try:
        return TypeAdapter(kind).validate_python(read_json(file))
    except ValidationError as error:
        raise UserError(f"{file}: {error.errors()[0]['msg']}", "it was edited") from error


def _own_record(path: Path, trial: Trial, level: LevelResult, directory: str) -> Iterable[Alteration]:
    """Whether the level's own record says what trial.json says. Until a trial ends, the two may differ in what is not a verdict."""
    file = path / directory / run_dir.RESULT
    name = f"{directory}/{run_dir.RESULT}"
    if not file.is_file():
        return [Alteration(path=name, code="removed", owner=directory)]
    stored = _stored(file.parent)
    if stored is None or file.is_symlink() or not run_dir.agree(trial, stored, level):
        return [Alteration(path=name, code="changed", owner=directory)]
    same = stored.model_dump(exclude=_SETTLED) == level.model_dump(exclude=_SETTLED)
    return [] if same or trial.status != "done" else [Alteration(path=name, code="changed", owner=directory)]


def _same_imports(path: Path, trial: Trial) -> bool:
    try:
        return bool(read_json(path / run_dir.EVIDENCE / run_dir.IMPORTS) == [item.model_dump(mode="json") for item in trial.imports])
    except UserError:
        return False


def refuse_other_change(recorded: Sequence[RepoState], path: Path, redactor: Redactor) -> None:
    """The change must be what the stored levels ran with."""
    for repo in recorded:
        what = differs(repo, path / "evidence", redactor)
        if what:
            raise UserError(
                f"{repo.path}: {what} since this trial began", f"restore that state (see {path / 'evidence'}), or start a new trial"
            )


def refuse_other_environment(old: EnvironmentRecord | None, new: EnvironmentRecord) -> None:
    """A resumed trial must run in the environment it began in."""
    if old is None or old.fingerprint == new.fingerprint:
        return
    differences = "; ".join(environment_differences(old, new)[:5])
    raise UserError(
        f"the loop's environment is not the one this trial began in: {differences}", "rebuild that environment, or start a new trial"
    )
