"""Where the units of many batches stand, with at most two calls of the scheduler per poll.

- One squeue for all jobs that are not done, then at most one sacct for those it does not know (never again where there
  is no accounting), then the results, then LOST. Batches on several clusters are asked one cluster at a time.
- A reused id is noticed by the name of the job, which is unique, and by its comment. A submission whose id was never
  stored is found by name: then the one squeue asks by names instead of ids.
- Nothing is written, and nothing is remembered but results that cannot change.
"""

from __future__ import annotations

import fcntl
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from seatrial.launch import jobdir
from seatrial.launch.interrupt import check_stop
from seatrial.launch.jobdir import JobDir, job_dir
from seatrial.launch.slurm import commands
from seatrial.launch.slurm.commands import Row
from seatrial.launch.slurm.render import comment
from seatrial.launch.slurm.unit import ENDED, Known, is_current, is_done, judge
from seatrial.model.errors import BlockedError, UserError
from seatrial.model.guarded import parse_step
from seatrial.model.job import Ending, Job, Result, Submission, UnitState, UnitStatus

LIVE = (UnitState.WAITING, UnitState.RUNNING, UnitState.UNKNOWN)
"""States of units that have not ended, as far as is known."""
LOCK = ".submit.lock"
"""Held by whoever submits from a batch directory, or runs it on this machine."""
FIRST_WAIT_S, LONGEST_WAIT_S = 2.0, 15.0
_OURS = "seatrial-"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All units at one moment."""

    batches: tuple[tuple[Path, tuple[UnitStatus, ...]], ...]
    """Units by batch directory."""
    calls: int
    """Scheduler calls that it took."""
    controller: str = ""
    """Why the controller did not answer; empty when it did."""

    @property
    def units(self) -> tuple[UnitStatus, ...]:
        """The units of all batches."""
        return tuple(unit for _, units in self.batches for unit in units)

    @property
    def ended(self) -> bool:
        """Whether nothing lives any more."""
        return all(unit.state not in LIVE for unit in self.units)


@dataclass(slots=True)
class _Tracked:
    """One job in one poll."""

    batch: Path
    job: Job
    submission: Submission | None
    results: dict[int, Result | UserError]
    slurm: str = ""
    rows: dict[int, list[Row]] = field(default_factory=dict)
    silent: str = ""
    note: str = ""

    def known(self, index: int) -> Known:
        """What is known of one unit."""
        base = Known(self.job.name, index, result=self.results.get(index), array=self.job.array is not None, note=self.note)
        if self.submission is None:
            return replace(base, since=time.time() if is_busy(self.batch) else _modified(self.batch / jobdir.BATCH), note="never submitted")
        if index not in self.submission.units:
            return replace(base, note="not part of the last submission")
        rows = self.rows.get(index, ())
        return replace(base, slurm=self.slurm, rows=rows, handed=True, since=self.submission.submitted, silent=self.silent)

    def open(self) -> bool:
        """Whether Slurm must be asked."""
        return self.submission is not None and not all(is_done(self.known(index)) for index in self.submission.units)

    def missing(self) -> bool:
        """Whether the controller left a unit unexplained."""
        units = self.submission.units if self.submission else ()
        return any(index not in self.rows and not is_done(self.known(index)) and not is_current(self.known(index)) for index in units)

    def take(self, rows: Sequence[Row], accounting: bool = False) -> None:
        """Keep the rows that are ours; of several rows for the same part of a unit the last one counts."""
        assert self.submission is not None
        slurm = self.submission.slurm
        parts: dict[tuple[int, str], Row] = {}
        for row in rows:
            if row.job != slurm if slurm else row.name != self.submission.name:
                continue
            if not self._ours(row):
                self.note = f"the id {row.job} belongs to another job now: {row.name}"
                continue
            self.slurm = row.job
            for index in self.submission.units if row.index is None else (row.index,):
                parts[index, row.part] = row
        known = set(self.rows)
        for (index, _), row in parts.items():
            if accounting and row.state not in ENDED:
                self.note = f"accounting says {row.state}, but the controller does not know it"
            elif index not in known:
                self.rows.setdefault(index, []).append(row)

    def _ours(self, row: Row) -> bool:
        assert self.submission is not None
        renamed = row.comment == comment(self.batch) and not row.name.startswith(_OURS)
        return row.name == self.submission.name or renamed


class Poller:
    """Asks for all units of some batches, again and again."""

    def __init__(self, directories: Sequence[Path]) -> None:
        self._batches = [(path, jobdir.load(path)) for path in directories]
        self._done: dict[Path, Result] = {}
        """Results that say done: they never change."""
        self._no_accounting: set[str] = set()
        self._calls = 0

    def poll(self) -> Snapshot:
        """The state of every unit. Raises nothing when Slurm is away: the snapshot says so."""
        self._calls = 0
        tracked = [self._track(path, job) for path, batch in self._batches for job in batch.jobs]
        clusters: dict[str, list[_Tracked]] = defaultdict(list)
        for item in tracked:
            if item.submission is not None and item.open():
                clusters[item.submission.cluster].append(item)
        silent = [text for text in (self._ask(name, items) for name, items in clusters.items()) if text]
        now = time.time()
        units: dict[Path, list[UnitStatus]] = {path: [] for path, _ in self._batches}
        for item in tracked:
            units[item.batch] += [judge(item.known(index), now) for index in item.job.units()]
        return Snapshot(tuple((path, tuple(found)) for path, found in units.items()), self._calls, "; ".join(silent))

    def _track(self, batch: Path, job: Job) -> _Tracked:
        folder = job_dir(batch, job)
        submission = folder.submission()
        slurm = submission.slurm if submission else None
        return _Tracked(batch, job, submission, self._results(folder), slurm or "")

    def _results(self, folder: JobDir) -> dict[int, Result | UserError]:
        """All results of a job; listing the directory makes a network file system look again."""
        directory = folder.path / "results"
        names = [file.name for file in directory.iterdir()] if directory.is_dir() else []
        stems = [name.removesuffix(".json") for name in names if name.endswith(".json")]
        indices = [index for stem in stems if (index := parse_step(stem)) is not None and str(index) == stem]
        results = {index: self._result(folder, index) for index in indices}
        return {index: result for index, result in results.items() if result is not None}

    def _result(self, folder: JobDir, index: int) -> Result | UserError | None:
        file = folder.result_file(index)
        if file in self._done:
            return self._done[file]
        try:
            result = folder.result(index)
        except UserError as error:
            return error
        if result is not None and result.ending is Ending.DONE:
            self._done[file] = result
        return result

    def _ask(self, cluster: str, items: list[_Tracked]) -> str:
        """Fill in what Slurm says of the jobs of one cluster; returns why it did not answer, or nothing."""
        try:
            self._calls += 1
            rows = commands.squeue(cluster, **_selection(items))
            for item in items:
                item.take(rows)
            answer = self._ask_accounting(cluster, [item for item in items if item.missing()])
            return answer or self._ask_name(cluster, [item for item in items if item.missing()])
        except BlockedError as error:
            for item in items:
                item.silent = error.message
            return error.message

    def _ask_name(self, cluster: str, items: list[_Tracked]) -> str:
        """Jobs that nobody knows may be another cluster's; a file says which this is."""
        here, silent = commands.cluster_name(cluster) if items else "", ""
        for item in items:
            there = item.submission.cluster_name if item.submission else ""
            if there and here and there != here:
                item.silent = silent = f"submitted to the cluster {there}, and this machine belongs to {here}"
        return silent

    def _ask_accounting(self, cluster: str, items: list[_Tracked]) -> str:
        if not items or cluster in self._no_accounting:
            return ""
        self._calls += 1
        since = min(item.submission.submitted for item in items if item.submission)
        try:
            rows = commands.sacct(cluster, **_selection(items), since=since - 60)
        except BlockedError as error:
            for item in items:
                item.silent = error.message
            return error.message
        if rows is None:
            self._no_accounting.add(cluster)
        for item in items:
            item.take(rows or (), accounting=True)
        return ""


def snapshots(poller: Poller, deadline_s: float | None = None) -> Iterator[Snapshot]:
    """Polls until everything has ended or the deadline is over: every 2 s at first, every 15 s in the long run."""
    began, pause = time.monotonic(), FIRST_WAIT_S
    while True:
        snapshot = poller.poll()
        yield snapshot
        if snapshot.ended:
            return
        until = time.monotonic() + pause
        pause = min(pause * 1.2, LONGEST_WAIT_S)
        while time.monotonic() < until:
            check_stop()
            if deadline_s is not None and time.monotonic() - began >= deadline_s:
                return
            time.sleep(0.2)


def _selection(items: Sequence[_Tracked]) -> dict[str, list[str]]:
    """By ids; by names where an id was never stored."""
    submissions = [item.submission for item in items if item.submission is not None]
    ids = [found.slurm for found in submissions if found.slurm is not None]
    return {"ids": ids} if len(ids) == len(submissions) else {"names": [found.name for found in submissions]}


def is_busy(directory: Path) -> bool:
    """Whether a seatrial submits from this directory, or runs its jobs on this machine."""
    try:
        with (directory / LOCK).open("rb") as stream:
            fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def _modified(path: Path) -> float:
    return path.stat().st_mtime if path.exists() else 0.0
