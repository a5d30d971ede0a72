"""From the directory of a level to its stored result. Only reads what is there, so a killed trial can be judged, too."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from pathlib import Path

from seatrial.evidence.imports import judge_imports, read_imports
from seatrial.files import write_json
from seatrial.loops.facts import PATTERN as FACTS
from seatrial.metrics.checks import evaluate, undamaged
from seatrial.metrics.grammar import CheckSyntaxError, one_step
from seatrial.model.advice import Situation, advise
from seatrial.model.errors import UserError
from seatrial.model.knowledge import CheckSpec, Level
from seatrial.model.loop import Loop, Phase
from seatrial.model.record import CheckResult, Diagnosis, LevelResult, PhaseOutcome
from seatrial.model.series import Metrics
from seatrial.model.verdict import Boundary, Verdict
from seatrial.trial.diagnosis import read_diagnosis
from seatrial.trial.judge import Evidence, judge
from seatrial.trial.level import Bench, phase_log
from seatrial.trial.level_files import IMPORTS, read_level_metrics, write_level_metrics


def _wrong_imports(bench: Bench, directory: Path, phases: Sequence[Phase], complete: bool) -> tuple[str, ...]:
    """Why the imports are not proven; of a level that did not end well, only what was reported counts."""
    expected = sorted({process for phase in phases for process in phase.processes}) if complete else ()
    try:
        return judge_imports(read_imports(directory / IMPORTS), bench.context.changes, expected)
    except UserError as error:
        return (error.message,)


def _diagnose(bench: Bench, directory: Path, phases: Sequence[Phase], outcomes: Sequence[PhaseOutcome]) -> Diagnosis | None:
    """Triage of the log of the process that failed, or of the last one; a failure in any earlier one counts."""
    found = None
    for phase in (phase for phase in phases[: len(outcomes)] if not phase.beside):
        log = phase_log(directory, phases, phase)
        if not log.is_file():
            continue
        found = read_diagnosis(bench.loop, log)
        if found.verdict is not None:
            return found
    return found


def judge_level(bench: Bench, level: Level, directory: Path, outcomes: Sequence[PhaseOutcome]) -> LevelResult:
    """Read what the level left, judge it, and store checks.json, metrics.jsonl and result.json."""
    result, metrics = assess(bench, level, directory, outcomes)
    write_level_metrics(metrics, directory / "metrics.jsonl")
    write_json(directory / "checks.json", [check.model_dump(mode="json") for check in result.checks])
    write_json(directory / "result.json", result)
    return result


def _asserted(loop: Loop, level: Level, directory: Path, metrics: Metrics) -> tuple[tuple[CheckSpec, ...], tuple[CheckResult, ...], str]:
    """The expressions to check, the proofs, and why there are none. Others write what a level leaves, and may be killed or err: facts of
    another shape leave the level without proofs, and never end the trial."""
    try:
        return (*level.checks, *loop.own_checks(level, directory)), loop.proofs(level, directory, metrics), ""
    except UserError as error:
        return level.checks, (), error.message
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError, MemoryError) as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        return level.checks, (), f"{directory}: {type(error).__name__}: {error} ({Path(last.filename).name}:{last.lineno})"


def assess(bench: Bench, level: Level, directory: Path, outcomes: Sequence[PhaseOutcome]) -> tuple[LevelResult, Metrics]:
    """The verdict on what the level left; nothing is written."""
    loop = bench.loop
    phases = loop.phases(level, bench.context, directory)
    metrics = read_level_metrics(loop, directory)
    diagnosis = _diagnose(bench, directory, phases, outcomes)
    complete = len(outcomes) == len(phases) and all(o.ended == "exited" and o.exit_code == 0 for o in outcomes)
    expected = min((phase.steps for phase in phases if phase.steps is not None), default=None)
    reached = loop.steps_reached(metrics)
    trained = len(outcomes) == len(phases) and expected is not None and reached is not None and reached >= expected
    checks, unproven = tuple[CheckResult, ...](), ""
    if complete or trained:  # a crash after the last step is no Pass, but what was measured is measured
        specs, proofs, unproven = _asserted(loop, level, directory, metrics)
        checks = (*proofs, *(_expression(spec, metrics) for spec in specs), *_sound(metrics))
    evidence = Evidence(
        metrics=metrics,
        checks=checks,
        unproven=unproven,
        diagnosis=diagnosis,
        phases=tuple(outcomes),
        wrong_imports=_wrong_imports(bench, directory, phases, complete),
        steps_expected=expected,
        steps_reached=reached,
        vacuous=loop.vacuous(metrics) if complete else None,
        loop_under_test=any(loop.name.replace("-", "_") in repo.packages for repo in bench.context.changes if not repo.companion),
        change_roots=tuple(root for repo in bench.context.changes if not repo.companion for root in (repo.path, repo.synced) if root),
    )
    judgement = judge(evidence, loop.milestones())
    result = LevelResult(
        number=level.number,
        name=level.name,
        title=level.title,
        verdict=judgement.verdict,
        reason=level.proves if judgement.verdict is Verdict.PASS else bench.redactor.text(judgement.reason),
        boundary=judgement.boundary,
        vacuous=judgement.vacuous,
        checks=checks,
        diagnosis=diagnosis,
        phases=tuple(outcomes),
        steps_reached=evidence.steps_reached,
        steps_expected=expected,
        proves=level.proves,
        limitations=(*_limitations(bench, level), *loop.shortfalls(level, directory)),
        left_out=level.left_out,
        follow_ups=(diagnosis.advice,) if diagnosis and diagnosis.advice and diagnosis.verdict else (),
        key_lines=_key_lines(diagnosis),
        directory=str(directory.relative_to(bench.context.run_dir)),
        seconds=round(sum(o.seconds for o in outcomes), 2),
        cpu_seconds=round(sum(o.cpu_seconds for o in outcomes), 2),
    )
    return bench.redactor.record(result.model_copy(update={"follow_ups": (*result.follow_ups, *_next_steps(bench, result))})), metrics


def _next_steps(bench: Bench, result: LevelResult) -> tuple[str, ...]:
    """What to do about a level that is no Pass."""
    if result.verdict is Verdict.PASS:
        return ()
    context, loop = bench.context, bench.loop
    directory = context.run_dir / result.directory
    situation = Situation(
        boundary=result.boundary or Boundary.ENVIRONMENT,
        verdict=result.verdict,
        loop=loop.name,
        levels=loop.levels(),
        level=result.number,
        run=str(context.run_dir),
        changes=tuple(f"{repo.name}={repo.path}" for repo in context.changes if not repo.companion),
        options={name: value for name, value in context.options.items() if name in loop.options()},
        model=context.model if context.model != loop.default_model else None,
        arguments=tuple(bench.redactor.value(context.arguments)),
        compared=any(repo.base for repo in context.changes if not repo.companion),
        fault=context.options.get("fault") or None,
        isolable=bool(loop.isolations(result)),
        tokens=_has_tokens(bench, result),
        facts=str(directory) if any(directory.rglob(FACTS)) else None,
    )
    return (*loop.next_steps(result, context), *advise(situation))


def _has_tokens(bench: Bench, result: LevelResult) -> bool:
    try:
        return next(bench.loop.tokens(bench.context.run_dir / result.directory), None) is not None
    except UserError:
        return True  # a torn log is there, and `localize` says what is wrong with it


def _sound(metrics: Metrics) -> tuple[CheckResult, ...]:
    """Metrics are whole and finite. The judge asserts both on its own; here a reader sees that they were measured."""
    wrong = [tag for tag, series in metrics.series.items() if series.non_finite()]
    points = sum(len(series) for series in metrics.series.values())
    finite = CheckResult(
        name="every metric is finite",
        kind="proof",
        passed=bool(points) and not wrong,
        value=f"{len(metrics.series) - len(wrong)} of {len(metrics.series)} series, {points} points",
        threshold="all",
        message=", ".join(wrong[:3]),
    )
    twice = [f"{overlap.tag} at step {overlap.steps[0] if overlap.steps else '?'}" for overlap in metrics.overlaps]
    once = CheckResult(
        name="no step was written twice",
        kind="proof",
        passed=not twice,
        value=f"{len(twice)} series",
        threshold="0",
        message=", ".join(twice[:3]),
    )
    return undamaged(metrics), finite, once


def _expression(spec: CheckSpec, metrics: Metrics) -> CheckResult:
    """Evaluate a check, and say why it is there. An assertion of a loop's own script that cannot be read was not met."""
    try:
        result = evaluate(spec.expr, metrics, spec.boundary)
    except CheckSyntaxError as error:
        problem = error.message.split("\n")[0]
        return CheckResult(name=spec.expr, passed=False, message=f"{problem}; it stands for: {spec.why}", boundary=spec.boundary)
    message = f"{result.message}; it stands for: {spec.why}" if result.message else spec.why
    if len(result.steps) == 1 and one_step(spec.expr):
        message += "; fragile: it rests on a single step"
    return result.model_copy(update={"message": message})


def _key_lines(diagnosis: Diagnosis | None) -> tuple[str, ...]:
    if diagnosis is None or diagnosis.line is None:
        return ()
    return (f"{diagnosis.file}:{diagnosis.line}: {diagnosis.cause}",)


def _limitations(bench: Bench, level: Level) -> tuple[str, ...]:
    """What the level must not be read as, and what the user changed about it."""
    context = bench.context
    made = [*level.claims_not, *bench.loop.limitations(level, context)]
    if context.arguments:
        made.append(f"loop arguments override the level's own settings: {' '.join(bench.redactor.value(context.arguments))}")
    if context.options.get("fault"):
        made.append(f"a fault was injected on purpose: {context.options['fault']}")
    return tuple(made)
