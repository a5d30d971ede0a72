"""Analyses of a trial that is over: `isolate` reruns a failed level, `localize` reads its token logs.

- `isolate`: one setting changed per rerun, each a trial of its own. The first rerun changes nothing: a failure that does not repeat
  makes the others say nothing. What counts is whether the original failure is gone, not whether the rerun passes.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from seatrial.core.errors import UserError
from seatrial.core.files import read_table, write_json, write_text
from seatrial.core.loop import Context, Isolation, Loop
from seatrial.core.records import OPTION, Failure, LevelResult, Localization, Matrix, Measured, Plan, PlannedLevel, Rerun, Trial, settings
from seatrial.core.records import replace as replace_record
from seatrial.core.series import TokenRow
from seatrial.core.specs import Level
from seatrial.core.verdict import Verdict
from seatrial.evidence.redact import Redactor
from seatrial.evidence.repos import differs
from seatrial.loops import loop_of
from seatrial.report.html import localize_html
from seatrial.report.markdown import matrix_md
from seatrial.triage.token_mismatch import localize
from seatrial.trial import run_dir, runner
from seatrial.trial.conclude import FINAL
from seatrial.trial.level import read_level_metrics
from seatrial.trial.progress import Listener
from seatrial.trial.staging import engine_interpreters, level_script

VARYING = re.compile(r"(/[^\s/'\"]+)+/|0x[0-9a-f]+|\b\d{4,}\b")
"""Directories, addresses, process numbers and ports: two runs never share them."""
PARITY = "run Bridge logits/import/export parity next"


def first_missed(result: LevelResult) -> Measured | None:
    missed = next((check for check in result.checks if not check.passed), None)
    return Measured(name=missed.name, value=missed.value, threshold=missed.threshold) if missed else None


def compared(rerun: Rerun, original: Trial, failed: LevelResult, trial: Trial) -> Rerun:
    """The rerun with its verdict and with what became of the original failure."""
    result = next((level for level in trial.levels if level.number == failed.number), None)
    if result is None:
        return replace_record(rerun, reason=trial.reason, verdict=trial.verdict, failure="no evidence")
    failure, note = _failure(failed, result)
    if result.verdict in FINAL and _other_environment(original, trial):
        failure, note = "no evidence", "it ran in another environment than the original"
    log = Path(rerun.directory) / result.directory / "run.log" if result.directory else None
    return replace_record(
        rerun,
        verdict=result.verdict,
        reason=result.reason,
        failure=failure,
        note=note,
        measured=_same_check(failed, result),
        log=str(log or ""),
    )


def _other_environment(original: Trial, trial: Trial) -> bool:
    before, after = original.environment, trial.environment
    return before is not None and after is not None and before.fingerprint != after.fingerprint


def _failure(failed: LevelResult, result: LevelResult) -> tuple[Failure, str]:
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
    if item.verdict is Verdict.PASS:
        how = "reduced-optimization pass" if item.reduced else "passes"
    else:
        how = f"does not show the failure, though it is no Pass ({item.reason})"
    return f"{item.name}: {how}; it points to {item.suspect}"


REPEAT = Isolation("repeat", (), "nothing: the failure does not repeat")
ISOLATE_DIRECTORY, ISOLATE_JSON, ISOLATE_TEXT = "isolate", "isolate.json", "isolate.md"


@dataclass(frozen=True, slots=True)
class IsolationCase:
    run: Path
    trial: Trial
    result: LevelResult
    isolations: tuple[Isolation, ...]
    request: runner.Request
    """What was asked for when the trial was begun."""

    def place(self) -> Path:
        return self.run / ISOLATE_DIRECTORY / Path(self.result.directory).name

    def directory(self, isolation: Isolation) -> Path:
        """Where one rerun lives; its number does not depend on which others are asked for."""
        return self.place() / f"{self.isolations.index(isolation)}-{isolation.name}"

    def plan(self, isolation: Isolation) -> Plan:
        """The trial's plan, for this level alone, with the settings of the rerun on top."""
        plan = self.trial.plan
        arguments, options = (*plan.arguments, *isolation.arguments), {**plan.options, **isolation.options}
        changed = replace_record(plan, arguments=arguments, options=options)
        level = _level(loop_of(changed), self.result.number)  # its title may tell the options
        levels = tuple(replace_record(item, title=level.title) for item in plan.levels if item.number == level.number)
        return replace_record(changed, levels=levels)

    def options(self, isolation: Isolation) -> dict[str, str]:
        return {**self.request.options, OPTION: " ".join(isolation.arguments)}


def _level(loop: Loop, number: int) -> Level:
    return next(level for level in loop.levels() if level.number == number)


def open_case(path: Path, number: int | None = None, only: Sequence[str] = ()) -> IsolationCase:
    """What would be rerun. UserError when there is nothing to separate, or when it cannot be done as the trial was."""
    path = path.absolute()
    trial = run_dir.load(path)
    result, isolations = _chosen(path, trial, loop_of(trial.plan), number)
    known = [item.name for item in isolations]
    wrong = next((name for name in only if name not in known), None)
    if wrong is not None:
        raise UserError(f"--only {wrong}: level {result.number} has no such rerun", f"choose from {', '.join(known)}")
    secret = next((word for word in trial.plan.arguments if "[redacted:" in word), None)
    if secret:
        raise UserError(f"{path}: a loop argument is a secret that was not stored: {secret}", "start a new trial with `seatrial run`")
    return IsolationCase(path, trial, result, isolations, runner.request_of(path, trial))


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


def scripts(case: IsolationCase, only: Sequence[str] = ()) -> list[tuple[str, str]]:
    """Each rerun's directory and the commands that it would run. Nothing is started or written."""
    recorded = case.trial.environment
    if recorded is None:
        raise UserError(f"{case.run}: the trial recorded no environment", "run the level again, then isolate it")
    return [(str(case.directory(isolation)), _script(case, isolation, Path(recorded.python))) for isolation in _wanted(case, only)]


def _script(case: IsolationCase, isolation: Isolation, python: Path) -> str:
    """The commands of one rerun; its title tells what is set on top of the trial's own settings."""
    place, plan = case.directory(isolation), case.plan(isolation)
    loop = loop_of(plan)
    level = _level(loop, case.result.number)
    context = Context.of(plan, place, python, engine_interpreters(), options=case.options(isolation))
    directory = run_dir.level_directory(place, plan.levels[0])
    changed = settings(isolation.arguments, isolation.options) or "nothing"
    title = f"{isolation.name}: level {level.number}, {level.title}; set on top: {changed}"
    return Redactor(os.environ).text(level_script(title, loop, level, context, directory))


def isolate(case: IsolationCase, listener: Listener, only: Sequence[str] = ()) -> Matrix:
    """Run what is not finished yet, one after another, and store the matrix after each."""
    with run_dir.locked(case.run):
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


def _wanted(case: IsolationCase, only: Sequence[str]) -> list[Isolation]:
    return [item for item in case.isolations if not only or item.name in only]


def _refuse_other_change(case: IsolationCase) -> None:
    for repo in case.trial.plan.changes:
        what = differs(repo, case.run / "evidence", Redactor(os.environ))
        if what:
            fix = f"restore that state (see {case.run / 'evidence'}), or start a new trial"
            raise UserError(f"{repo.path}: {what} since this trial began", fix)


def _finished(case: IsolationCase, isolation: Isolation) -> Trial | None:
    place = case.directory(isolation)
    if not (place / "trial.json").is_file():
        return None
    trial = run_dir.load(place)
    stored, wanted = trial.plan, case.plan(isolation)
    if (stored.arguments, stored.options) != (wanted.arguments, wanted.options):
        message = f"{place}: holds a rerun with other settings: {settings(stored.arguments, stored.options) or 'none'}"
        raise UserError(message, "move that directory away")
    judged = trial.status == "done" and any(level.verdict in FINAL for level in trial.levels)
    return trial if judged else None


def _run(case: IsolationCase, isolation: Isolation, listener: Listener) -> Trial:
    place = case.directory(isolation)
    if (place / "trial.json").is_file():
        return runner.resume(place, listener)
    place.mkdir(parents=True, exist_ok=True)
    config = read_table(case.run / "evidence" / "config.json")
    request = replace(case.request, plan=case.plan(isolation), out=place, options=case.options(isolation), config=config, sides=())
    return runner.start(request, listener)


def _matrix(case: IsolationCase, judged: Mapping[str, Trial], only: Sequence[str], interrupted: bool = False) -> Matrix:
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


def _rerun(case: IsolationCase, isolation: Isolation, trial: Trial | None) -> Rerun:
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


def _store(case: IsolationCase, matrix: Matrix) -> None:
    matrix = Matrix.model_validate(Redactor(os.environ).value(matrix.model_dump(mode="json")))
    write_json(case.place() / ISOLATE_JSON, matrix)
    write_text(case.place() / ISOLATE_TEXT, matrix_md(matrix))


LOCALIZE_DIRECTORY, LOCALIZE_JSON, LOCALIZE_HTML = "localize", "localize.json", "localize.html"


def localize_run(path: Path, number: int | None = None) -> Localization:
    """Analyse one level of a trial and store the answer; a trial without token logs is a UserError."""
    path = path.absolute()
    trial = run_dir.load(path)
    loop = loop_of(trial.plan)
    candidates = _candidates(path, trial, number)
    for planned in candidates:
        directory = run_dir.level_directory(path, planned)
        rows = loop.measures.tokens(directory)
        first = next(rows, None)
        if first is None:
            continue
        metrics = read_level_metrics(loop, directory)
        redactor = Redactor(os.environ)
        found = localize(_cleared(chain((first,), rows), redactor), metrics, trial.id, planned.number, planned.name)
        # Prompts and names of files come from outside.
        found = Localization.model_validate(redactor.value(found.model_dump(mode="json")))
        write_json(path / LOCALIZE_DIRECTORY / LOCALIZE_JSON, found)
        write_text(path / LOCALIZE_DIRECTORY / LOCALIZE_HTML, localize_html(found))
        return found
    looked = ", ".join(str(run_dir.level_directory(path, planned)) for planned in candidates)
    raise UserError(
        f"no token logs in {looked}: looked for sequences with the log-probabilities of generator and trainer",
        f"only levels of {loop.title} whose run logged them can be localized: let it train a step, and keep what it wrote",
    )


def _cleared(rows: Iterable[TokenRow], redactor: Redactor) -> Iterator[TokenRow]:
    """The rows; settings whose names say secret, which sentences would quote, are replaced."""
    clear = functools.cache(lambda settings: tuple(redactor.value(dict(settings)).items()))
    for row in rows:
        yield row if clear(row.settings) == row.settings else replace(row, settings=clear(row.settings))


def _candidates(path: Path, trial: Trial, number: int | None) -> Sequence[PlannedLevel]:
    """The level that was asked for; else all, those that failed first."""
    planned = trial.plan.levels
    if number is None:
        failed = {result.number for result in trial.levels if result.verdict is Verdict.FAIL}
        return sorted(planned, key=lambda level: (level.number not in failed, level.number))
    chosen = [level for level in planned if level.number == number]
    if not chosen:
        listed = ", ".join(str(level.number) for level in planned)
        raise UserError(f"{path}: level {number} is not part of this trial", f"choose from {listed}")
    return chosen
