"""Where the units of many batches stand, with at most two calls of the scheduler per poll; and the logs of a unit.

- One squeue for all jobs that are not done, then at most one sacct for those it does not know.
- A result that says `done` wins over everything. No other result counts while Slurm says that the unit lives, nor one that an earlier
  submission left.
- Ended in Slurm without a result is never success.
- `slurm` as the name of a component means the log of the job script itself.
"""

from __future__ import annotations

import codecs
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from seatrial.core.errors import BlockedError, UserError
from seatrial.core.files import read_table, write_json
from seatrial.core.guarded import parse_step
from seatrial.core.jobs import Batch, Ending, Job, Result, Submission, UnitState, UnitStatus
from seatrial.core.verdict import ExitCode
from seatrial.runtime import jobdir
from seatrial.runtime import slurm as commands
from seatrial.runtime.filelock import holder
from seatrial.runtime.interrupt import check_stop
from seatrial.runtime.jobdir import JobDir, job_dir
from seatrial.runtime.slurm import ControllerDown, SlurmRow, comment

SUBMITTED_GRACE_S = 30
"""So long after a submission an id that nobody knows is not yet lost."""
RESULT_GRACE_S = 30
"""So long a result may take to show after its script has ended: shared file systems are late."""

_WAITING = {"PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD"}
ENDED = {
    "COMPLETED": "Slurm says COMPLETED, but the job ended without leaving a result",
    "FAILED": "the job script failed without leaving a result",
    "TIMEOUT": "ended by Slurm at its time limit",
    "NODE_FAIL": "a node failed",
    "CANCELLED": "cancelled",
    "PREEMPTED": "preempted by another job, and not requeued",
    "OUT_OF_MEMORY": "used more memory than it had",
    "BOOT_FAIL": "a node did not boot",
    "DEADLINE": "could not end before its deadline",
    "REVOKED": "revoked by another cluster of the federation",
}
"""Slurm's words for units that have ended, and what they mean where there is no result."""
_BY_ITSELF = ("COMPLETED", "FAILED")
"""The script ended by itself, so a result is to be expected."""
_NEVER = "DependencyNeverSatisfied"
_NOTHING = ("", "NonZeroExitCode")


@dataclass(frozen=True, slots=True)
class UnitFacts:
    """What is known of a unit, before it is judged."""

    job: str
    index: int
    slurm: str = ""
    """Id of the whole Slurm job; empty while it is not known."""
    rows: Sequence[SlurmRow] = ()
    """What Slurm says: several for the parts of a heterogeneous job, none when it does not know the unit."""
    result: Result | UserError | None = None
    """The error is that of a torn file."""
    handed: bool = False
    """Whether it was handed to Slurm; if not, it ran on this machine, or never."""
    since: float = 0.0
    """When it was handed over, or else when its batch was made."""
    silent: str = ""
    """Why the controller or the accounting did not answer; empty when they did."""
    note: str = ""
    """What is known about an id that is not ours any more."""
    array: bool = False


def is_done(known: UnitFacts) -> bool:
    """Whether the result says so, of this unit, without contradicting itself."""
    result = known.result
    return isinstance(result, Result) and result.ending is Ending.DONE and not _contradiction(known, result)


def is_current(known: UnitFacts) -> bool:
    """Whether there is a result, or a torn one, that the present submission left."""
    result = known.result
    if not isinstance(result, Result) or not known.handed:
        return result is not None
    if known.slurm:
        return result.slurm.partition("_")[0] == known.slurm
    return result.started >= known.since


def judge_unit(known: UnitFacts, now: float) -> UnitStatus:
    """The state of a unit."""
    if is_done(known):
        return _status(known, UnitState.DONE, known.rows[0].state if known.rows else "", "")
    row = _decisive(known.rows)
    if row is not None and row.reason == "None":
        row = replace(row, reason="")
    if row is not None and row.state in _WAITING:
        never = f"{row.reason}: a job that it comes after did not end well; cancel it, then resubmit"
        return _status(known, UnitState.WAITING, row.state, never if row.reason == _NEVER else row.reason)
    if row is not None and row.state not in ENDED:
        return _status(known, UnitState.RUNNING, row.state, row.reason)
    if known.silent and row is None:
        return _status(known, UnitState.UNKNOWN, "", known.silent)
    if is_current(known):
        return _by_result(known, row.state if row else "")
    if row is not None:
        return _without_result(known, row, now)
    if now - known.since < SUBMITTED_GRACE_S:
        return _status(known, UnitState.WAITING, "", "just submitted" if known.handed else "not submitted yet")
    return _status(known, UnitState.LOST, "", known.note or "neither Slurm nor a result knows it")


def _decisive(rows: Sequence[SlurmRow]) -> SlurmRow | None:
    """Of the parts of a job, one that lives, else one that did not end well, else any."""
    live = [row for row in rows if row.state not in ENDED]
    bad = [row for row in rows if row.state != "COMPLETED"]
    return next(iter([*live, *bad, *rows]), None)


def _without_result(known: UnitFacts, row: SlurmRow, now: float) -> UnitStatus:
    if row.state in _BY_ITSELF and row.ended is not None and now - row.ended < RESULT_GRACE_S:
        return _status(known, UnitState.RUNNING, row.state, "ended; its result does not show yet")
    text = ENDED[row.state]
    if row.reason == _NEVER:
        text = f"a job that it comes after did not end well ({_NEVER})"
    elif row.reason not in _NOTHING and row.reason.lower() != row.state.lower():
        text += f" ({row.reason})"
    return _status(known, UnitState.BLOCKED, row.state, text)


def _by_result(known: UnitFacts, scheduler: str) -> UnitStatus:
    result = known.result
    if not isinstance(result, Result):
        return _status(known, UnitState.BLOCKED, scheduler, result.message if result else "")
    wrong = _contradiction(known, result)
    if wrong:
        return _status(known, UnitState.BLOCKED, scheduler, f"its result is not believed: {wrong}")
    code = "" if result.exit_code is None else f", exit code {result.exit_code}"
    who = f" ({result.component}{code})" if result.component else ""
    reason = f"{result.ending}{who}" + (f": {result.message}" if result.message else "")
    # A client that speaks our exit codes says so itself when something beside it was to blame; one that has none never ran, or was ended.
    failed = result.ending is Ending.CLIENT_FAILED and result.exit_code not in (None, ExitCode.BLOCKED)
    state = UnitState.FAILED if failed else UnitState.BLOCKED
    return _status(known, state, scheduler, reason)


def _contradiction(known: UnitFacts, result: Result) -> str:
    if (result.job, result.index) != (known.job, known.index):
        return f"results/{known.index}.json of {known.job} speaks of {result.job}, unit {result.index}"
    if result.ending is Ending.DONE and result.exit_code != 0:
        return f"results/{known.index}.json of {known.job} says done with exit code {result.exit_code}"
    return ""


def _status(known: UnitFacts, state: UnitState, scheduler: str, reason: str) -> UnitStatus:
    slurm = f"{known.slurm}_{known.index}" if known.slurm and known.array else known.slurm
    result = known.result if isinstance(known.result, Result) else None
    return UnitStatus(job=known.job, index=known.index, slurm=slurm, state=state, scheduler=scheduler, reason=reason, result=result)


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
    batch: Path
    job: Job
    submission: Submission | None
    results: dict[int, Result | UserError]
    slurm: str = ""
    rows: dict[int, list[SlurmRow]] = field(default_factory=dict)
    silent: str = ""
    note: str = ""

    def known(self, index: int) -> UnitFacts:
        """What is known of one unit."""
        base = UnitFacts(self.job.name, index, result=self.results.get(index), array=self.job.array is not None, note=self.note)
        if self.submission is None:
            made = self.batch / jobdir.BATCH
            since = time.time() if is_busy(self.batch) else made.stat().st_mtime if made.exists() else 0.0
            return replace(base, since=since, note="never submitted")
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

    def take(self, rows: Sequence[SlurmRow], accounting: bool = False) -> None:
        """Keep the rows that are ours; of several rows for the same part of a unit the last one counts."""
        assert self.submission is not None
        slurm = self.submission.slurm
        parts: dict[tuple[int, str], SlurmRow] = {}
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

    def _ours(self, row: SlurmRow) -> bool:
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
            units[item.batch] += [judge_unit(item.known(index), now) for index in item.job.units()]
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
    return holder(directory / LOCK) is not None


def redact_logs(snapshot: Snapshot, clear: Callable[[Path], None], tell: Callable[[str], None]) -> None:
    """Let `clear` rewrite the logs that Slurm wrote on the nodes, of jobs that have ended; each once, unless it has grown since.

    A job whose result says done still stops its services: its script is waited for, because what it writes later would be lost.
    """
    for directory, units in snapshot.batches:
        for name in dict.fromkeys(unit.job for unit in units):
            folder, own = job_dir(directory, name), [unit for unit in units if unit.job == name]
            submission, logs = folder.submission(), folder.path / "logs"
            if submission is None or not logs.is_dir():
                continue
            # A client that failed counts as running until its script has ended.
            lives = any(unit.state in LIVE and (unit.result is None or unit.state is not UnitState.RUNNING) for unit in own)
            if not lives and (all(unit.result is None for unit in own) or _script_ended(submission)):
                _redact_logs(logs, clear, tell)
            else:
                tell(f"job {name} has not ended: its logs are not redacted yet; `seatrial jobs wait {directory}` does it later")


def _script_ended(submission: Submission) -> bool:
    """Whether Slurm has ended every unit, awaited for a minute; no when it does not answer."""
    stops = time.monotonic() + _SCRIPT_S
    job = {"ids": [submission.slurm]} if submission.slurm else {"names": [submission.name]}
    with suppress(ControllerDown):
        while not all(row.state in ENDED for row in commands.squeue(submission.cluster, **job)):
            if time.monotonic() >= stops:
                return False
            check_stop()
            time.sleep(_LOOK_S)
        return True
    return False


def _redact_logs(logs: Path, clear: Callable[[Path], None], tell: Callable[[str], None]) -> None:
    """Logs that cannot be rewritten (another user's, a full disk) change no verdict: it is said which stay as they are."""
    file, now = logs / _REDACTED, dict[str, list[int]]()
    path = file
    try:
        known = read_table(file) if file.is_file() else {}
        for path in sorted(path for path in logs.rglob("*") if path != file and path.is_file() and not path.is_symlink()):
            name = str(path.relative_to(logs))
            if known.get(name) != _stamp(path):
                clear(path)
            now[name] = _stamp(path)
        if now != known:
            write_json(file, now)
    except (UserError, BlockedError) as error:
        tell(f"not all logs in {logs} are redacted: {error.message}; {error.fix}")
    except OSError as error:
        tell(f"not all logs in {logs} are redacted: {path}: {error.strerror or error}")


def _stamp(path: Path) -> list[int]:
    state = path.stat()
    return [state.st_size, state.st_mtime_ns]


SCRIPT = "slurm"
_REDACTED = ".redacted.json"
"""Beside logs: size and time of each after it was redacted."""
_LOOK_S = 0.5
_SCRIPT_S = 60.0


def find_job(batch: Batch, name: str | None) -> Job:
    """The job of this name; a batch of one job needs none."""
    known = [job.name for job in batch.jobs]
    for job in batch.jobs:
        if job.name == name or (name is None and len(known) == 1):
            return job
    wanted = f"no job {name!r} there" if name else "there are several jobs"
    raise UserError(f"{wanted}: {', '.join(known)}", "name one of them")


def log_file(directory: Path, job: Job, component: str | None, copy: int, index: int | None) -> Path:
    """The log of one copy of one component, the client's unless another is named."""
    known = {item.name: item.replicas for item in job.components}
    if index is None and job.array:
        raise UserError(f"job {job.name} has units 0 to {job.array - 1}", "say which with --index N")
    if index is not None and index not in job.units():
        raise UserError(f"job {job.name} has no unit {index}", f"its units are 0 to {len(job.units()) - 1}")
    unit = index if job.array else None
    folder = job_dir(directory, job)
    if component == SCRIPT:
        return folder.path / "logs" / (f"{SCRIPT}.log" if unit is None else f"{SCRIPT}-{unit}.log")
    name = component or job.client.name
    if name not in known:
        raise UserError(f"job {job.name} has no component {name!r}; known: {', '.join([*known, SCRIPT])}", "name one of them")
    if copy not in range(known[name]):
        raise UserError(f"component {name} has no copy {copy}", f"its copies are 0 to {known[name] - 1}")
    return folder.log(name, copy, unit)


def log_text_of(path: Path, ended: Callable[[], bool] | None = None) -> Iterator[str]:
    """The text of a log. With `ended` it goes on as the log grows, until that says so; a log that is absent may come."""
    place, decoder = 0, codecs.getincrementaldecoder("utf-8")(errors="backslashreplace")
    while True:
        over = ended is None or ended()
        if path.is_file():
            with path.open("rb") as stream:
                stream.seek(place)
                while data := stream.read(1 << 20):
                    place += len(data)
                    yield decoder.decode(data)
        if over:
            break
        check_stop()
        time.sleep(_LOOK_S)
    if place == 0 and not path.is_file():
        raise UserError(f"{path}: no log there (yet)", "the component has not started; `seatrial jobs list` says where its job stands")
