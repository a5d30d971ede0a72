"""From the files of each level to its result, and from the results to a stored verdict and every report."""

from __future__ import annotations

import operator
import traceback
from collections.abc import Collection, Iterator, Sequence
from functools import reduce
from pathlib import Path
from typing import TypeVar

from seatrial.checks.log_lines import finite, read_facts
from seatrial.checks.probe_facts import FACTS_PATTERN as FACTS
from seatrial.checks.probe_facts import proof
from seatrial.core.errors import UserError
from seatrial.core.files import write_json
from seatrial.core.loop import Loop, Phase
from seatrial.core.records import CheckResult, Diagnosis, LevelResult, PhaseOutcome, PlannedLevel, RepoState, SideResult, Trial, replace
from seatrial.core.series import Metrics
from seatrial.core.specs import CheckSpec, Level
from seatrial.core.verdict import Boundary, Verdict, worst
from seatrial.evidence import imports
from seatrial.evidence.changes import read_changed
from seatrial.evidence.redact import Redactor
from seatrial.evidence.repos import differs
from seatrial.metrics.checks import CheckSyntaxError, evaluate, one_step, tags, undamaged
from seatrial.report.build import write_reports
from seatrial.triage.advice import Situation, advise
from seatrial.triage.log import read_log
from seatrial.trial import run_dir
from seatrial.trial.judge import Evidence, judge
from seatrial.trial.level import IMPORTS, RunContext, phase_log, read_diagnosis, read_level_metrics, write_level_metrics
from seatrial.trial.plan import Diff, read_diff


def _wrong_imports(bench: RunContext, directory: Path, phases: Sequence[Phase], complete: bool) -> tuple[str, ...]:
    """Why the imports are not proven; of a level that did not end well, only what was reported counts."""
    expected = sorted({process for phase in phases for process in phase.processes}) if complete else ()
    try:
        return imports.judge_imports(imports.read_imports(directory / IMPORTS), bench.context.changes, expected)
    except UserError as error:
        return (error.message,)


def _diagnose(bench: RunContext, directory: Path, phases: Sequence[Phase], outcomes: Sequence[PhaseOutcome]) -> Diagnosis | None:
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


def judge_level(bench: RunContext, level: Level, directory: Path, outcomes: Sequence[PhaseOutcome]) -> LevelResult:
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


def assess(bench: RunContext, level: Level, directory: Path, outcomes: Sequence[PhaseOutcome]) -> tuple[LevelResult, Metrics]:
    """The verdict on what the level left; nothing is written."""
    loop = bench.loop
    phases = loop.phases(level, bench.context, directory)
    metrics = read_level_metrics(loop, directory)
    diagnosis = _diagnose(bench, directory, phases, outcomes)
    complete = len(outcomes) == len(phases) and all(o.ended == "exited" and o.exit_code == 0 for o in outcomes)
    expected = min((phase.steps for phase in phases if phase.steps is not None), default=None)
    reached = loop.measures.steps_reached(metrics)
    trained = len(outcomes) == len(phases) and expected is not None and reached is not None and reached >= expected
    checks, unproven = tuple[CheckResult, ...](), ""
    if complete or trained:  # a crash after the last step is no Pass, but what was measured is measured
        specs, proofs, unproven = _asserted(loop, level, directory, metrics)
        runs = {phase.name for phase in phases}
        checks = (*proofs, *(_expression(spec, metrics, runs) for spec in specs), *_sound(metrics), *_finite_logs(directory, phases))
    evidence = Evidence(
        metrics=metrics,
        checks=checks,
        unproven=unproven,
        diagnosis=diagnosis,
        phases=tuple(outcomes),
        wrong_imports=_wrong_imports(bench, directory, phases, complete),
        steps_expected=expected,
        steps_reached=reached,
        vacuous=loop.measures.vacuous(metrics) if complete else None,
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
        code=judgement.code,
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
        arguments=_arguments(bench),
        not_taken=level.not_taken,
        follow_ups=(diagnosis.advice,) if diagnosis and diagnosis.advice and diagnosis.verdict else (),
        key_lines=_key_lines(diagnosis),
        directory=str(directory.relative_to(bench.context.run_dir)),
        seconds=round(sum(o.seconds for o in outcomes), 2),
        cpu_seconds=round(sum(o.cpu_seconds for o in outcomes), 2),
    )
    return bench.redactor.record(replace(result, follow_ups=(*result.follow_ups, *_next_steps(bench, result)))), metrics


def _next_steps(bench: RunContext, result: LevelResult) -> tuple[str, ...]:
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
        options={name: value for name, value in context.options.items() if loop.takes(name)},
        model=context.model if context.model != loop.default_model else None,
        arguments=tuple(bench.redactor.value(context.arguments)),
        compared=any(repo.base for repo in context.changes if not repo.companion),
        fault=context.options.get("fault") or None,
        isolable=bool(loop.isolations(result)),
        tokens=_has_tokens(bench, result),
        facts=str(directory) if any(directory.rglob(FACTS)) else None,
    )
    return (*loop.next_steps(result, context), *advise(situation))


def _has_tokens(bench: RunContext, result: LevelResult) -> bool:
    try:
        return next(bench.loop.measures.tokens(bench.context.run_dir / result.directory), None) is not None
    except UserError:
        return True  # a torn log is there, and `localize` says what is wrong with it


def _finite_logs(directory: Path, phases: Sequence[Phase]) -> list[CheckResult]:
    """No process prints a metric that is no number: the console may say NaN beside a clean metrics file. Made only where one does."""
    logs = {phase_log(directory, phases, phase): phase.name for phase in phases if not phase.beside}
    found = {name: finite(read_facts(read_log(log))) for log, name in logs.items() if log.is_file()}
    return [replace(check, run=name if len(logs) > 1 else "") for name, checks in found.items() for check in checks]


def _sound(metrics: Metrics) -> tuple[CheckResult, ...]:
    """Metrics are whole and finite. The judge asserts both on its own; here a reader sees that they were measured."""
    wrong = [tag for tag, series in metrics.series.items() if series.non_finite()]
    points, count = sum(len(series) for series in metrics.series.values()), len(metrics.series)
    value = f"{count - len(wrong)} of {count} series, {points} points"
    twice = [f"{overlap.tag} at step {overlap.steps[0] if overlap.steps else '?'}" for overlap in metrics.overlaps]
    return (
        undamaged(metrics),
        proof("every metric is finite", bool(points) and not wrong, value, Boundary.METRICS, "all", ", ".join(wrong[:3])),
        proof("no step was written twice", not twice, f"{len(twice)} series", Boundary.METRICS, "0", ", ".join(twice[:3])),
    )


def _expression(spec: CheckSpec, metrics: Metrics, runs: Collection[str]) -> CheckResult:
    """Evaluate a check, with why it is there and the run of its metric. One of a loop's own script that cannot be read was not met."""
    try:
        result = evaluate(spec.expr, metrics, spec.boundary)
    except CheckSyntaxError as error:
        problem = error.message.split("\n")[0]
        return CheckResult(name=spec.expr, passed=False, message=f"{problem}; it stands for: {spec.why}", boundary=spec.boundary)
    message = f"{result.message}; it stands for: {spec.why}" if result.message else spec.why
    if len(result.steps) == 1 and one_step(spec.expr):
        message += "; fragile: it rests on a single step"
    named = next((tag.partition("/")[0] for tag in tags(spec.expr) if "/" in tag), "")
    return replace(result, message=message, run=named if named in runs else "")


def _key_lines(diagnosis: Diagnosis | None) -> tuple[str, ...]:
    if diagnosis is None or diagnosis.line is None:
        return ()
    return (f"{diagnosis.file}:{diagnosis.line}: {diagnosis.cause}",)


def _limitations(bench: RunContext, level: Level) -> tuple[str, ...]:
    """What the level must not be read as, and what the user changed about it."""
    context = bench.context
    made = [*level.claims_not, *bench.loop.limitations(level, context)]
    if context.arguments:
        made.append(f"loop arguments override the level's own settings: {' '.join(_arguments(bench))}")
    if context.options.get("fault"):
        made.append(f"a fault was injected on purpose: {context.options['fault']}")
    return tuple(made)


def _arguments(bench: RunContext) -> tuple[str, ...]:
    return tuple(bench.redactor.value(bench.context.arguments))


Result = TypeVar("Result", LevelResult, SideResult)
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
    return replace(trial, levels=results, verdict=verdict, reason=reason, status=status, ended=run_dir.now())


def store(path: Path, loop: Loop, trial: Trial) -> None:
    """Write the trial and its reports. The caller holds the directory."""
    write_json(path / run_dir.EVIDENCE / run_dir.IMPORTS, [item.model_dump(mode="json") for item in trial.imports])
    run_dir.save(path, trial)
    report(path, loop, trial)


def report(path: Path, loop: Loop, trial: Trial) -> None:
    write_reports(path, trial, loop.title, loop.levels(), _metrics(path, loop, trial))


def _metrics(path: Path, loop: Loop, trial: Trial) -> dict[str, Metrics]:
    found = {}
    for place in (Path(result.directory) for result in trial.levels if result.directory):
        try:
            found[place.name] = read_level_metrics(loop, path / place)
        except UserError:
            if not trial.alterations:  # which name the file
                raise
    return found


def moved(changes: Sequence[RepoState], run_dir: Path, redactor: Redactor) -> str | None:
    """Why what ran is not what was recorded: a checkout was edited while the trial ran, or is not there any more."""
    for repo in changes:
        try:
            same = differs(repo, run_dir / "evidence", redactor) is None
        except UserError:
            same = False
        if not same:
            return f"{repo.path} was changed while the trial ran, so what ran is not what was recorded"
    return None


def unless_moved(results: Sequence[Result], why: str | None, boundary: Boundary | None = None) -> list[Result]:
    """Levels, or tests before them, without a Pass if a checkout moved."""
    update = {"verdict": Verdict.BLOCKED, "reason": why, "boundary": boundary}
    return [replace(one, **update) if why and one.verdict is Verdict.PASS else one for one in results]


def unless_unused(changes: Sequence[RepoState], results: list[LevelResult], run_dir: Path, loop: Loop) -> list[LevelResult]:
    """A change of which nothing ran was not tested: no Pass. What else of it did not run is a limitation.

    Functions count that ran in a level which passed. A level that passed without running any, while another one ran some, keeps its
    Pass, and says so.
    """
    tested = [repo for repo in changes if not repo.companion]
    if not tested or not any(result.verdict is Verdict.PASS for result in results):
        return results
    try:
        use = _Use(results, run_dir, loop)
        problem = next((text for repo in tested if (text := use.problem(repo))), None)
    except UserError as error:
        return _without_pass(results, error.message)
    if problem:
        return _without_pass(results, problem)
    left = [text for repo in tested for text in use.limitations(repo)]
    made = []
    for result in results:
        here = [text for repo in tested if (text := use.elsewhere(repo, result))]
        limits = tuple(dict.fromkeys((*result.limitations, *left, *here)))
        made.append(replace(result, limitations=limits) if result.phases else result)
    return made


def _without_pass(results: list[LevelResult], problem: str) -> list[LevelResult]:
    update = {"verdict": Verdict.BLOCKED, "boundary": Boundary.CONFIG, "reason": f"vacuous: {problem}", "vacuous": True}
    return [replace(result, **update) if result.verdict is Verdict.PASS else result for result in results]


class _Use:
    def __init__(self, results: Sequence[LevelResult], run_dir: Path, loop: Loop) -> None:
        self.loop, self.results = loop, results
        self.loaded = imports.read_loaded(sorted(run_dir.glob("levels/*/loaded.jsonl")))
        self.code = read_changed(run_dir / "evidence")
        self.levels = {
            result.number: imports.read_executed(run_dir / result.directory / imports.EXECUTED_FILE)
            if result.directory
            else imports.Executed()
            for result in results
        }
        passed = (self.levels[result.number] for result in results if result.verdict is Verdict.PASS)
        self.executed = reduce(operator.or_, passed, imports.Executed())

    def problem(self, repo: RepoState) -> str | None:
        unread = any(not file.readable for file in self.code.of(repo.name))
        if not self._by_function(repo) or not (imports.required(repo, self.code) or unread):
            return imports.unused(repo, self.loaded)  # nothing can be seen to run, but a file can be seen to be loaded
        problem = imports.unused(replace(repo, changed=()), self.loaded) or imports.idle(repo, self.code, self.executed)
        return f"{problem}; {self._advice(repo)}" if problem else None

    def limitations(self, repo: RepoState) -> Iterator[str]:
        """What a Pass of this trial does not speak of."""
        for place in imports.loads_itself(repo):
            yield f"every Python of the loop runs {place} as it starts; what that loads or runs does not count as used by the loop"
        if text := imports.not_loaded(repo, self.loaded):
            yield text
        if self._by_function(repo):
            yield from imports.limitations(repo, self.code, self.executed)
        elif repo.base is None:
            yield f"{repo.name}: no base is known, so that only loaded files were checked, not which changed functions ran (name --base)"
        elif repo.name in self.code.unknown:
            yield f"{repo.name}: which functions changed is not known, so only loaded files were checked: {self.code.unknown[repo.name]}"
        elif repo.changed:
            why = f": {self.executed.why}" if self.executed.why else ""
            yield f"{repo.name}: which functions ran was not recorded{why}; only loaded files were checked"

    def elsewhere(self, repo: RepoState, result: LevelResult) -> str | None:
        """That a level which passed ran nothing of what changed, and which levels did."""
        if result.verdict is not Verdict.PASS or not self._by_function(repo) or not imports.required(repo, self.code):
            return None
        if imports.idle(repo, self.code, self.levels[result.number]) is None:
            return None
        others = [
            item for item in self.results if item.verdict is Verdict.PASS and not imports.idle(repo, self.code, self.levels[item.number])
        ]
        named = ", ".join(f"level {item.number} ({item.name})" for item in others)
        return f"none of the changed functions of {repo.name} ran in this level; {named} ran some"

    def _by_function(self, repo: RepoState) -> bool:
        return repo.base is not None and repo.name not in self.code.unknown and self.executed.recorded

    def _advice(self, repo: RepoState) -> str:
        """Which levels the loop's own table names for the files of what did not run."""
        paths = tuple(dict.fromkeys(file.path for file, _ in imports.required(repo, self.code))) or repo.changed
        causes = read_diff(self.loop, Diff(repo.name, repo.base or "", paths, packages=repo.packages)).causes
        ran = {result.number for result in self.results if result.phases}
        named = {level.number: level for level in self.loop.levels() if level.skip is None and level.number not in ran}
        wanted = sorted({cause.level for cause in causes} & set(named))
        if not wanted:
            return f"no further level of {self.loop.title} is known to run it: change what calls it, or choose another loop"
        levels = ", ".join(f"{number} ({named[number].name})" for number in wanted)
        return f"these paths ask for level {levels}: seatrial run {self.loop.name} --level {','.join(map(str, wanted))}"
