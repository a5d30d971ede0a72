"""Judging files that any run left: a log, and metrics where there are some. Nothing is run.

What only probes can show (weights, resumes, refits) cannot be judged from such files. A level that rests on it is
therefore never Pass here; without a level, Pass means what the reason says: the run completed, soundly and not vacuously.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from seatrial.files import number_to_json
from seatrial.metrics.checks import evaluate
from seatrial.metrics.read import read_metrics
from seatrial.model.knowledge import CheckSpec, Level, Milestone
from seatrial.model.loop import Loop
from seatrial.model.record import CheckResult, Diagnosis, Record
from seatrial.model.series import Metrics
from seatrial.model.verdict import Boundary, Verdict
from seatrial.triage.log import read_log
from seatrial.trial.diagnosis import read_diagnosis
from seatrial.trial.judge import Evidence, Judgement, judge
from seatrial.trial.stages import Stages, read_stages

NOT_FINITE = re.compile(
    r"""\{(?=['"](?:loss|reward|num_tokens|train_runtime|eval_\w+)['"]: )[^{}]*['"]: ['"]?(?:-?(?:nan|inf(?:inity)?)|none|null)['"]?[,}]"""
    r"|\bstep:\d+ - .*:(?:np\.\w+\()?-?(?:nan|inf)\)?(?: - |$)",
    re.IGNORECASE,
)
"""A value in a printed row of metrics: a dict, or `step:3 - key:nan - key:1.0`."""
EVALUATION = ("eval", "val", "test")
EXIT_CODE = re.compile(r"\b(?:rc|exit code|exit status)[ =:]+(\d+)\b")
"""What the shell that launched a run may write as its last line."""
EXITED = re.compile(
    r"(?:rc|exit[ _]?code|exit status)[ =:]+(\d+)\b|srun: error: .*exit code (\d+)$|make.*: \*\*\* .* Error (\d+)$", re.IGNORECASE
)
"""The same at the start of one of the last lines: the time that was used, or a scheduler's words, may follow."""
LAST = 8
FOREIGN = 0.05
"""Share of values that may differ between a log and its metrics."""
TIMED_OUT = 124
"""The exit code of `timeout`: it ended the program after its work, or before; the log says which."""


class FileVerdict(Record):
    """What `seatrial judge` prints."""

    verdict: Verdict
    boundary: Boundary | None
    file: str | None
    line: int | None
    """The decisive line, counting newline characters only."""
    text: str
    steps_reached: int | None
    steps_expected: int | None
    reason: str
    milestone: str | None
    signature: str | None
    advice: str
    checks: tuple[CheckResult, ...]
    limitations: tuple[str, ...]


def judge_files(loop: Loop, log: Path, metric_paths: Sequence[Path], level: Level | None, expected: int | None) -> FileVerdict:
    """The verdict on a log and its metrics."""
    diagnosis = read_diagnosis(loop, log)
    metrics = read_metrics(metric_paths) if metric_paths else loop.read_console(log)
    planned = expected if expected is not None else loop.steps_planned((*metric_paths, log))
    done = loop.milestones()[-1]
    completed = diagnosis.milestone == done.id
    # A console that prints too little for a verdict is no failure of the run: what it lacks makes it inconclusive, never a Pass.
    scarce = not metric_paths and loop.unseen(metrics) is not None
    evidence = Evidence(
        metrics=metrics,
        checks=(_completed(done, completed), *_exited(log), *_checks(level, metrics, scarce)),
        diagnosis=diagnosis,
        steps_expected=planned,
        steps_reached=loop.steps_reached(metrics),
        vacuous=loop.vacuous(metrics),
    )
    if evidence.steps_reached is None and planned is None and diagnosis.verdict is None and (stages := read_stages(log)):
        return _staged(stages, diagnosis, log)
    judgement = judge(evidence, loop.milestones())
    if judgement.verdict is Verdict.PASS:
        foreign = _foreign(loop, log, metrics) if metric_paths else None
        other = loop.other_run(level, log) if level else None
        missing = other or _unseen(loop, level, metrics) or _several(evidence) or _restarted(loop, log) or foreign
        if missing:
            judgement = Judgement(Verdict.BLOCKED, f"inconclusive: {missing}", Boundary.METRICS, vacuous=True)
    return _result(judgement, evidence, diagnosis, log, done, _limitations(level, metrics, not metric_paths, planned, scarce))


def _completed(done: Milestone, reached: bool) -> CheckResult:
    """The log shows that the work was done."""
    message = "" if reached else "the log does not show the end of the run"
    return CheckResult(name=f"milestone {done.id!r} reached", kind="proof", passed=reached, message=message, boundary=Boundary.METRICS)


def _exited(log: Path) -> list[CheckResult]:
    """The exit code, where the last lines of the log say one."""
    last = deque((line.body for line in read_log(log) if line.body.strip() and not line.process), maxlen=LAST)
    said = [match for line in last if (match := EXITED.match(line))] + ([match] if last and (match := EXIT_CODE.search(last[-1])) else [])
    if not said:
        return []
    code = int(next(group for group in said[-1].groups() if group))
    return [CheckResult(name="exit code", kind="proof", passed=code in (0, TIMED_OUT), value=code, boundary=Boundary.ENVIRONMENT)]


def _checks(level: Level | None, metrics: Metrics, scarce: bool) -> tuple[CheckResult, ...]:
    """A gradient that is not zero for each model that was trained, and the checks of the level whose metrics are there."""
    made = []
    norms = [series for tag, series in metrics.series.items() if tag.rpartition("/")[2] == "grad_norm"]
    if norms:
        least = min(max(series.values, default=0.0) for series in norms)
        text = number_to_json(least)
        made.append(CheckResult(name="some gradient is not zero", kind="proof", passed=least > 0, value=text, boundary=Boundary.OPTIMIZER))
    made += _gaps(metrics)
    specs = [spec for spec in (level.checks if level else ()) if not _excused(spec, level, metrics, scarce)]
    made += [evaluate(spec.expr, metrics, spec.boundary) for spec in specs]
    return tuple(made)


def _gaps(metrics: Metrics) -> list[CheckResult]:
    """Losses are logged at even distances; a hole much wider than the others is steps that nobody saw."""
    made = []
    for tag, series in metrics.series.items():
        if tag.rpartition("/")[2] == "loss" and not tag.startswith(EVALUATION) and len(series) > 2:
            distances = [after - before for before, after in pairwise(series.steps)]
            widest, usual = max(distances), sorted(distances)[(len(distances) - 1) // 2]
            holes = tuple(before + usual for before, after in pairwise(series.steps) if after - before > usual)
            value = f"at most {widest} steps apart, usually {usual}"
            made.append(CheckResult(name=f"{tag} is logged without holes", kind="proof", passed=not holes, value=value, missing=holes))
    return made


def _excused(spec: CheckSpec, level: Level | None, metrics: Metrics, scarce: bool) -> str | None:
    """A metric that these files need not hold: only Seatrial's own run of the level has it, or the console does not print it."""
    absent = [tag for tag in re.findall(r'data\["([^"]+)"\]', spec.expr) if tag not in metrics.series]
    own = scarce or spec.driver or (level is not None and level.number != 0)
    return absent[0] if absent and own else None


def _unseen(loop: Loop, level: Level | None, metrics: Metrics) -> str | None:
    """What a Pass would claim and these files cannot show."""
    if level is not None and level.number != 0:
        command = f"seatrial run {loop.name} --level {level.number}"
        return f"what level {level.number} proves cannot be seen in a log and metrics; run `{command}`"
    return loop.unseen(metrics)


def _several(evidence: Evidence) -> str | None:
    """More steps than the run was to take, or two values for one: the files hold more than one run, and which of them is
    meant is not known."""
    reached, expected = evidence.steps_reached, evidence.steps_expected
    if expected is not None and reached is not None and reached > expected:
        return f"{reached} steps are shown where {expected} were expected: the files hold several runs; judge one at a time"
    twice = next((overlap for overlap in evidence.metrics.overlaps if overlap.steps), None)
    if twice is not None:
        return f"{twice.tag} has several values at step {twice.steps[0]}: the files hold several runs; judge one at a time"
    return None


def _restarted(loop: Loop, log: Path) -> str | None:
    """The log of more than one run: one may have failed where another wrote what is missing."""
    first = loop.milestones()[0]
    begun = [line.number for line in read_log(log) if re.search(first.pattern, line.text)]
    if len(begun) < 2:
        return None
    return f"the log holds several runs: {first.id!r} is reached in lines {begun[0]} and {begun[1]}; judge one at a time"


def _foreign(loop: Loop, log: Path, metrics: Metrics) -> str | None:
    """Metrics of another run. Both come from the same numbers: what the log prints of them may be rounded, not different."""
    points = apart = 0
    for tag, printed in loop.read_console(log).series.items():
        written = metrics.series.get(tag)
        values = dict(zip(written.steps, written.values, strict=True)) if written else {}
        for step, value in zip(printed.steps, printed.values, strict=True):
            if step in values:
                points += 1
                apart += not math.isclose(value, values[step], rel_tol=0.01, abs_tol=0.001)
    if apart <= points * FOREIGN:
        return None
    return f"{apart} of {points} values are not those that the log prints: the metrics are of another run"


def _limitations(level: Level | None, metrics: Metrics, from_console: bool, planned: int | None, scarce: bool) -> tuple[str, ...]:
    made = ["judged from files alone: imports, weights and exit codes were not seen"]
    if from_console:
        made.append("metrics were read from the console, rounded as printed there")
    if planned is None:
        made.append("the number of steps the run was to take is not known; give --expect-steps")
    for tag, series in metrics.series.items():
        if tag.endswith("loss") and series.steps and series.steps[0] > 1:
            made.append(
                f"{tag} begins at step {series.steps[0]}: the steps before it were not seen (a resumed run, or rows that are sparse)"
            )
    for spec in level.checks if level else ():
        if absent := _excused(spec, level, metrics, scarce):
            made.append(f"not checked, since {absent} was not logged: {spec.expr}")
    made += level.claims_not if level else ()
    return tuple(made)


def _decisive(diagnosis: Diagnosis, log: Path, done: Milestone, passed: bool) -> tuple[str | None, int | None, str]:
    """The line that decided: the first cause; for a Pass, the line that shows completion; else the first row with a
    value that is not finite; else the last line of all."""
    if diagnosis.line is not None and diagnosis.verdict is not None:
        return diagnosis.file, diagnosis.line, diagnosis.cause
    last: tuple[int, str] | None = None
    pattern = re.compile(done.pattern)
    for line in read_log(log):
        if not passed and NOT_FINITE.search(line.text):
            return str(log), line.number, line.text.strip()[:300]
        if line.text.strip() and (not passed or pattern.search(line.text)):
            last = (line.number, line.text.strip())
    return (str(log), last[0], last[1][:300]) if last else (str(log), None, "")


def _staged(stages: Stages, diagnosis: Diagnosis, log: Path) -> FileVerdict:
    """The verdict on a log that holds a list of stages and no training."""
    judgement = stages.judgement()
    line = stages.line()
    return FileVerdict(
        verdict=judgement.verdict,
        boundary=judgement.boundary,
        file=str(log),
        line=line,
        text=stages.text.get(line, "")[:300],
        steps_reached=None,
        steps_expected=None,
        reason=judgement.reason,
        milestone=diagnosis.milestone,
        signature=None,
        advice="",
        checks=stages.checks(),
        limitations=("judged from what a script wrote about its own stages: imports and exit codes were not seen",),
    )


def _result(
    judgement: Judgement, evidence: Evidence, diagnosis: Diagnosis, log: Path, done: Milestone, limitations: tuple[str, ...]
) -> FileVerdict:
    file, line, text = _decisive(diagnosis, log, done, judgement.verdict is Verdict.PASS)
    return FileVerdict(
        verdict=judgement.verdict,
        boundary=judgement.boundary,
        file=file,
        line=line,
        text=text,
        steps_reached=evidence.steps_reached,
        steps_expected=evidence.steps_expected,
        reason=judgement.reason,
        milestone=diagnosis.milestone,
        signature=diagnosis.signature,
        advice=diagnosis.advice,
        checks=evidence.checks,
        limitations=limitations,
    )
