"""One level: run its processes, gather what they left, judge it, store it.

`run_level` starts processes; `judge_level` only reads files, so that a level whose Seatrial was killed can be judged
from what is on disk.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from seatrial.evidence.imports import judge_imports, read_imports
from seatrial.evidence.redact import Redactor
from seatrial.files import number_to_json, write_json, write_text
from seatrial.launch.process import ProcessSpec, Tick, run
from seatrial.metrics.checks import evaluate, undamaged
from seatrial.metrics.read import read_metrics
from seatrial.model.errors import UserError
from seatrial.model.knowledge import CheckSpec, Level
from seatrial.model.loop import Context, Loop, Phase
from seatrial.model.record import CheckResult, Diagnosis, ImportProof, LevelResult, PhaseOutcome
from seatrial.model.series import Damage, Metrics, Overlap, Series
from seatrial.model.verdict import Verdict
from seatrial.trial.diagnosis import read_diagnosis
from seatrial.trial.follow import Follower
from seatrial.trial.judge import Evidence, judge
from seatrial.trial.preflight import child_environment
from seatrial.trial.progress import Listener

IMPORTS = "imports.jsonl"


@dataclass(frozen=True, slots=True)
class Limits:
    """Deadlines that the user set; None keeps the level's own."""

    deadline_minutes: float | None = None
    stall_minutes: float | None = None


@dataclass(frozen=True, slots=True)
class Bench:
    """What every level of a trial shares."""

    loop: Loop
    context: Context
    instruments: Path
    environ: dict[str, str]
    redactor: Redactor
    limits: Limits
    listener: Listener

    def import_path(self) -> tuple[str, ...]:
        """What stands on PYTHONPATH: checkouts under test first, then the instruments."""
        return (*self.context.import_path(), str(self.instruments))


def phase_log(directory: Path, phases: Sequence[Phase], phase: Phase) -> Path:
    """A level with one process has one log; otherwise each process has its own, joined at the end."""
    return directory / "run.log" if len(phases) == 1 else directory / phase.name / "run.log"


def run_level(bench: Bench, level: Level, directory: Path) -> tuple[PhaseOutcome, ...]:
    """Run the processes of a level until one of them fails. What an earlier attempt left is kept beside, not mixed in."""
    _set_aside(directory)
    phases = bench.loop.phases(level, bench.context, directory)
    outcomes: list[PhaseOutcome] = []
    for phase in phases:
        (directory / phase.name).mkdir(parents=True, exist_ok=True)
        outcome = _run_phase(bench, level, directory, phases, phase)
        outcomes.append(outcome)
        write_json(directory / "phases.json", [item.model_dump(mode="json") for item in outcomes])
        if outcome.ended != "exited" or outcome.exit_code != 0:
            break
    _join_logs(directory, phases)
    return tuple(outcomes)


def _set_aside(directory: Path) -> None:
    """Move an earlier attempt into `attempts/`, so that no metric of it is read as one of this attempt."""
    kept = [path for path in directory.glob("*") if path.name not in ("attempts", "command.sh")]
    if kept:
        number = len(list(directory.glob("attempts/*"))) + 1
        target = directory / "attempts" / str(number)
        target.mkdir(parents=True)
        for path in kept:
            path.rename(target / path.name)


def _run_phase(bench: Bench, level: Level, directory: Path, phases: Sequence[Phase], phase: Phase) -> PhaseOutcome:
    limits = bench.limits
    spec = ProcessSpec(
        argv=phase.argv,
        env=child_environment(bench.environ, bench.import_path(), phase.env),
        cwd=bench.instruments,  # an older Python puts the working directory first on its path: nothing else is there
        log=phase_log(directory, phases, phase),
        run_id=f"{bench.context.run_dir.name}-{level.number}-{phase.name}-{time.time_ns()}",
        deadline_s=60 * (limits.deadline_minutes or level.deadline_minutes),
        stall_s=60 * (limits.stall_minutes or level.stall_minutes),
        watch=(directory / phase.name,),
        line_filter=bench.redactor.lines(program=True).line,
    )
    follower = Follower(bench.listener, level, phase, directory / phase.name / "metrics.jsonl")

    def tick(beat: Tick) -> None:
        follower.tick(beat.seconds, beat.last_line)

    outcome = run(spec, tick)
    return PhaseOutcome(
        name=phase.name,
        exit_code=outcome.exit_code,
        ended=outcome.ended,
        seconds=round(outcome.seconds, 2),
        cpu_seconds=round(outcome.cpu_seconds, 2),
        signal=outcome.signal,
    )


def _join_logs(directory: Path, phases: Sequence[Phase]) -> None:
    """One run.log per level, with a heading per process."""
    if len(phases) == 1:
        return
    with (directory / "run.log").open("wb") as whole:
        for phase in phases:
            log = phase_log(directory, phases, phase)
            if log.is_file():
                whole.write(f"===== {phase.name} =====\n".encode())
                with log.open("rb") as part:
                    shutil.copyfileobj(part, whole)


def read_level_metrics(loop: Loop, directory: Path) -> Metrics:
    """All metrics of a level; a file that cannot be read is damage."""
    series: dict[str, Series] = {}
    damage: list[Damage] = []
    overlaps: list[Overlap] = []
    sources: list[str] = []
    for prefix, paths in loop.metric_files(directory).items():
        try:
            found = read_metrics(paths, prefix)
        except UserError as error:
            damage.append(Damage(str(paths[0]), "whole file", 0, error.message))
            continue
        series.update(found.series)
        damage += found.damage
        overlaps += found.overlaps
        sources += found.sources
    return Metrics(series=series, damage=tuple(damage), overlaps=tuple(overlaps), sources=tuple(sources))


def write_level_metrics(metrics: Metrics, path: Path) -> None:
    """One row per step with every tag, in strict JSON."""
    rows: dict[int, dict[str, float | str]] = {}
    for tag, series in metrics.series.items():
        for step, value in zip(series.steps, series.values, strict=True):
            rows.setdefault(step, {})[tag] = number_to_json(value)
    lines = [json.dumps({"step": step, **rows[step]}, ensure_ascii=False, allow_nan=False) for step in sorted(rows)]
    write_text(path, "".join(line + "\n" for line in lines))


def level_imports(directory: Path) -> tuple[ImportProof, ...]:
    """What the processes of a level imported from where; nothing when the file is torn, which is judged with the level."""
    try:
        return read_imports(directory / IMPORTS)
    except UserError:
        return ()


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
    for phase in phases[: len(outcomes)]:
        log = phase_log(directory, phases, phase)
        if not log.is_file():
            continue
        found = read_diagnosis(bench.loop, log)
        if found.verdict is not None:
            return found
    return found


def judge_level(bench: Bench, level: Level, directory: Path, outcomes: Sequence[PhaseOutcome]) -> LevelResult:
    """Read what the level left, judge it, and store checks.json, metrics.jsonl and result.json."""
    loop = bench.loop
    phases = loop.phases(level, bench.context, directory)
    metrics = read_level_metrics(loop, directory)
    diagnosis = _diagnose(bench, directory, phases, outcomes)
    complete = len(outcomes) == len(phases) and all(o.ended == "exited" and o.exit_code == 0 for o in outcomes)
    checks: tuple[CheckResult, ...] = ()
    if complete:
        checks = (*loop.proofs(level, directory, metrics), *(_expression(spec, metrics) for spec in level.checks), *_sound(metrics))
    expected = min((phase.steps for phase in phases if phase.steps is not None), default=None)
    evidence = Evidence(
        metrics=metrics,
        checks=checks,
        diagnosis=diagnosis,
        phases=tuple(outcomes),
        wrong_imports=_wrong_imports(bench, directory, phases, complete),
        steps_expected=expected,
        steps_reached=loop.steps_reached(metrics),
        vacuous=loop.vacuous(metrics) if complete else None,
        change_roots=tuple(repo.path for repo in bench.context.changes),
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
        limitations=_limitations(bench, level),
        follow_ups=(diagnosis.advice,) if diagnosis and diagnosis.advice and diagnosis.verdict else (),
        key_lines=_key_lines(diagnosis),
        directory=str(directory.relative_to(bench.context.run_dir)),
        seconds=round(sum(o.seconds for o in outcomes), 2),
        cpu_seconds=round(sum(o.cpu_seconds for o in outcomes), 2),
    )
    write_level_metrics(metrics, directory / "metrics.jsonl")
    write_json(directory / "checks.json", [check.model_dump(mode="json") for check in checks])
    write_json(directory / "result.json", result)
    return result


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
    """Evaluate a check; one that is met says why it is there."""
    result = evaluate(spec.expr, metrics, spec.boundary)
    return result if result.message else result.model_copy(update={"message": spec.why})


def _key_lines(diagnosis: Diagnosis | None) -> tuple[str, ...]:
    if diagnosis is None or diagnosis.line is None:
        return ()
    return (f"{diagnosis.file}:{diagnosis.line}: {diagnosis.cause}",)


def _limitations(bench: Bench, level: Level) -> tuple[str, ...]:
    """What the level must not be read as, and what the user changed about it."""
    context = bench.context
    made = list(level.claims_not)
    if context.model == bench.loop.default_model:
        made.append("a tiny model with random weights, made locally: no pretrained weights were tested")
    if context.arguments:
        made.append(f"loop arguments override the level's own settings: {' '.join(bench.redactor.value(context.arguments))}")
    if context.options.get("fault"):
        made.append(f"a fault was injected on purpose: {context.options['fault']}")
    return tuple(made)
