"""A trial as a Slurm job: what is submitted, and what is made of a job that has ended.

- The job runs `seatrial resume RUN` on a node that shares the run directory. It is a batch of its own, `RUN/jobs/<n>`;
  a second submission is `jobs/<n+1>`, and there is at most one that waits or runs.
- The run directory is the truth: the verdict is the one in trial.json, whatever Slurm says of the job.
- A job that ended before the trial had its verdict leaves what is stored as it is and blocks the rest at the cluster;
  the trial can then be resumed. It is never a Pass, not even when every level is stored as one: the conductor's last
  look at the change was not made.
"""

from __future__ import annotations

import math
import os
import shlex
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from seatrial.files import read_text, write_json
from seatrial.launch.jobdir import JobDir, job_dir
from seatrial.launch.ray import ray_job
from seatrial.launch.slurm import submit
from seatrial.launch.slurm.commands import Refused
from seatrial.launch.slurm.render import render
from seatrial.launch.slurm.status import Poller
from seatrial.loops import loop_of
from seatrial.model.errors import BlockedError, UserError
from seatrial.model.guarded import parse_step, real_path
from seatrial.model.job import PLACEHOLDER, Batch, Component, Job, Submission, UnitState, UnitStatus
from seatrial.model.profile import Profile
from seatrial.model.record import LevelResult, Plan, Trial
from seatrial.model.verdict import Boundary, Verdict
from seatrial.report.outcome import RECORD
from seatrial.trial import rundir, verify
from seatrial.trial.finish import FINAL, conclude, not_run, report, store
from seatrial.trial.machine import RAY_NODES
from seatrial.trial.mounts import mounts
from seatrial.trial.plan import totals

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
    return submit.validate(batch_of(plan, path, profile), profile, path / JOBS / "1")[0][1]


def submissions(path: Path) -> list[Path]:
    """Batch directories of a run directory, in the order of their submission."""
    found = [
        place for place in (path / JOBS).glob("*") if parse_step(place.name) is not None and job_dir(place, JOB).submission_file.is_file()
    ]
    return sorted(found, key=lambda place: int(place.name))


def submit_trial(path: Path, trial: Trial, profile: Profile, profile_name: str) -> Submission:
    """Submit a trial that is stored."""
    numbers = [number for place in (path / JOBS).glob("*") if (number := parse_step(place.name)) is not None]
    directory = path / JOBS / str(max(numbers, default=0) + 1)
    python = trial.environment.python if trial.environment else "python3"
    batch = batch_of(trial.plan, path, profile, python)
    try:
        return submit.submit(batch, profile, profile_name, directory)[0]
    except Refused as error:
        fix = f"correct [slurm.{profile_name}] in seatrial.toml, then: seatrial resume {shlex.quote(str(path))} --on slurm:{profile_name}"
        raise Refused(error.message, fix) from error


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
    """How a job ended, in words."""
    words = [unit.scheduler] if unit.scheduler not in ("", "COMPLETED", "FAILED") else []
    words += [unit.reason] if unit.reason else []
    words += _last_words(job) if unit.state is UnitState.FAILED else []
    return f"Slurm job {unit.slurm or '(no id)'}: {', '.join(words) or unit.state}"


def _last_words(job: JobDir) -> list[str]:
    """The last line of the client's log: why it gave up."""
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
            trial = trial.model_copy(update={"levels": (), "sides": (), "alterations": ()})
        reason = why(unit, job)
        loop = loop_of(trial.plan)
        trial = conclude(trial, _results(path, trial, reason), finished=False)
        if trial.verdict not in (Verdict.FAIL, Verdict.BLOCKED):
            trial = trial.model_copy(update={"verdict": Verdict.BLOCKED, "reason": f"{reason}, before the trial had its verdict"})
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
            result = not_run(levels[planned.number], planned, Verdict.BLOCKED, words, Boundary.CLUSTER)
        elif result.verdict not in FINAL and _was_cut(result):
            result = result.model_copy(update={"boundary": Boundary.CLUSTER, "reason": f"{reason}, before this level was judged"})
            if result.directory:
                write_json(path / result.directory / "result.json", result)
        results.append(result)
    return tuple(results)


def _was_cut(result: LevelResult) -> bool:
    """Whether Seatrial was asked to stop while, or before, this level ran, or an earlier job ended without its verdict."""
    interrupted = result.reason.startswith("interrupted") or any(phase.ended == "interrupted" for phase in result.phases)
    return interrupted or (result.boundary is Boundary.CLUSTER and result.reason.startswith("Slurm job "))


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the run directory; a client that is still writing its reports is given time."""
    stops = time.monotonic() + LOCK_S
    with ExitStack() as stack:
        while True:
            try:
                stack.enter_context(rundir.locked(path))
                break
            except UserError:
                if time.monotonic() > stops:
                    raise
                time.sleep(0.5)
        yield
