"""A trial as a Slurm job: submits it, follows it from any machine, and settles it once the job has ended."""

from __future__ import annotations

import math
import os
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from seatrial.core.errors import BlockedError, UserError
from seatrial.core.files import read_error, read_text, write_json
from seatrial.core.guarded import open_file, parse_step, real_path
from seatrial.core.jobs import PLACEHOLDER, Batch, Component, Job, Profile, Submission, UnitState, UnitStatus
from seatrial.core.records import LevelResult, Plan, Trial, replace
from seatrial.core.verdict import Boundary, Verdict
from seatrial.evidence.redact import Redactor
from seatrial.loops import loop_of
from seatrial.report.outcomes import RECORD
from seatrial.runtime import slurm_submit
from seatrial.runtime.environments import mounts_of
from seatrial.runtime.jobdir import JobDir, job_dir
from seatrial.runtime.ray import ray_job
from seatrial.runtime.slurm import SlurmRefused, render
from seatrial.runtime.slurm_status import Poller, Snapshot, redact_logs
from seatrial.trial import run_dir, verify
from seatrial.trial.conclude import FINAL, conclude, not_run, report, store
from seatrial.trial.plan import totals
from seatrial.trial.preflight import RAY_NODES

CACHES = ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_DATASETS_CACHE", "UV_CACHE_DIR", "UV_PROJECT_ENVIRONMENT")
"""Variables that name a directory which the loop reads; they reach the job with the caller's environment."""


def mounts(plan: Plan, path: Path, python: str, environ: Mapping[str, str]) -> tuple[str, ...]:
    return mounts_of(path, _wanted(plan, python, environ))


def _wanted(plan: Plan, python: str, environ: Mapping[str, str]) -> Iterator[Path]:
    for repo in plan.changes:
        yield Path(repo.path)
        yield from outside_git(Path(repo.path))
    yield from (Path(text) for text in (plan.model, *plan.options.values()))
    yield from (Path(word.rpartition("=")[2]) for word in plan.arguments)
    if "/" in python:
        yield Path(python).parents[1]
    yield from (Path(environ[name]) for name in CACHES if environ.get(name))


def outside_git(checkout: Path) -> Iterator[Path]:
    """Where git keeps a worktree's or a submodule's own data: the checkout alone could not be asked for its state."""
    link = checkout / ".git"
    if not link.is_file():
        return
    directory = real_path(checkout / read_text(link).partition("gitdir:")[2].strip())
    common = directory / "commondir"
    shared = real_path(directory / read_text(common).strip()) if common.is_file() else directory
    yield from (place for place in dict.fromkeys((shared, directory)) if not place.is_relative_to(checkout))


JOBS = "jobs"
JOB = "trial"
CLIENT = "client"
LOCK_S = 30.0
"""How long the client of a job that has ended may still hold the run directory."""


def batch_of(plan: Plan, path: Path, profile: Profile, python: str = "python3") -> Batch:
    """The one job of a trial: GPUs of its levels, everything else as the profile says. `python` is the loop's own."""
    if profile.ray == "none" and profile.nodes > 1:
        message = f"nodes = {profile.nodes}: without Ray a trial runs on one node"
        raise UserError(message, 'set ray = "symmetric-run" in the profile, or nodes = 1')
    if PLACEHOLDER.search(str(path)):
        raise UserError(f"{path}: words in braces have a meaning in a job", "choose another directory with --out")
    gpus = profile.gpus if profile.gpus is not None else math.ceil(totals(plan)["gpus"] / profile.nodes)
    boxed = profile.container or profile.image
    client = Component(
        name=CLIENT,
        role="client",
        command=(sys.executable, "-P", "-m", "seatrial.cli.main", "resume", str(path)),
        gpus=gpus,
        cpus=profile.cpus,
        memory_mb=profile.memory_mb,
        container=profile.container,
        image=profile.image,
        mounts=mounts(plan, path, python, {**os.environ, **profile.environment}) if boxed else (),
        environment={} if profile.ray == "none" else {RAY_NODES: str(profile.nodes)},
    )
    launcher = (profile.ray_sub or loop_of(plan).launcher()) if profile.ray == "ray.sub" else None
    if profile.ray == "ray.sub" and not launcher:
        raise UserError('ray = "ray.sub": the profile does not say where it is', 'set ray_sub = "/path/of/ray.sub" in the profile')
    if profile.ray == "ray.sub":
        client = Component.model_validate({**client.model_dump(), "nodes": profile.nodes, "tasks": profile.nodes})
    job = Job(name=JOB, components=(client,), launcher=str(launcher) if launcher else None)
    if profile.ray == "symmetric-run":
        tool = str(Path(python).with_name("ray")) if "/" in python else "ray"
        job = ray_job(job, profile.nodes, ray=tool, python=python)
    return Batch(jobs=(job,))


def script(plan: Plan, path: Path, profile: Profile) -> str:
    """The script of the first job of a trial, before anything is made."""
    return render(batch_of(plan, path, profile).jobs[0], profile, path / JOBS / "1", f"{JOB}-dry-run")


def validate(plan: Plan, path: Path, profile: Profile) -> str:
    """What Slurm says of that job: ok, or why it would refuse it."""
    return slurm_submit.validate(batch_of(plan, path, profile), profile, path / JOBS / "1")[0][1]


def submissions(path: Path) -> list[Path]:
    """Batch directories of a run directory, in the order of their submission."""
    found = [
        place for place in (path / JOBS).glob("*") if parse_step(place.name) is not None and job_dir(place, JOB).submission_file.is_file()
    ]
    return sorted(found, key=lambda place: int(place.name))


def submit_trial(path: Path, trial: Trial, profile: Profile, profile_name: str) -> Submission:
    numbers = [number for place in (path / JOBS).glob("*") if (number := parse_step(place.name)) is not None]
    directory = path / JOBS / str(max(numbers, default=0) + 1)
    python = trial.environment.python if trial.environment else "python3"
    batch = batch_of(trial.plan, path, profile, python)
    try:
        return slurm_submit.submit(batch, profile, profile_name, directory)[0]
    except SlurmRefused as error:
        fix = f"correct [slurm.{profile_name}] in seatrial.toml, then: seatrial resume {shlex.quote(str(path))} --on slurm:{profile_name}"
        raise SlurmRefused(error.message, fix) from error


def is_own_job(path: Path, environ: Mapping[str, str]) -> bool:
    """Whether this process is the client of the run directory's latest job, also after a requeue."""
    directories = submissions(path)
    if not directories:
        return False
    job = job_dir(real_path(directories[-1]), JOB)
    sent = job.submission()
    # The id is not stored yet when a job starts faster than sbatch returns; a loop's own launcher hides it from the client.
    given = environ.get("SLURM_JOB_ID")
    same = sent is not None and (given is None or sent.slurm in (None, given))
    return same and real_path(Path(environ.get("SEATRIAL_JOB") or "/")) == job.path


def refuse_while_active(path: Path, environ: Mapping[str, str]) -> None:
    """A trial that waits or runs on a cluster is finished there; only its own job may go on."""
    directories = submissions(path)
    if not directories or is_own_job(path, environ):
        return
    snapshot = Poller(directories).poll()
    for unit in snapshot.units:
        if unit.state in (UnitState.WAITING, UnitState.RUNNING):
            fix = f"seatrial attach {shlex.quote(str(path))}, or cancel it first: scancel {unit.slurm}"
            raise UserError(f"{path}: Slurm job {unit.slurm} of this trial is {unit.state}", fix)
        if unit.state is UnitState.UNKNOWN:
            message = f"{path}: whether Slurm job {unit.slurm} of this trial has ended is not known: {snapshot.controller}"
            raise BlockedError(Boundary.CLUSTER, message, "try again when squeue answers, on a machine where Slurm is")


def why(unit: UnitStatus, job: JobDir) -> str:
    words = [unit.scheduler] if unit.scheduler not in ("", "COMPLETED", "FAILED") else []
    words += [unit.reason] if unit.reason else []
    words += _last_words(job) if unit.state is UnitState.FAILED else []
    return f"Slurm job {unit.slurm or '(no id)'}: {', '.join(words) or unit.state}"


def _last_words(job: JobDir) -> list[str]:
    log = job.log(CLIENT, 0, None)
    lines = read_text(log).strip().splitlines() if log.is_file() else []
    return [lines[-1].strip()[:200]] if lines else []


def settle(path: Path, unit: UnitStatus) -> tuple[Trial, str]:
    """The trial after its job has ended, and, when it has no verdict, why; what is missing is blocked and reported."""
    job = job_dir(submissions(path)[-1], JOB)
    with _locked(path):
        trial = verify.load(path)
        if trial.status == "done":
            report(path, loop_of(trial.plan), trial)
            return trial, ""
        if any(one.path == RECORD for one in trial.alterations):  # what it says of levels is not believed, nor sealed anew
            trial = replace(trial, levels=(), sides=(), alterations=())
        reason = why(unit, job)
        loop = loop_of(trial.plan)
        trial = conclude(trial, _results(path, trial, reason), finished=False)
        if trial.verdict not in (Verdict.FAIL, Verdict.BLOCKED):
            trial = replace(trial, verdict=Verdict.BLOCKED, reason=f"{reason}, before the trial had its verdict")
        store(path, loop, trial)
        return trial, reason


def _results(path: Path, trial: Trial, reason: str) -> tuple[LevelResult, ...]:
    """What is stored; a level that is not, or that was interrupted with the job, is blocked by it."""
    levels = {level.number: level for level in loop_of(trial.plan).levels()}
    stored = {result.number: result for result in trial.levels}
    results = []
    for planned in trial.plan.levels:
        result = stored.get(planned.number)
        if planned.skip:
            result = result or not_run(levels[planned.number], planned, Verdict.SKIPPED, planned.skip)
        elif result is None:
            words = f"{reason}, before this level was judged"
            result = replace(not_run(levels[planned.number], planned, Verdict.BLOCKED, words, Boundary.CLUSTER), code="job-ended")
        elif result.verdict not in FINAL and _was_cut(result):
            result = replace(result, boundary=Boundary.CLUSTER, reason=f"{reason}, before this level was judged", code="job-ended")
            if result.directory:
                write_json(path / result.directory / "result.json", result)
        results.append(result)
    return tuple(results)


def _was_cut(result: LevelResult) -> bool:
    """Whether Seatrial was asked to stop while, or before, this level ran, or an earlier job ended without its verdict."""
    return result.code in ("interrupted", "job-ended") or any(phase.ended == "interrupted" for phase in result.phases)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the run directory; a client that is still writing its reports is given time."""
    stops = time.monotonic() + LOCK_S
    with ExitStack() as stack:
        while True:
            try:
                stack.enter_context(run_dir.locked(path))
                break
            except UserError:
                if time.monotonic() > stops:
                    raise
                time.sleep(0.5)
        yield


ASK_S = 5.0
"""Seconds between two questions to Slurm; `SOON_S` at first, and when a result is there."""
SOON_S = 1.0
YOUNG_S = 15.0
TICK_S = 0.25
ALIVE_S = 30.0
NOTHING = (0, 0)
STARTED = re.compile(r"restart (\d+), on (\S+)$", re.MULTILINE)
"""The first line of the job script."""
LOST_ASKED = 2
"""So often a job must be found lost: a controller that just came back may not know it yet."""


@dataclass(frozen=True, slots=True)
class Note:
    """Something to tell: a change of the job, a line of its log, or that it is still being followed."""

    kind: Literal["job", "log", "alive"]
    text: str
    slurm: str = ""
    state: str = ""


class Tail:
    """Whole lines that were added to a file; one that is not there yet is empty."""

    def __init__(self, path: Path) -> None:
        self.path, self.place, self.rest = path, 0, b""

    def lines(self, last: bool = False) -> Iterator[str]:
        """New lines; `last` gives what stands after the last newline too."""
        try:
            with open_file(self.path) as stream:
                stream.seek(self.place)
                data = stream.read()
        except FileNotFoundError:
            return
        except OSError as error:
            raise read_error(self.path, error) from error
        self.place += len(data)
        *whole, self.rest = (self.rest + data).split(b"\n")
        if last and self.rest:
            whole, self.rest = [*whole, self.rest], b""
        yield from (line.decode("utf-8", errors="backslashreplace") for line in whole)


def latest(path: Path) -> Path:
    found = submissions(path)
    if not found:
        fix = f"seatrial resume {shlex.quote(str(path))} --on slurm:PROFILE submits it"
        raise UserError(f"{path}: this trial was never submitted to Slurm", fix)
    return found[-1]


class Following:
    """One pass from now to the end of the job."""

    def __init__(self, path: Path, tell: Callable[[Note], None]) -> None:
        self.path, directory = path, latest(path)
        self.job: JobDir = job_dir(directory, JOB)
        self.poller = Poller([directory])
        self.snapshot = Snapshot((), 0)
        self.tail = Tail(self.job.log(CLIENT, 0, None))
        self.tell = tell
        self.said = ""
        self.spoke = self.began = time.monotonic()
        self.has_run = False

    def to_the_end(self) -> UnitStatus:
        """Tell everything until the job has ended; how it did is returned."""
        lost = 0
        while True:
            result = self._signature()
            unit = self._ask()
            self._log()
            lost = lost + 1 if unit.state is UnitState.LOST else 0
            if self._has_verdict() or (unit.verdict is not None and (not lost or lost >= LOST_ASKED)):
                self._log(last=True)
                self._redact(unit)
                return unit
            self._wait(unit, result)

    def _redact(self, unit: UnitStatus) -> None:
        """Without secrets, what Slurm wrote on the nodes; after the last line of it was told."""
        redact_logs(self.snapshot, Redactor(os.environ).log, lambda line: self._tell(Note("job", line, unit.slurm, unit.state)))

    def _has_verdict(self) -> bool:
        """Whether this job has left a result and the trial its verdict: then Slurm has nothing to add."""
        return self._signature() != NOTHING and run_dir.load(self.path).status == "done"

    def _ask(self) -> UnitStatus:
        snapshot = self.snapshot = self.poller.poll()
        unit = snapshot.units[0]
        self.has_run = self.has_run or unit.state is UnitState.RUNNING or self.tail.place > 0
        if unit.verdict is not None:
            self._log(last=True)
        text = self._words(unit, snapshot.controller)
        if text != self.said:
            self.said = text
            self._tell(Note("job", text, unit.slurm, unit.state))
        return unit

    def _words(self, unit: UnitStatus, controller: str) -> str:
        match unit.state:
            case UnitState.UNKNOWN:
                return f"Slurm does not answer, the job goes on without it: {controller}"
            case UnitState.WAITING:
                return ("requeued" if self.has_run else "waiting") + (f": {unit.reason}" if unit.reason else "")
            case UnitState.RUNNING:
                return f"running{self._place()}" + (f": {unit.reason}" if unit.reason else "")
            case _:
                words = [word for word in (unit.scheduler, unit.reason) if word]
                return f"ended: {unit.state}" + (f" ({', '.join(words)})" if words else "")

    def _place(self) -> str:
        """Where the job script says that it runs; Slurm is not asked for it."""
        log = self.job.path / "logs" / "slurm.log"
        found = STARTED.findall(read_text(log)) if log.is_file() else []
        if not found:
            return ""
        restart, node = found[-1]
        return f" on {node}" + (f", requeued {restart} times" if restart != "0" else "")

    def _wait(self, unit: UnitStatus, before: tuple[int, int]) -> None:
        """Until it is time to ask again, or a result appears; the log is shown meanwhile."""
        soon = self._signature() != NOTHING or time.monotonic() - self.began < YOUNG_S
        stops = time.monotonic() + (SOON_S if soon else ASK_S)
        while time.monotonic() < stops and self._signature() == before:
            time.sleep(TICK_S)
            self._log()
            if time.monotonic() - self.spoke >= ALIVE_S:
                minutes = (time.monotonic() - self.began) / 60
                self._tell(Note("alive", f"{self.said}; followed for {minutes:.1f} min", unit.slurm, unit.state))

    def _signature(self) -> tuple[int, int]:
        """What changes when a result is written."""
        try:
            stat = self.job.result_file(0).stat()
        except OSError:
            return NOTHING
        return (stat.st_ino, stat.st_mtime_ns)

    def _log(self, last: bool = False) -> None:
        for line in self.tail.lines(last):
            self._tell(Note("log", line))

    def _tell(self, note: Note) -> None:
        self.spoke = time.monotonic()
        self.tell(note)
