"""The line that shows why a verdict on files is what it is, and what to do about it.

It is computed from data: the diagnosis, the checks with their metric, step and line, and the metrics themselves. A log is searched
for the row that prints a metric at a step; where it prints none, the metrics files are. Where no line shows the cause, the place has
a file without a line, and its text names metric, step and value. The last line of a log, or its exit code 0, shows no cause.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from seatrial.core.guarded import parse_step
from seatrial.core.log_text import Finder
from seatrial.core.loop import Loop
from seatrial.core.records import CheckResult, Diagnosis
from seatrial.core.series import Metrics, Series
from seatrial.core.specs import Level, Milestone
from seatrial.core.verdict import Boundary, Verdict
from seatrial.triage.advice import Situation, advise
from seatrial.triage.log import Line, read_log
from seatrial.trial.judge import Evidence, Judgement

CLIP = 300
LARGEST = 64 << 20
"""Bytes of a metrics file that is searched for a row."""
STILL: dict[Boundary, tuple[str, ...]] = {
    Boundary.REWARD: (
        r"advantages/(?:max|mean)",
        r"reward_std",
        r"frac_reward_zero_std",
        r"(?:pct_mixed|score/(?:max|mean)|rewards?/mean|reward)",
        r"grad_norm",
        r"loss",
    ),
    Boundary.OPTIMIZER: (r"(?:lr|learning_rate)", r"grad_norm", r"(?:pg_)?loss"),
    Boundary.DATA: (r"(?:global_valid_toks|num_tokens)", r"response_length/(?:mean|max)", r"completions/(?:mean|max)_length", r"loss"),
}
"""Metrics that stand still where nothing could be learned, by boundary; what says most first."""
_GENERIC = frozenset({"max", "min", "mean", "std", "avg", "sum", "total", "count"})
_NUMBER = r"[-+]?(?:\d[\d_]*\.?\d*(?:e[-+]?\d+)?|\.\d+|nan|inf(?:inity)?|none|null)"
_STEP = re.compile(r"\bstep:(\d+) - |['\"](?:step|global_step|_step)['\"]: ?(\d+)")
_NOT_FINITE = re.compile(r"['\"]?[\w/ ]+['\"]?\s*[:=]\s*['\"]?(?:np\.\w+\()?(?:-?(?:nan|inf(?:inity)?)\b)", re.IGNORECASE)


class LogPlace(NamedTuple):
    file: str | None
    line: int | None
    text: str


class _Point(NamedTuple):
    tag: str
    step: int
    value: float

    def words(self) -> str:
        return f"{self.tag} = {self.value:g} at step {self.step}"


@dataclass(frozen=True, slots=True)
class FailureCase:
    judgement: Judgement
    evidence: Evidence
    checks: Sequence[CheckResult]
    """Every check, also those that only make a run inconclusive."""
    log: Path
    loop: Loop
    level: Level | None = None
    measured: bool = False
    """Metrics files were given."""

    @property
    def milestones(self) -> tuple[Milestone, ...]:
        return self.loop.milestones()

    @property
    def diagnosis(self) -> Diagnosis:
        return self.evidence.diagnosis or Diagnosis()


def decisive(case: FailureCase) -> LogPlace:
    found = case.diagnosis
    if found.line is not None and found.verdict is not None and _by_diagnosis(case):
        return LogPlace(found.file, found.line, found.cause)
    if case.judgement.verdict is Verdict.PASS:
        return _last_match(case.log, case.milestones[-1].pattern) or LogPlace(str(case.log), None, case.judgement.reason)
    made = (place for rule in (_of_steps, _of_damage, _of_numbers, _of_checks, _of_stillness, _of_several) if (place := rule(case)))
    return next(made, None) or LogPlace(str(case.log), None, case.judgement.reason)


def advice(case: FailureCase) -> str:
    """What to do next: what triage knows of the failure, then what applies to the boundary; nothing for a Pass."""
    judgement = case.judgement
    if judgement.verdict is Verdict.PASS:
        return ""
    situation = Situation(
        boundary=judgement.boundary or Boundary.METRICS,
        verdict=judgement.verdict,
        loop=case.loop.name,
        levels=case.loop.levels(),
        level=case.level.number if case.level else None,
        measured=case.measured,
    )
    known = (case.diagnosis.advice,) if case.diagnosis.advice and case.diagnosis.verdict is not None and _by_diagnosis(case) else ()
    return " ".join((*known, *advise(situation)))


def _by_diagnosis(case: FailureCase) -> bool:
    """Whether triage decided. What the run survived only decides where nothing else was missed."""
    found, judgement = case.diagnosis, case.judgement
    return not found.survived or (judgement.verdict is Verdict.BLOCKED and judgement.boundary is found.boundary and not judgement.vacuous)


def _of_steps(case: FailureCase) -> LogPlace | None:
    """The run ended too early: how far it got."""
    reached, expected = case.evidence.steps_reached, case.evidence.steps_expected
    if case.judgement.verdict is Verdict.BLOCKED and reached is not None:
        return None
    if reached is None and not case.evidence.metrics.damage:
        names = {milestone.id: milestone.pattern for milestone in case.milestones}
        last = names.get(case.diagnosis.milestone or "")
        return (_last_match(case.log, last) if last else None) or LogPlace(str(case.log), None, case.judgement.reason)
    if reached is None or expected is None or reached >= expected:
        return None
    for tag, series in sorted(case.evidence.metrics.series.items(), key=lambda item: not item[0].endswith("loss")):
        if reached in series.steps and (place := _row(case, _Point(tag, reached, series.get(reached) or 0.0))).line:
            return place
    return LogPlace(str(case.log), None, case.judgement.reason)


def _of_damage(case: FailureCase) -> LogPlace | None:
    if not case.evidence.metrics.damage or case.judgement.verdict is not Verdict.FAIL:
        return None
    first = case.evidence.metrics.damage[0]
    number = first.where.removeprefix("line ")
    line = parse_step(number)
    shown = next((text for n, text in _lines(Path(first.path)) if n == line), "") if line else ""
    return LogPlace(first.path, line, _clip(shown) or str(first))


def _of_numbers(case: FailureCase) -> LogPlace | None:
    for tag, series in sorted(case.evidence.metrics.series.items()):
        if steps := series.non_finite():
            return _row(case, _Point(tag, steps[0], series.get(steps[0]) or math.nan))
    return None


def _of_checks(case: FailureCase) -> LogPlace | None:
    """The row of the metric that a missed check measured, or the line that it read."""
    missed = [check for check in case.checks if not check.passed]
    if case.judgement.verdict is Verdict.BLOCKED:
        missed = [check for check in missed if check.boundary is case.judgement.boundary]
    for check in missed:
        if check.line is not None:
            return _line(case.log, check.line)
        if (point := _point(check, case.evidence.metrics)) is not None:
            return _row(case, point)
    if missed and case.judgement.verdict is Verdict.FAIL:
        return _not_finite(case.log) or _of_stillness(case) or _progress(case)
    return None


def _of_stillness(case: FailureCase) -> LogPlace | None:
    """A metric that stands still where nothing was learned: at its second step, since a first one may be a start."""
    tags = STILL.get(case.judgement.boundary or Boundary.METRICS)
    names = tags or tuple(name for boundary in STILL for name in STILL[boundary])
    if tags is None and case.judgement.boundary is not Boundary.METRICS:
        return None
    best: _Point | None = None
    for name in names:
        pattern = re.compile(rf"(?:.*/)?{name}")
        for tag, series in sorted(case.evidence.metrics.series.items()):
            if pattern.fullmatch(tag) and (point := _still(tag, series)):
                best = best or point
                place = _row(case, point)
                if place.line is not None:
                    return place
    return _row(case, best) if best else None


def _still(tag: str, series: Series) -> _Point | None:
    """The first point of a metric from which on it is zero (or one, of a share of ties)."""
    quiet = 1.0 if tag.endswith("zero_std") else 0.0
    points = [(step, value) for step, value in zip(series.steps, series.values, strict=True) if step > 0]
    since = len(points)
    while since and abs(points[since - 1][1] - quiet) < 1e-20:
        since -= 1
    return _Point(tag, *points[since]) if since < len(points) and since <= 1 else None


def _of_several(case: FailureCase) -> LogPlace | None:
    """The second beginning of a log of two runs, or the second row of a step."""
    reached, expected = case.evidence.steps_reached, case.evidence.steps_expected
    first = Finder(re.compile(case.milestones[0].pattern))
    begun = list(islice((line for line in read_log(case.log) if first.search(line.text)), 2))
    if len(begun) == 2:
        return LogPlace(str(case.log), begun[1].number, _clip(begun[1].text))
    twice = next((overlap for overlap in case.evidence.metrics.overlaps if overlap.steps), None)
    if twice is not None:
        series = case.evidence.metrics.series.get(twice.tag)
        return _row(case, _Point(twice.tag, twice.steps[0], (series.get(twice.steps[0]) if series else None) or 0.0))
    if reached is not None and expected is not None and reached > expected:
        for tag, series in sorted(case.evidence.metrics.series.items()):
            later = [step for step in series.steps if step > expected]
            if tag.endswith("loss") and later and (place := _row(case, _Point(tag, later[0], series.get(later[0]) or 0.0))).line:
                return place
    return None


def _point(check: CheckResult, metrics: Metrics) -> _Point | None:
    """The value that a missed check is about: at the step it names, else at the step that misses its threshold most."""
    series = metrics.series.get(check.tag)
    if series is None or not series.steps:
        return None
    points = dict(zip(series.steps, series.values, strict=True))
    step = check.step if check.step in points else next((step for step in check.missing if step in points), None)
    if step is None:
        used = [step for step in check.steps if step in points] or list(points)
        worst = min if check.threshold.lstrip().startswith(">") else max
        step = worst(used, key=lambda step: points[step])
    return _Point(check.tag, step, points[step])


def _row(case: FailureCase, point: _Point) -> LogPlace:
    """Where a value is written: in the log, else in a metrics file, else nowhere that has lines."""
    found = _printed(case, point) or next((place for source in case.evidence.metrics.sources if (place := _stored(source, point))), None)
    source = next(iter(case.evidence.metrics.sources), str(case.log))
    return found or LogPlace(source, None, point.words())


def _names(tag: str) -> list[str]:
    """How a tag may be written: whole, without its run, or by its last part where that says enough."""
    parts = tag.split("/")
    names = ["/".join(parts[index:]) for index in range(len(parts))]
    return [name for name in dict.fromkeys([*names, tag.replace("eval/", "eval_", 1)]) if name not in _GENERIC]


def _printed(case: FailureCase, point: _Point) -> LogPlace | None:
    """The line of the log that prints a value. Rows without a step are counted."""
    series = case.evidence.metrics.series.get(point.tag)
    order = series.steps.index(point.step) if series and point.step in series.steps else 0
    for name in _names(point.tag):
        spelled = re.escape(name).replace("_", "[_ ]")
        pattern = _finder(rf"(?:^|[\s'\"•,{{(|-])(?:(?:avg|mean|average|total) )?{spelled}['\"]?\s*[:=]\s*['\"]?(?:np\.\w+\()?({_NUMBER})")
        rows = [(line, found) for line in read_log(case.log) if (found := pattern.search(line.text)) and not line.text.startswith("│")]
        equal = [(line, found) for line, found in rows if _equal(found[1], point.value)]
        said = [(line, found) for line, found in equal if _step_of(line) == point.step]
        counted = [row for row in rows[order : order + 1] if row in equal and _step_of(row[0]) is None]
        chosen = next(iter(said or counted or equal), None)
        if chosen is not None:
            line, found = chosen
            return LogPlace(str(case.log), line.number, _clip(line.text, found.start()))
    return None


def _finder(pattern: str) -> Finder:
    return Finder(re.compile(pattern, re.IGNORECASE))


def _step_of(line: Line) -> int | None:
    found = _STEP.search(line.text)
    number = (found[1] or found[2]) if found else ""
    return int(number) if number and len(number) < 12 else None


def _equal(text: str, value: float) -> bool:
    """Whether a printed number is this value, as rounded there."""
    try:
        number = float("nan" if text.lower() in ("none", "null") else text.replace("_", ""))
    except ValueError:
        return False
    if math.isnan(number) or math.isnan(value):
        return math.isnan(number) and math.isnan(value)
    return number == value or math.isclose(number, value, rel_tol=0.01, abs_tol=1e-4)


def _stored(source: str, point: _Point) -> LogPlace | None:
    """The line of a metrics file: of a row per line, or of an indented document."""
    names = [f'"{name}"' for name in _names(point.tag)]
    here = re.compile(rf'"(?:step|global_step|_step|{point.step})": ?(?:{point.step}\b|[-\d.])')
    inside: list[tuple[int, str]] = []
    below = False
    for number, text in _lines(Path(source)):
        key = next((name for name in names if name in text), None)
        if key and _has_step(text, point.step):
            return LogPlace(source, number, _clip(text, text.index(key)))
        stripped = text.strip()
        if key and stripped.endswith("{"):
            below = True  # {"tag": {"1": 0.0, …}}
        elif below and here.match(stripped) and stripped.startswith(f'"{point.step}"'):
            return LogPlace(source, number, _clip(f"{point.tag} {stripped}"))
        elif stripped.startswith(("}", "]")):
            below, inside = False, []
        elif stripped.startswith("{"):
            inside = []
        if key:
            inside.append((number, text))
        if inside and _has_step(text, point.step):
            return LogPlace(source, inside[0][0], _clip(f"{inside[0][1].strip().rstrip(',')} (step {point.step})"))
        if _has_step(text, point.step):
            inside.append((-1, ""))  # the step stands before its values
        elif key and any(n < 0 for n, _ in inside):
            return LogPlace(source, number, _clip(f"{stripped.rstrip(',')} (step {point.step})"))
    return None


def _has_step(text: str, step: int) -> bool:
    return re.search(rf'"(?:step|global_step|_step)": ?{step}\b', text) is not None


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines of a text file; none of a binary, very large or missing one."""
    try:
        if not path.is_file() or path.stat().st_size > LARGEST or "tfevents" in path.name:
            return
        with path.open(encoding="utf-8", errors="replace", newline="\n") as stream:
            yield from enumerate((line.rstrip("\n") for line in stream), 1)
    except OSError:
        return


def _not_finite(log: Path) -> LogPlace | None:
    found = next((line for line in read_log(log) if _NOT_FINITE.search(line.text)), None)
    return LogPlace(str(log), found.number, _clip(found.text)) if found else None


def _progress(case: FailureCase) -> LogPlace | None:
    """The last milestone: a log that does not show the end of the run shows how far it got."""
    names = {milestone.id: milestone.pattern for milestone in case.milestones}
    last = names.get(case.diagnosis.milestone or "")
    return _last_match(case.log, last) if last and case.diagnosis.milestone != case.milestones[-1].id else None


def _last_match(log: Path, pattern: str) -> LogPlace | None:
    compiled, last = Finder(re.compile(pattern)), None
    for line in read_log(log):
        if compiled.search(line.text) or compiled.search(line.body):
            last = line
    return LogPlace(str(log), last.number, _clip(last.text)) if last else None


def _line(log: Path, number: int) -> LogPlace:
    found = next(iter(read_log(log).between(number, number)), None)
    return LogPlace(str(log), number, _clip(found.text) if found else "")


def _clip(text: str, at: int = 0) -> str:
    """A text of bearable length that shows what stands at a position."""
    text = text.rstrip()
    if len(text.strip()) <= CLIP:
        return text.strip()
    begin = max(0, at - CLIP // 3) if at > CLIP // 2 else 0
    return ("…" if begin else "") + text[begin : begin + CLIP].strip()
