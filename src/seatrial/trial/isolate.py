"""`isolate`: a failed level again, with one setting changed at a time, each as a trial of its own.

- The first rerun changes nothing. A failure that does not repeat makes every other rerun say nothing.
- What counts is whether the original failure is gone, not whether the rerun passes: a setting may cost a check that the
  level also makes. A rerun that was Blocked, or ran in another environment, is no evidence.
- The verdict of the trial is never changed. Reruns live below RUN/isolate/, finished ones are not run again.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from seatrial.evidence.redact import Redactor
from seatrial.evidence.repos import differs
from seatrial.files import read_table, write_json, write_text
from seatrial.loops import loop_of
from seatrial.model.errors import UserError
from seatrial.model.isolation import OPTION, Matrix, Rerun, settings
from seatrial.model.knowledge import Level
from seatrial.model.loop import Context, Isolation, Loop
from seatrial.model.record import LevelResult, Plan, Trial
from seatrial.model.verdict import Verdict
from seatrial.report.isolate import matrix_md
from seatrial.trial import conduct, rundir
from seatrial.trial.command import command_script
from seatrial.trial.finish import FINAL
from seatrial.trial.interpreter import engine_interpreters
from seatrial.trial.machine import IGNORED, LAUNCHER
from seatrial.trial.matrix import compared, conclude, first_missed
from seatrial.trial.preflight import child_environment
from seatrial.trial.progress import Listener

REPEAT = Isolation("repeat", (), "nothing: the failure does not repeat")
PLACE, JSON, TEXT = "isolate", "isolate.json", "isolate.md"


@dataclass(frozen=True, slots=True)
class Case:
    """A failed level and the reruns that separate its suspects."""

    run: Path
    trial: Trial
    result: LevelResult
    isolations: tuple[Isolation, ...]
    request: conduct.Request
    """What was asked for when the trial was begun."""

    def place(self) -> Path:
        """Where the matrix lives."""
        return self.run / PLACE / Path(self.result.directory).name

    def directory(self, isolation: Isolation) -> Path:
        """Where one rerun lives; its number does not depend on which others are asked for."""
        return self.place() / f"{self.isolations.index(isolation)}-{isolation.name}"

    def plan(self, isolation: Isolation) -> Plan:
        """The trial's plan, for this level alone, with the settings of the rerun on top."""
        plan = self.trial.plan
        arguments, options = (*plan.arguments, *isolation.arguments), {**plan.options, **isolation.options}
        changed = plan.model_copy(update={"arguments": arguments, "options": options})
        level = _level(loop_of(changed), self.result.number)  # its title may tell the options
        levels = tuple(item.model_copy(update={"title": level.title}) for item in plan.levels if item.number == level.number)
        return changed.model_copy(update={"levels": levels})

    def options(self, isolation: Isolation) -> dict[str, str]:
        """Options of the trial's request, and what the rerun changes."""
        return {**self.request.options, OPTION: " ".join(isolation.arguments)}


def _level(loop: Loop, number: int) -> Level:
    return next(level for level in loop.levels() if level.number == number)


def open_case(path: Path, number: int | None = None, only: Sequence[str] = ()) -> Case:
    """What would be rerun. UserError when there is nothing to separate, or when it cannot be done as the trial was."""
    path = path.absolute()
    trial = rundir.load(path)
    result, isolations = _chosen(path, trial, loop_of(trial.plan), number)
    known = [item.name for item in isolations]
    wrong = next((name for name in only if name not in known), None)
    if wrong is not None:
        raise UserError(f"--only {wrong}: level {result.number} has no such rerun", f"choose from {', '.join(known)}")
    secret = next((word for word in trial.plan.arguments if "[redacted:" in word), None)
    if secret:
        raise UserError(f"{path}: a loop argument is a secret that was not stored: {secret}", "start a new trial with `seatrial run`")
    return Case(path, trial, result, isolations, conduct.request_of(path, trial))


def _chosen(path: Path, trial: Trial, loop: Loop, number: int | None) -> tuple[LevelResult, tuple[Isolation, ...]]:
    """The level to look at, with its reruns; the unchanged one first."""
    for result in trial.levels:
        found = loop.isolations(result) if result.verdict is Verdict.FAIL and result.directory else ()
        if found and number in (None, result.number):
            return result, (REPEAT, *found)
    if number is None:
        raise UserError(
            f"{path}: no level failed in a way that reruns could separate", "read the summary: `seatrial report` names the first cause"
        )
    asked = next((result for result in trial.levels if result.number == number), None)
    if asked is None:
        listed = ", ".join(str(result.number) for result in trial.levels) or "none"
        raise UserError(f"{path}: level {number} has no result in this trial", f"choose from {listed}")
    why = f"is {asked.verdict}" if asked.verdict is not Verdict.FAIL else f"failed at {asked.boundary}, for which there are no reruns"
    raise UserError(f"{path}: level {number} {why}", "isolate a level whose failure has suspects to separate")


def scripts(case: Case, only: Sequence[str] = ()) -> list[tuple[str, str]]:
    """Each rerun's directory and the commands that it would run. Nothing is started or written."""
    recorded = case.trial.environment
    if recorded is None:
        raise UserError(f"{case.run}: the trial recorded no environment", "run the level again, then isolate it")
    return [(str(case.directory(isolation)), _script(case, isolation, Path(recorded.python))) for isolation in _wanted(case, only)]


def _script(case: Case, isolation: Isolation, python: Path) -> str:
    """The commands of one rerun; its title tells what is set on top of the trial's own settings."""
    place, plan = case.directory(isolation), case.plan(isolation)
    loop = loop_of(plan)
    level = _level(loop, case.result.number)
    options = {**plan.options, **case.options(isolation)}
    context = Context(place, python, plan.model, (level.name,), plan.changes, plan.arguments, options, engine_interpreters())
    directory = rundir.level_directory(place, plan.levels[0])
    import_path = (*context.import_path(), *loop.import_path(context), str(place / "instruments"))
    changed = settings(isolation.arguments, isolation.options) or "nothing"
    title = f"{isolation.name}: level {level.number}, {level.title}; set on top: {changed}"
    phases = loop.phases(level, context, directory)
    script = command_script(title, phases, directory, child_environment({}, import_path, {}), (*IGNORED, *LAUNCHER))
    return Redactor(os.environ).text(script)


def isolate(case: Case, listener: Listener, only: Sequence[str] = ()) -> Matrix:
    """Run what is not finished yet, one after another, and store the matrix after each."""
    with rundir.locked(case.run):
        _refuse_other_change(case)
        judged = {item.name: trial for item in case.isolations if (trial := _finished(case, item))}
        matrix = _matrix(case, judged, only)
        for isolation in _wanted(case, only):
            if isolation.name in judged:
                continue
            trial = _run(case, isolation, listener)
            judged[isolation.name] = trial
            matrix = _matrix(case, judged, only, interrupted=trial.status != "done")
            _store(case, matrix)
            if matrix.interrupted or (not only and _does_not_repeat(matrix)):
                return matrix
        _store(case, matrix)
        return matrix


def _does_not_repeat(matrix: Matrix) -> bool:
    """The failure was not there again without any change: no other rerun could say anything, so none is run."""
    return any(rerun.name == REPEAT.name and rerun.failure in ("gone", "another failure") for rerun in matrix.reruns)


def _wanted(case: Case, only: Sequence[str]) -> list[Isolation]:
    return [item for item in case.isolations if not only or item.name in only]


def _refuse_other_change(case: Case) -> None:
    """The reruns must be of what failed."""
    for repo in case.trial.plan.changes:
        what = differs(repo, case.run / "evidence", Redactor(os.environ))
        if what:
            fix = f"restore that state (see {case.run / 'evidence'}), or start a new trial"
            raise UserError(f"{repo.path}: {what} since this trial began", fix)


def _finished(case: Case, isolation: Isolation) -> Trial | None:
    """The stored rerun, if it has its verdict."""
    place = case.directory(isolation)
    if not (place / "trial.json").is_file():
        return None
    trial = rundir.load(place)
    stored, wanted = trial.plan, case.plan(isolation)
    if (stored.arguments, stored.options) != (wanted.arguments, wanted.options):
        message = f"{place}: holds a rerun with other settings: {settings(stored.arguments, stored.options) or 'none'}"
        raise UserError(message, "move that directory away")
    judged = trial.status == "done" and any(level.verdict in FINAL for level in trial.levels)
    return trial if judged else None


def _run(case: Case, isolation: Isolation, listener: Listener) -> Trial:
    """One rerun, begun or resumed."""
    place = case.directory(isolation)
    if (place / "trial.json").is_file():
        return conduct.resume(place, listener)
    place.mkdir(parents=True, exist_ok=True)
    config = read_table(case.run / "evidence" / "config.json")
    request = replace(case.request, plan=case.plan(isolation), out=place, options=case.options(isolation), config=config, sides=())
    return conduct.start(request, listener)


def _matrix(case: Case, judged: Mapping[str, Trial], only: Sequence[str], interrupted: bool = False) -> Matrix:
    reruns = tuple(_rerun(case, isolation, judged.get(isolation.name)) for isolation in case.isolations)
    wanted = {item.name for item in _wanted(case, only)}
    missed = first_missed(case.result)
    suspects, conclusion = conclude(reruns, crashed=missed is None)
    return Matrix(
        trial=case.trial.id,
        level=case.result.number,
        title=case.result.title,
        verdict=case.result.verdict,
        reason=case.result.reason,
        measured=missed,
        log=str(Path(case.result.directory) / "run.log"),
        reruns=reruns,
        complete=all(item.verdict in FINAL for item in reruns if item.name in wanted),
        interrupted=interrupted,
        suspects=suspects,
        conclusion=conclusion,
    )


def _rerun(case: Case, isolation: Isolation, trial: Trial | None) -> Rerun:
    place = case.directory(isolation).relative_to(case.run)
    made = Rerun(
        name=isolation.name,
        arguments=isolation.arguments,
        options=dict(isolation.options),
        suspect=isolation.suspect,
        reduced=isolation.reduced,
        directory=str(place),
    )
    return made if trial is None else compared(made, case.trial, case.result, trial)


def _store(case: Case, matrix: Matrix) -> None:
    matrix = Matrix.model_validate(Redactor(os.environ).value(matrix.model_dump(mode="json")))
    write_json(case.place() / JSON, matrix)
    write_text(case.place() / TEXT, matrix_md(matrix))
