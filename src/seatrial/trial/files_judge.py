"""Judges files that any run left: a log, and metrics where there are some. Runs nothing.

- What only probes can show (weights, resumes, refits) cannot be judged from such files: a level that rests on it never passes here.
  Without a level, Pass means what the reason says: the run completed, soundly and not vacuously.
- A log without training may hold a list of stages (lines that begin or end with PASS or FAIL) or refits of a generator; both are
  judged.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, pairwise
from pathlib import Path

from seatrial.checks.log_lines import LogFacts, exited, finite, one_run, read_facts
from seatrial.checks.probe_facts import proof
from seatrial.checks.training_run import Findings, examine, matches
from seatrial.core.files import LINE, LeftOut, left_out_of
from seatrial.core.guarded import BadValue, parse_float
from seatrial.core.log_text import Finder
from seatrial.core.loop import Loop
from seatrial.core.records import CheckResult, Diagnosis, Record
from seatrial.core.records import replace as replace_record
from seatrial.core.series import Metrics
from seatrial.core.specs import CheckSpec, Level, Milestone
from seatrial.core.verdict import Boundary, Verdict
from seatrial.evidence.redact import Redactor
from seatrial.metrics.checks import evaluate
from seatrial.metrics.read import read_run
from seatrial.triage.diagnose import stage_boundary
from seatrial.triage.log import read_log
from seatrial.trial.decisive import FailureCase, advice, decisive
from seatrial.trial.judge import Evidence, Judgement, judge
from seatrial.trial.level import read_diagnosis

STAGE = re.compile(r"PASS (?P<head>\S.*)|(?P<tail>\S.*) (?P<word>PASS|FAIL)$")
REFIT = re.compile(
    r"""(?:\{"tag": "|\s+)(?P<tag>initial|stale|after).*(?:"token_mult_prob_error": |mult_err )(?P<error>[\d.e+-]+|nan|inf)"""
)
MEASURED = re.compile(r"token_mult_prob_error\S* .*= (?P<error>[\d.e+-]+|nan|inf)$")
CLOSING = re.compile(r"save\S*load|save_hf_pretrained|\breload|adapter export", re.IGNORECASE)
SWITCH = re.compile(r"(\w+=)(True|False)\b")
ENDED = re.compile(r"\b(?:rc|exit code)[ =:]*0\b|real\s+\d+m[\d.]+s$")
"""The shell's word that the program is over: its exit code, or its time."""
TOLERANCE = 1.05
"""The relative error of token probabilities that a refit may leave; what a stale weight leaves is above it."""


@dataclass(slots=True)
class Stages:
    passed: dict[int, str] = field(default_factory=dict)
    """Stages by line."""
    refits: dict[int, float] = field(default_factory=dict)
    """Errors after a refit, by line."""
    failed: tuple[int, str, Boundary] | None = None
    controls: int = 0
    ended: bool = False
    text: dict[int, str] = field(default_factory=dict)

    def checks(self) -> tuple[CheckResult, ...]:
        stages = [CheckResult(name=f"line {n}: {name[:60]}", kind="proof", passed=True) for n, name in self.passed.items()]
        name, most = "the generator agrees after a refit", f"<= {TOLERANCE}"
        refits = [proof(f"line {n}: {name}", error <= TOLERANCE, str(error), Boundary.REFIT, most) for n, error in self.refits.items()]
        return (*stages, *refits)

    def line(self) -> int:
        """The decisive one: the first failure, else the last stage that closes the list, or the last refit."""
        if self.failed is not None:
            return self.failed[0]
        closing = [n for n, name in self.passed.items() if CLOSING.search(name)]
        return max([*closing, *self.refits], default=max(self.passed, default=0))

    def judgement(self) -> Judgement:
        if self.failed is not None:
            return Judgement(Verdict.FAIL, f"the log shows a failure: {self.failed[1]}", self.failed[2])
        if missing := self._missing():
            return Judgement(Verdict.BLOCKED, f"inconclusive: {missing}", Boundary.METRICS, vacuous=True)
        count = len(self.passed) + len(self.refits)
        return Judgement(Verdict.PASS, f"{count} stages passed, with the one that closes the list; no training is shown")

    def _missing(self) -> str | None:
        if self.refits and not self.passed:
            if not self.controls:
                return "no control shows that the refit had something to change"
            return None if self.ended else "the log does not show the end of the program"
        if not any(CLOSING.search(name) for name in self.passed.values()):
            return "no stage closes the list (a reload of what was saved, or an export): it may have been cut off"
        switched = {(SWITCH.sub(r"\1", _name(name)), match[2]) for name in self.passed.values() if (match := SWITCH.search(_name(name)))}
        alone = sorted(name for name, value in switched if (name, str(value != "True")) not in switched)
        return f"only one setting of {alone[0]!r} was run: the list may have been cut off" if alone else None


def read_stages(log: Path) -> Stages | None:
    """The stages and refits of a log; None when it holds none."""
    found = Stages()
    for line in read_log(log):
        if stage := STAGE.match(line.body):
            name = stage["head"] or stage["tail"]
            if stage["word"] == "FAIL":
                found.failed = found.failed or (line.number, line.body.strip(), stage_boundary(name))
            else:
                found.passed[line.number] = name
        elif refit := REFIT.match(line.body) or MEASURED.match(line.body):
            _add_refit(found, line.number, refit)
        elif ENDED.search(line.body):
            found.ended = True
        else:
            continue
        found.text[line.number] = line.body.strip()
    return found if found.passed or found.refits or found.failed else None


def _add_refit(found: Stages, number: int, row: re.Match[str]) -> None:
    try:
        error = parse_float(row["error"])
    except BadValue:
        error = math.nan  # a measurement that cannot be read shows no agreement
    tag = row.groupdict().get("tag", "after")
    if tag == "stale":
        found.controls += error > TOLERANCE
    elif tag == "after":
        found.refits[number] = error
        if not error <= TOLERANCE and found.failed is None:
            found.failed = (number, row.string.strip(), Boundary.REFIT)


def _name(stage: str) -> str:
    return re.split(r" [(\[]|: ", stage)[0]


STEPS = ("first step", "step begun")
"""The milestones that only training reaches."""


class FileVerdict(Record):
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
    measures = loop.measures
    diagnosis = read_diagnosis(loop, log)
    printed = measures.read_console(log)
    metrics = read_run(metric_paths) if metric_paths else printed
    planned = expected if expected is not None else measures.steps_planned((*metric_paths, log))
    done = loop.milestones()[-1]
    completed = diagnosis.milestone == done.id
    # A console that prints too little for a verdict is no failure of the run, nor is a run of another kind than the level's: what is
    # lacking makes it inconclusive, never a Pass.
    other = measures.other_run(log) if level else None
    scarce = other is not None or (not metric_paths and measures.unseen(metrics) is not None)
    facts = read_facts(read_log(log), re.compile(done.pattern), re.compile(_step(loop).pattern))
    reached = measures.steps_reached(metrics)
    interval = measures.log_interval(tuple(metric_paths))
    found = examine(metrics, printed if metric_paths else None, measures.signals, _last(reached, planned, printed.steps_taken), interval)
    left_out = left_out_of(log)
    found.doubts += [*_begun_late(loop, metrics, printed, facts), *one_run(facts), *_unread(left_out)]
    evidence = Evidence(
        metrics=metrics,
        checks=(_completed(done, completed), *exited(facts), *finite(facts), *found.checks, *_checks(level, metrics, scarce)),
        diagnosis=diagnosis,
        steps_expected=planned,
        steps_reached=reached,
        vacuous=measures.vacuous(metrics),
    )
    if evidence.steps_reached is None and planned is None and diagnosis.verdict is None and (stages := read_stages(log)):
        return _staged(stages, diagnosis, log)
    judgement = judge(evidence, loop.milestones())
    checks = (*evidence.checks, *found.doubts)
    if judgement.verdict is Verdict.PASS:
        judgement = _inconclusive(loop, log, level, evidence, found, other) or judge(replace(evidence, checks=checks), loop.milestones())
    limitations = (
        *_limitations(loop, level, metrics, not metric_paths, planned, scarce),
        *measures.not_exercised(log),
        *_skimmed(left_out),
    )
    return _result(FailureCase(judgement, evidence, checks, log, loop, level, measured=bool(metric_paths)), limitations)


def _inconclusive(loop: Loop, log: Path, level: Level | None, evidence: Evidence, found: Findings, other: str | None) -> Judgement | None:
    """What a Pass would claim and these files do not show; `other` says why the run is not one of the level."""
    missing = other or _unseen(loop, level, evidence.metrics) or _several(evidence) or _restarted(loop, log)
    doubt = found.missed_doubt()
    if missing is None and doubt is not None:
        return Judgement(Verdict.BLOCKED, f"inconclusive: {doubt.message or doubt.name}", doubt.boundary, vacuous=True)
    return Judgement(Verdict.BLOCKED, f"inconclusive: {missing}", Boundary.METRICS, vacuous=True) if missing else None


def _step(loop: Loop) -> Milestone:
    """The milestone of a training step; that of the end where a loop has none."""
    return next((milestone for milestone in loop.milestones() if milestone.id in STEPS), loop.milestones()[-1])


def _last(reached: int | None, planned: int | None, taken: int | None) -> int | None:
    """The last step of the run, which may say itself how many it took; a plan that was not reached is another finding."""
    if reached is None:
        return None
    return max(reached if planned is None else min(reached, planned), taken or 0)


def _begun_late(loop: Loop, metrics: Metrics, printed: Metrics, facts: LogFacts) -> list[CheckResult]:
    """A run whose first rows are late was resumed, and says so. Made only where they are late."""
    made = []
    for where, source in (("metrics", metrics), ("log", printed)) if printed is not metrics else (("log", printed),):
        losses = [series for tag, series in source.series.items() if series.steps and matches(tag, loop.measures.signals.loss)]
        if not losses or max(map(len, losses)) < 2 or (source is printed and (source.estimated or source.damage)):
            continue
        first, last = min(series.steps[0] for series in losses), max(series.steps[-1] for series in losses)
        distance = min(after - before for series in losses for before, after in pairwise(series.steps))
        taken = printed.steps_taken
        told = taken is not None and taken < last
        resumed = last - (taken or 0) >= first - distance if told else facts.resumed
        if first > distance and not resumed:
            message = (
                f"the first loss is that of step {first}, and nothing shows that the run was resumed: the steps before it were not seen"
            )
            name = f"the first steps are in the {where}"
            made.append(CheckResult(name=name, kind="proof", passed=False, value=first, message=message, step=first, tag=losses[0].tag))
    return made


def _completed(done: Milestone, reached: bool) -> CheckResult:
    message = "" if reached else "the log does not show the end of the run"
    return CheckResult(name=f"milestone {done.id!r} reached", kind="proof", passed=reached, message=message, boundary=Boundary.METRICS)


def _checks(level: Level | None, metrics: Metrics, scarce: bool) -> tuple[CheckResult, ...]:
    specs = [spec for spec in (level.checks if level else ()) if not _excused(spec, level, metrics, scarce)]
    return tuple(evaluate(spec.expr, metrics, spec.boundary) for spec in specs)


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
    return loop.measures.unseen(metrics)


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
    first = loop.milestones()[0]
    finder = Finder(re.compile(first.pattern))
    begun = [line.number for line in read_log(log) if finder.search(line.body)]
    if len(begun) < 2:
        return None
    return f"the log holds several runs: {first.id!r} is reached in lines {begun[0]} and {begun[1]}; judge one at a time"


def _limitations(
    loop: Loop, level: Level | None, metrics: Metrics, from_console: bool, planned: int | None, scarce: bool
) -> tuple[str, ...]:
    made = ["judged from files alone: imports, weights and exit codes were not seen"]
    if from_console:
        made.append("metrics were read from the console, rounded as printed there")
    if planned is None:
        made.append("the number of steps the run was to take is not known; give --expect-steps")
    for tag, series in metrics.series.items():
        if matches(tag, loop.measures.signals.loss) and series.steps and series.steps[0] > 1:
            made.append(
                f"{tag} begins at step {series.steps[0]}: the steps before it were not seen (a resumed run, or rows that are sparse)"
            )
    for spec in level.checks if level else ():
        if absent := _excused(spec, level, metrics, scarce):
            made.append(f"not checked, since {absent} was not logged: {spec.expr}")
    made += level.claims_not if level else ()
    return tuple(made)


def _unread(left_out: LeftOut) -> list[CheckResult]:
    """An endless line was read wherever it may say that something went wrong. Made only where it was not."""
    if left_out.telling is None:
        return []
    message = (
        f"line {left_out.telling} is longer than {LINE >> 20} MB, and holds too many words of errors and metrics: its middle was not read"
    )
    name = "every line of the log was read"
    return [CheckResult(name=name, kind="proof", passed=False, message=message, boundary=Boundary.METRICS, line=left_out.telling)]


def _skimmed(left_out: LeftOut) -> tuple[str, ...]:
    line = left_out.first
    return () if line is None else (f"line {line} is longer than {LINE >> 20} MB: its middle was read only where it holds telling words",)


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


def _result(case: FailureCase, limitations: tuple[str, ...]) -> FileVerdict:
    place, evidence, judgement = decisive(case), case.evidence, case.judgement
    return FileVerdict(
        verdict=judgement.verdict,
        boundary=judgement.boundary,
        file=place.file,
        line=place.line,
        text=place.text,
        steps_reached=evidence.steps_reached,
        steps_expected=evidence.steps_expected,
        reason=judgement.reason,
        milestone=case.diagnosis.milestone,
        signature=case.diagnosis.signature,
        advice=advice(case),
        checks=tuple(case.checks),
        limitations=limitations,
    )


_LINES_BEFORE, _LONGEST_LINE = 400, 100_000
"""What is read before the decisive line to know what it holds: the name of a value, the begin of a key."""


def redacted(found: FileVerdict, redactor: Redactor) -> FileVerdict:
    """The verdict without secrets: what it quotes is from a log that is not redacted."""
    shown = _in_its_place(found, redactor)

    def clear(text: str) -> str:
        return redactor.text(text.replace(found.text, shown) if shown != found.text else text)

    quoted = {name: clear(getattr(found, name)) for name in ("text", "reason", "advice")}
    limitations = tuple(map(clear, found.limitations))
    signature = found.signature and clear(found.signature)
    return redactor.record(replace_record(found, **quoted, limitations=limitations, signature=signature))


def _in_its_place(found: FileVerdict, redactor: Redactor) -> str:
    """The decisive line as the lines before it leave it: a value may stand below its name."""
    if not found.file or not found.line or not found.text.strip():
        return found.text
    try:
        with Path(found.file).open(encoding="utf-8", errors="surrogateescape", newline="\n") as stream:
            rows = [row[:_LONGEST_LINE] for row in islice(stream, max(0, found.line - _LINES_BEFORE), found.line)]
    except OSError:
        return found.text
    cleared = redactor.rows(rows)
    if not rows or cleared[-1] == rows[-1] or cleared[-1] == redactor.text(rows[-1]):
        return found.text
    return cleared[-1].strip()[: max(len(found.text), 200)]
