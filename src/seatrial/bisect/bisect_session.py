"""One session of a bisect: runs points, and writes a row for each into the journal.

- A point becomes a tree with its submodules, patches and edits, then an environment, then a run; what cannot be made is a skip with
  its reason. A run that the machine failed, not the commit, is tried again, and then a skip.
- A row is written as soon as its run has ended, before anything is concluded from it. What was cancelled leaves no row.
- Trees are removed when their run has ended. Everything else of a step stays, for people.
- When one point after another is lost to the machine, the session ends as Blocked: no commit is blamed.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from seatrial.bisect import bisect_dir
from seatrial.bisect.bisect_dir import JOURNAL, STEP, STEPS, resume_command
from seatrial.bisect.bisect_records import BegunRecord, BisectPlan, BisectRun, Failure, Mark, Point, SkipKind
from seatrial.bisect.judge_run import observe
from seatrial.bisect.runners import is_queued
from seatrial.bisect.step_preparer import BisectStep, Observation, PreparedStep, RunFacts, StepPreparer
from seatrial.core.errors import BlockedError
from seatrial.core.files import read_model, write_json
from seatrial.core.records import replace as replace_record
from seatrial.core.text import one_line
from seatrial.core.verdict import Boundary
from seatrial.evidence.redact import Redactor
from seatrial.runtime.interrupt import check_stop, rest
from seatrial.triage.log import read_log
from seatrial.trial.run_dir import now

LOST_IN_A_ROW = 3
"""So many points lost to the machine one after the other end the session. Chosen, not measured."""
FIRST_WAIT_S = 2.0
"""Before the first new try; doubled for each further one."""
LAST_LINES = 3
"""Of the log of a run that ends the bisect, for the message."""

Tell = Callable[[str], None]
Numbers = Callable[[], set[int]]
Useless = Callable[[Sequence[BisectStep]], set[int]]


class Runner(Protocol):
    """Who runs prepared steps: this machine or a cluster."""

    def run(self, prepared: Sequence[PreparedStep], useless: Numbers) -> Iterator[tuple[PreparedStep, RunFacts]]:
        """Yields each with its facts as it ends, and cancels the steps whose numbers `useless` names."""


class MissingRun(Exception):
    """A row is needed that the journal does not have, and nothing may be run."""


@dataclass(slots=True)
class BisectSession:
    directory: Path
    plan: BisectPlan
    preparer: StepPreparer
    runner: Runner
    redactor: Redactor
    tell: Tell
    rows: list[BisectRun] = field(default_factory=list)
    before: int = 0
    """Rows of earlier sessions: what the machine failed then is tried again now."""
    failures: list[Failure] = field(default_factory=list)
    """How the bad end fails: a bad run must fail in one of these ways."""
    frozen: bool = False
    """Whether the journal is all there is: nothing is run, and no row is written."""
    _steps: int = 0
    _lost: int = 0
    _queued: dict[BegunRecord, list[Path]] = field(default_factory=dict)
    """Steps of an earlier session whose jobs may still be in the queue of a cluster."""

    def __post_init__(self) -> None:
        found = sorted((self.directory / STEPS).glob("[0-9]*-*"))
        self._steps = max((_number(path) for path in found), default=0)
        done = {row.directory for row in self.rows}
        for path in found if self.plan.on else ():
            if f"{STEPS}/{path.name}" not in done and (path / STEP).is_file() and is_queued(path):
                self._queued.setdefault(read_model(path / STEP, BegunRecord), []).append(path)

    def evidence(self, history: int = 0) -> tuple[BisectRun, ...]:
        """The rows that count for a history, without conviction's, which test other states."""
        return tuple(row for row in self.rows if row.history == history and row.stage != "conviction" and not self._forgotten(row))

    def convictions(self, point: str) -> tuple[BisectRun, ...]:
        """The rows of a state that is on no history's line."""
        return tuple(row for row in self.rows if row.point == point and row.stage == "conviction" and not self._forgotten(row))

    def _forgotten(self, row: BisectRun) -> bool:
        return row.skip is SkipKind.ENVIRONMENT and row.number <= self.before

    def execute(self, wanted: Sequence[BisectStep], useless: Useless | None = None) -> list[BisectRun]:
        """Run points, as many at once as the plan says, and write their rows. `useless` names those of the running ones, by their
        place in what it is given, that no longer matter."""
        if self.frozen:
            raise MissingRun
        rows: list[BisectRun] = []
        waiting, tries = list(wanted), 0
        while waiting:
            again: list[BisectStep] = []
            for prepared, seen in self._outcomes(waiting, useless):
                if seen.transient and tries < self.plan.retries:
                    self.tell(f"{short(prepared.step.point)}: {seen.reason}: not the commit's doing, will be tried again")
                    again.append(prepared.step)
                else:
                    rows.append(self._write(prepared, seen, tries))
            check_stop()
            tries += 1
            waiting = again
            if waiting:
                pause = FIRST_WAIT_S * 2 ** (tries - 1)
                self.tell(f"waiting {pause:.0f} s before trying again")
                rest(pause)
        return rows

    def note(self, step: BisectStep, like: BisectRun, reason: str, notes: tuple[str, ...] = (), *, copied: bool = False) -> BisectRun:
        """A row for a point that needs no run, with the result of another row."""
        known = {name: getattr(like, name) for name in ("mark", "value", "passed", "skip", "failure")}
        return self._append(BisectRun(**self._about(step), **known, reason=reason, started=now(), notes=notes, copied=copied))

    def _outcomes(self, wanted: Sequence[BisectStep], useless: Useless | None) -> Iterator[tuple[PreparedStep, Observation]]:
        """What became of each step, as they end."""
        steps = [self._step(one) for one in wanted]
        waited = {step.directory for step in steps if is_queued(step.directory)}
        try:
            with ThreadPoolExecutor(self.plan.jobs, "prepare") as pool:
                prepared = list(pool.map(self._prepare, steps))
            check_stop()
            for one in prepared:
                if one.refused is not None:
                    yield one, one.refused
            ready = [one for one in prepared if one.refused is None]

            def cancel() -> set[int]:
                return {ready[index].step.number for index in useless([one.step for one in ready])} if useless else set()

            waited.clear()  # from here on the runner ends what it does not wait for
            for one, facts in self.runner.run(ready, cancel) if ready else ():
                if facts.ended != "interrupted":
                    yield one, self._observe(facts, one.step.measured)
                self.preparer.clear(one.step)
        finally:
            for step in steps:
                if step.directory not in waited:
                    self.preparer.clear(step)

    def _observe(self, facts: RunFacts, measured: bool) -> Observation:
        """What the run says; it may fail in any of the ways in which the bad end does."""
        seen = observe(self.plan, facts, self.failures[0] if self.failures else None)
        for other in self.failures[1:]:
            if seen.skip not in (SkipKind.OTHER_FAILURE, SkipKind.METRIC):
                break
            seen = observe(self.plan, facts, other)
        unknown = seen.failure is not None and seen.failure.kind == "check" and not seen.failure.missed
        return replace(seen, mark=Mark.SKIP, skip=SkipKind.METRIC) if measured and unknown and seen.mark is Mark.BAD else seen

    def _prepare(self, step: BisectStep) -> PreparedStep:
        return self.preparer.again(step) if is_queued(step.directory) else self.preparer.prepare(step)

    def _step(self, wanted: BisectStep) -> BisectStep:
        """A new step; or the one of an earlier session for the same point, when its job may still be in the queue."""
        begun = BegunRecord(point=wanted.point.id, stage=wanted.stage, history=wanted.history)
        if queued := self._queued.get(begun):
            directory = queued.pop(0)
            self.tell(f"{short(wanted.point)}: its job of an earlier session is waited for")
        else:
            self._steps += 1
            directory = self.directory / STEPS / f"{self._steps:04d}-{wanted.point.commit[:12]}"
            write_json(directory / STEP, begun)
        return replace(wanted, number=_number(directory), directory=directory)

    def _write(self, prepared: PreparedStep, seen: Observation, tries: int) -> BisectRun:
        if seen.abort:
            raise self._aborted(prepared.step, seen)
        notes = (*prepared.notes, *((f"tried {tries + 1} times",) if tries else ()))
        known = {name: getattr(seen, name) for name in ("mark", "value", "passed", "skip", "reason", "failure", "exit_code")}
        row = BisectRun(
            **self._about(prepared.step),
            **known,
            started=prepared.started,
            seconds=round(time.time() - prepared.began, 3),
            environment=prepared.environment,
            built=prepared.built,
            directory=str(prepared.step.directory.relative_to(self.directory)),
            notes=notes,
            copied=False,
            unedited=prepared.unedited,
        )
        self._append(row)
        self._lost = self._lost + 1 if row.skip is SkipKind.ENVIRONMENT else 0
        if self._lost >= LOST_IN_A_ROW:
            message = f"{self._lost} points one after the other were lost to the machine, not to their commits; the last one: {row.reason}"
            raise BlockedError(Boundary.ENVIRONMENT, message, f"repair it, then: {resume_command(self.directory)}")
        return row

    def _about(self, wanted: BisectStep) -> dict[str, Any]:
        """What a row says of its point, whatever became of it."""
        return {
            "number": self._number(),
            "stage": wanted.stage,
            "history": wanted.history,
            "round": wanted.round,
            "point": wanted.point.id,
            "commit": wanted.point.commit,
            "subject": wanted.point.subject,
        }

    def _aborted(self, step: BisectStep, seen: Observation) -> BlockedError:
        """The plan is fixed, so that another command needs another bisect; what is known goes there with it."""
        log = step.log
        said = [one_line(line.body) for line in read_log(log) if line.body.strip()][-LAST_LINES:] if log.is_file() else []
        told = f"; its last lines: {' | '.join(said)}" if said else ""
        known = f" and --replay {shlex.quote(str(self.directory / JOURNAL))}" if self.rows else ""
        fix = f"start again with the corrected command{known}; if it was ended from outside: {resume_command(self.directory)}"
        return BlockedError(Boundary.CONFIG, f"{short(step.point)}: {seen.abort}{told} (log: {log})", fix)

    def _append(self, row: BisectRun) -> BisectRun:
        if self.frozen:
            raise MissingRun
        # What comes of logs is redacted already, and a failure must stay what it is compared with.
        free = {name: self.redactor.text(getattr(row, name)) for name in ("subject", "reason")}
        clear = replace_record(row, **free, notes=tuple(map(self.redactor.text, row.notes)))
        bisect_dir.append_run(self.directory / JOURNAL, clear)
        self.rows.append(clear)
        value = f" {clear.value:.6g}" if isinstance(clear.value, float) else ""
        self.tell(f"{clear.commit[:12]} {clear.mark}{value}{f': {clear.reason}' if clear.reason else ''}")
        return clear

    def _number(self) -> int:
        return self.rows[-1].number + 1 if self.rows else 1


def _number(step: Path) -> int:
    return int(step.name.partition("-")[0])


def short(point: Point) -> str:
    return f"{point.commit[:12]} ({point.subject[:60]})"
