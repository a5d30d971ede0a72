"""The mark of one run: good, bad or skip, from its exit code, log, metrics or trial, compared with how the bad end fails."""

from __future__ import annotations

import ast
import os
import re
import signal
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from seatrial.bisect.bisect_records import BisectPlan, Failure, Mark, SkipKind
from seatrial.bisect.noise_models import Threshold
from seatrial.bisect.run_failures import FailureReading, machine_failures, read_failure
from seatrial.bisect.step_preparer import Observation, RunFacts, skipped
from seatrial.core.errors import UserError
from seatrial.core.files import read_text
from seatrial.core.guarded import real_path
from seatrial.core.records import CheckResult, Trial
from seatrial.core.records import replace as replace_record
from seatrial.core.text import failure_identity, one_line
from seatrial.core.verdict import Boundary, Verdict, exit_code
from seatrial.loops.nightly_scripts import describe_nightly
from seatrial.metrics.checks import evaluate, literal, parse, reads_data, undamaged
from seatrial.metrics.read import read_run
from seatrial.triage.log import read_log
from seatrial.triage.signatures import compile_pattern
from seatrial.trial.run_dir import load


def threshold(check: str) -> Threshold | None:
    """The limit of a check that compares one measured number with a constant; None for every other one."""
    tree = parse(check).tree
    if not isinstance(tree, ast.Compare) or len(tree.ops) != 1 or not isinstance(tree.ops[0], ast.Lt | ast.LtE | ast.Gt | ast.GtE):
        return None
    below, inclusive = isinstance(tree.ops[0], ast.Lt | ast.LtE), isinstance(tree.ops[0], ast.LtE | ast.GtE)
    left, right = tree.left, tree.comparators[0]
    if (limit := literal(right)) is not None and reads_data(left):
        return Threshold(limit, below, inclusive)
    if (limit := literal(left)) is not None and reads_data(right):
        return Threshold(limit, not below, inclusive)
    return None


def measure(check: str, place: Path, started: float) -> CheckResult:
    """The check on what the run left at `place`; metrics that cannot be read, or not wholly, do not pass."""
    with tempfile.TemporaryDirectory(prefix="seatrial-fresh-") as directory:
        links = Path(directory, place.name) if place.is_file() else Path(directory)
        try:
            _link_fresh(place, started, links)
            metrics = read_run([links])
        except UserError as error:
            return CheckResult(name=check, passed=False, message=error.message.replace(str(links), str(place)))
        whole = undamaged(metrics)
        if not whole.passed:
            return CheckResult(name=check, passed=False, message=f"damaged: {whole.message.replace(str(links), str(place))}")
        return evaluate(check, metrics)


def _link_fresh(place: Path, started: float, links: Path) -> None:
    """Links to the files at `place` that the run wrote: an older file is part of the commit, or was left by a build."""
    if not place.exists():
        raise UserError(f"{place}: no such file or directory", "the command must leave its metrics there")
    single = place.is_file()
    files = [place] if single else [Path(parent) / name for parent, _, names in os.walk(place) for name in names]
    fresh = [file for file in files if file.is_file() and file.stat().st_mtime >= started]
    if files and not fresh:
        raise UserError(f"{place}: everything there is older than this run", "the command must write its metrics anew")
    for file in fresh:
        link = links if single else links / file.relative_to(place)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(real_path(file))


def shown(result: CheckResult) -> str:
    told = f"measured {result.value:.6g}, {result.threshold}" if isinstance(result.value, float) else result.threshold
    return one_line(f"{result.name}: {result.message or told}")


_MISSED = "the check is missed"
_SKIP, _MISSING, _SIGNALS = 125, (126, 127), 128
_KILLED = 128 + signal.SIGKILL
_CRASHES = tuple(128 + number for number in (signal.SIGILL, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGSEGV))
_PLACE = re.compile(r"\{(\w+)\}")


def observe(plan: BisectPlan, facts: RunFacts, bad_end: Failure | None) -> Observation:
    """Judge one run. `bad_end` is how the bad end fails; None for the runs of the ends themselves."""
    return replace(_Judge(plan, facts, bad_end).judge(), exit_code=facts.exit_code)


@dataclass(frozen=True, slots=True)
class _Judge:
    plan: BisectPlan
    facts: RunFacts
    end: Failure | None

    def judge(self) -> Observation:
        facts, code = self.facts, self.facts.exit_code
        if facts.scheduler:
            return skipped(SkipKind.ENVIRONMENT, f"the cluster ended it: {facts.scheduler}", transient=True)
        if facts.ended == "interrupted":
            return _abort("it was interrupted, which says nothing about the commit")
        if facts.ended != "exited":
            return self.hung()
        if code is None:
            return skipped(SkipKind.ENVIRONMENT, "how the command ended is not known", transient=True)
        if self.plan.trial:
            return self.trial(code)
        if code == _SKIP:
            return skipped(SkipKind.COMMAND, f"exit {_SKIP}: the command asks to skip this commit")
        return self.done() if code == 0 else self.failed(code)

    def hung(self) -> Observation:
        if self._pattern_found():
            return self._by_pattern()
        reading = read_failure(self.facts.log, None, hung=True)
        if reading.machine:
            return self._by_machine(reading)
        told = f"did not end within {self.plan.minutes:g} minutes" + (f": {reading.failure.shown}" if reading.failure.cause else "")
        return self._compare(replace_record(reading.failure, shown=told), told)

    def failed(self, code: int) -> Observation:
        """It ended with another exit code than 0 and 125."""
        if (code < _SIGNALS or code in _CRASHES) and self._pattern_found():
            return self._by_pattern()
        reading = read_failure(self.facts.log, code)
        if reading.machine:
            return self._by_machine(reading)
        if code == _KILLED:
            return skipped(SkipKind.ENVIRONMENT, f"exit {code}: it was killed, most likely for want of memory", transient=True)
        if code >= _SIGNALS:
            names = {128 + number: number.name for number in signal.Signals}
            by = f"a signal ended the command ({names[code]})" if code in names else f"the command ended with {code}"
            look = "; to search for a crash, say what its log holds with --failure PATTERN" if code in _CRASHES else ""
            return _abort(f"{by}: 128 and up end a bisect, as with git bisect run{look}")
        told = f"exit {code}: {reading.failure.shown}".rstrip(": ")
        if code in _MISSING:
            what = "was not found" if code == 127 else "cannot be run"
            which = f"{one_line(self.plan.command[0])}, or a command that it calls, {what}"
            return skipped(SkipKind.MISSING, f"exit {code}: {which}: {reading.failure.shown}".rstrip(": "))
        if (
            self.plan.check is not None
            and self.plan.failure is None
            and (by_metrics := self._failed_with_metrics(self.plan.check, reading)) is not None
        ):
            return by_metrics
        if self.end is None and not reading.failure.cause:
            told += " (the log shows no cause, so that only exit codes can be compared)"
        return self._compare(reading.failure, told)

    def done(self) -> Observation:
        reading = read_failure(self.facts.log, 0)
        try:
            why = self._incomplete(self.plan.nightly) if self.plan.nightly is not None else None
        except UserError as error:
            # At this commit nobody can say how far it had to run. Others can still be judged.
            return skipped(SkipKind.MISSING, f"exit 0, but whether it ran to its end cannot be told: {error.message}")
        if why:
            if reading.machine:
                return self._by_machine(reading)
            cause = f"incomplete: {failure_identity(one_line(why))}"
            failure = Failure(kind="exit", cause=cause, exit_code=0, shown=f"incomplete: {why}", beside=reading.failure.beside)
            return self._compare(failure, f"exit 0, but incomplete: {why}")
        if self.plan.check is not None:
            return self._measure(self.plan.check, reading)
        if reading.nothing_ran:
            return skipped(SkipKind.COMMAND, f"exit 0, but no test ran: {reading.nothing_ran}")
        if (end := self.end) is not None:
            mine = reading.failure
            diagnosed = mine.boundary is not None and bool(mine.cause) and end.kind == "exit"
            alike = diagnosed and (end.signature, end.cause) == (mine.signature, mine.cause)
            if self._pattern_found() if self.plan.failure is not None else alike:
                return self._other(mine, f"exit 0, although its log shows how the bad end fails: {end.shown}")
        return Observation(mark=Mark.GOOD, reason="exit 0")

    def trial(self, code: int) -> Observation:
        """A trial of Seatrial's own: its verdict, not its log."""
        place = self.facts.trial
        try:
            trial = load(place) if place is not None and (place / "trial.json").is_file() else None
        except UserError as error:
            return skipped(SkipKind.TRIAL, f"its trial.json cannot be believed: {error.message}")
        if trial is None or trial.verdict is None or trial.status != "done":
            said = f"the trial did not come to a verdict: exit {code}"
            unusable = code == 3 or code >= _SIGNALS or (code == 2 and self.end is None)
            return _abort(said) if unusable else skipped(SkipKind.TRIAL, said)
        told = f"{trial.verdict}: {one_line(trial.reason)}"
        if exit_code(trial.verdict) != code:
            return skipped(SkipKind.TRIAL, f"its exit code is {code}, its trial.json says {told}")
        if trial.verdict is Verdict.PASS:
            return Observation(mark=Mark.GOOD, reason=told)
        if trial.verdict is Verdict.FAIL:
            return self._compare(_trial_failure(trial, code), told)
        found = [level.diagnosis.signature for level in trial.levels if level.diagnosis and level.verdict is Verdict.BLOCKED]
        return skipped(SkipKind.TRIAL, told, transient=any(name in machine_failures() for name in found if name))

    def _compare(self, failure: Failure, told: str) -> Observation:
        """Bad, if it is the failure of the bad end; where the user gave a pattern, by that instead."""
        if self.plan.failure is not None:
            if self._pattern_found():
                return self._by_pattern()
            return self._other(failure, f"{told}; its log does not hold {self.plan.failure!r}", failure.beside)
        if self.end is None:
            return Observation(mark=Mark.BAD, reason=told, failure=failure)
        if not (self.plan.any_failure or failure.same(self.end)):
            bad = self.end.shown or self.end.kind
            return self._other(failure, f"{told}; the bad end fails in another way ({bad})", failure.beside)
        return self._bad(failure, told)

    def _bad(self, failure: Failure, told: str, measured: CheckResult | None = None) -> Observation:
        """Bad, unless the machine had a hand in it as it had not at the bad end."""
        value, passed = (measured.value, False) if measured else (None, None)
        new = self._new(failure.beside)
        if new:
            reason = f"it met {', '.join(new)} on its way, from which the rest may follow: {told}"
            return Observation(
                mark=Mark.SKIP, skip=SkipKind.ENVIRONMENT, reason=reason, failure=failure, value=value, passed=passed, transient=True
            )
        return Observation(mark=Mark.BAD, reason=told, failure=failure, value=value, passed=passed)

    def _new(self, beside: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(name for name in beside if self.end is not None and name not in self.end.beside)

    def _other(self, failure: Failure, reason: str, beside: tuple[str, ...] = ()) -> Observation:
        transient = bool(self._new(beside))
        return Observation(mark=Mark.SKIP, skip=SkipKind.OTHER_FAILURE, reason=reason, failure=failure, transient=transient)

    def _by_machine(self, reading: FailureReading) -> Observation:
        reason = f"{reading.machine} ({machine_failures()[reading.machine]}): {reading.failure.shown}"
        if self.end is None:
            reason += "; if this is the failure that you look for, say so with --failure PATTERN"
        return Observation(mark=Mark.SKIP, skip=SkipKind.ENVIRONMENT, reason=reason, failure=reading.failure, transient=True)

    def _pattern_found(self) -> bool:
        if self.plan.failure is None or not self.facts.log.is_file():
            return False
        pattern = compile_pattern("--failure", self.plan.failure)
        return any(pattern.search(line.text) for line in read_log(self.facts.log))

    def _by_pattern(self) -> Observation:
        told = f"its log holds {self.plan.failure!r}"
        failure = Failure(kind="pattern", cause=self.plan.failure or "", exit_code=self.facts.exit_code, shown=told)
        return Observation(mark=Mark.BAD, reason=told, failure=failure)

    def _incomplete(self, script: str) -> str | None:
        file = self.facts.tree / script
        nightly = describe_nightly(script, read_text(file)) if file.is_file() else None
        # A plan has variables only where a loop could describe the script at the bad end.
        if nightly is None and self.plan.variables:
            raise UserError(f"{script} has no CONFIG block, and the bad end's has one", "name ends whose scripts have one")
        return nightly.incomplete(self.facts.tree, self.facts.log) if nightly else None

    def _measure(self, check: str, reading: FailureReading) -> Observation:
        """By the metrics of a run that ended with 0."""
        result = measure(check, self._metrics_place(), self.facts.started)
        if result.passed:
            return Observation(mark=Mark.GOOD, reason=shown(result), value=result.value, passed=True)
        measured = result.measured
        if not measured and reading.machine:
            return self._by_machine(reading)
        met = (*reading.failure.beside, *([reading.machine] if reading.machine else []))
        cause = _MISSED if measured else f"no value: {failure_identity(one_line(result.message))}"
        failure = Failure(
            kind="check", missed=measured, boundary=Boundary.METRICS, cause=cause, exit_code=0, shown=shown(result), beside=met
        )
        if self.end is None:
            return Observation(mark=Mark.BAD, reason=failure.shown, failure=failure, value=result.value, passed=False)
        missed_there = self.end.missed
        if failure.same(self.end) or (measured and (missed_there or self.plan.any_failure)):
            return self._bad(failure, failure.shown, result)
        if not measured:
            return replace(skipped(SkipKind.METRIC, failure.shown), failure=failure)
        return self._other(failure, f"{failure.shown}; the bad end fails in another way ({self.end.shown})", met)

    def _failed_with_metrics(self, check: str, reading: FailureReading) -> Observation | None:
        """By the metrics of a run that failed, if they count; the bad end's own do, when they can be read."""
        cause = f"{_MISSED}, and it ends with {reading.failure.exit_code}: {reading.failure.cause}"
        if self.end is not None and self.end.cause != cause:
            return None
        result = measure(check, self._metrics_place(), self.facts.started)
        told = f"exit {reading.failure.exit_code}; {shown(result)}"
        if result.passed:
            return Observation(mark=Mark.GOOD, reason=told, value=result.value, passed=True)
        if not result.measured:
            return skipped(SkipKind.METRIC, told) if self.end else None
        update = {"kind": "check", "missed": True, "boundary": Boundary.METRICS, "signature": None, "cause": cause, "shown": told}
        return self._bad(replace_record(reading.failure, **update), told, result)

    def _metrics_place(self) -> Path:
        """Where the metrics are. Of the placeholders, those that are places of this run."""
        here = {"tree": self.facts.tree, "output": self.facts.output, "checkpoints": self.facts.output.parent / "checkpoints"}
        unknown = [name for name in _PLACE.findall(self.plan.metrics) if name not in here]
        if unknown:
            raise UserError(f"the place of the metrics, {self.plan.metrics}, holds {{{unknown[0]}}}", f"use {{{'}, {'.join(here)}}}")
        return self.facts.tree / _PLACE.sub(lambda found: str(here[found[1]]), self.plan.metrics)


def _abort(why: str) -> Observation:
    return Observation(mark=Mark.SKIP, skip=SkipKind.COMMAND, reason=why, abort=why)


def _trial_failure(trial: Trial, code: int) -> Failure:
    """By what failed first: a level's missed check, its known failure or its reason; else what ran before the levels."""
    for level in trial.levels:
        if level.verdict is Verdict.FAIL:
            missed = next((f"check {check.name}" for check in level.checks if not check.passed), "")
            known = level.diagnosis.signature if level.diagnosis else None
            text = (level.diagnosis.cause if level.diagnosis else "") or level.reason
            cause = f"{level.name}: {missed or known or failure_identity(one_line(text))}"
            shown = f"level {level.number} ({level.name}): {one_line(missed or level.reason)}"
            return Failure(kind="trial", boundary=level.boundary, signature=known, cause=cause, exit_code=code, shown=shown)
    side = next((side for side in trial.sides if side.verdict is Verdict.FAIL), None)
    told = one_line(f"{side.key}: {side.reason}" if side else trial.reason)
    return Failure(kind="trial", boundary=side.boundary if side else None, cause=failure_identity(told), exit_code=code, shown=told)
