"""Handing batches to Slurm: once, in order, and so that a crash at any moment leaves no job unknown.

- Everything that can be refused without Slurm is refused before anything is written or submitted.
- submission.json is written before sbatch, with the unique name, and again with the id: a job whose id was never stored
  is found by its name. What may be in the queue is never submitted a second time.
- Jobs that come after others are submitted right with them: Slurm takes an id that it has forgotten for satisfied.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from seatrial.core.errors import BlockedError, UserError
from seatrial.core.files import write_json, write_text
from seatrial.core.jobs import Batch, Job, Profile, Submission, UnitState
from seatrial.core.records import replace
from seatrial.runtime import jobdir
from seatrial.runtime import slurm as commands
from seatrial.runtime.filelock import exclusive
from seatrial.runtime.interrupt import check_stop
from seatrial.runtime.jobdir import job_dir
from seatrial.runtime.ray import RaySub, ray_sub
from seatrial.runtime.slurm import ControllerDown, SlurmRefused, comment, render_batch, resolve
from seatrial.runtime.slurm_status import LIVE, LOCK, Poller
from seatrial.runtime.staged import stage

_LOCK_S = 60.0
_ALWAYS_ALLOWED = 1000
"""Arrays up to this size fit everywhere, unless a site made its limit smaller, which sbatch then says."""


def submit(batch: Batch, profile: Profile, profile_name: str, directory: Path) -> tuple[Submission, ...]:
    """Submit a new batch into `directory`, in the order of its jobs."""
    _refuse_used(batch, directory)
    commands.require("sbatch")
    names = _names(batch)
    scripts = render_batch(batch, profile, directory.absolute(), names)
    cluster = commands.own_cluster()
    _check_arrays(batch, cluster)
    _check_foreign(batch, cluster)
    with locked(directory):
        _refuse_used(batch, directory)  # again: another seatrial may have been first
        jobdir.save(directory, batch)
        here = (cluster, commands.cluster_name(cluster))
        pending = [_submission(job, names, profile_name, tuple(job.units()), here) for job in batch.jobs]
        return _hand_over(directory, batch, profile, pending, scripts)


def validate(batch: Batch, profile: Profile, directory: Path) -> tuple[tuple[str, str], ...]:
    """Job and what `sbatch --test-only` says of its script: "ok", or why it would be refused. Nothing is submitted."""
    scripts = render_batch(batch, profile, directory.absolute(), _names(batch))
    cluster = commands.own_cluster()
    answers = []
    for job in batch.jobs:
        name = job.name
        try:
            launcher = _launcher(job, profile, directory, name)
            commands.check_script(Path(launcher.script) if launcher else scripts[name], launcher.options if launcher else (), cluster)
            answers.append((name, "ok"))
        except SlurmRefused as error:
            answers.append((name, error.message))
    return tuple(answers)


def resubmit(directory: Path, profile: Profile, profile_name: str) -> tuple[Submission, ...]:
    """Submit what is not done: these units, and the jobs that come after them unless they are done themselves."""
    batch = jobdir.load(directory)
    with locked(directory):
        snapshot = Poller([directory]).poll()
        if snapshot.controller:
            raise ControllerDown(f"{directory}: whether jobs still run is not known: {snapshot.controller}")
        live = sorted({unit.job for unit in snapshot.units if unit.state in LIVE})
        if live:
            fix = f"wait for them (seatrial jobs wait {directory}), or cancel them (seatrial jobs cancel {directory})"
            raise UserError(f"{directory}: not ended yet: {', '.join(live)}", fix)
        names, cluster = _names(batch), commands.own_cluster()
        here = (cluster, commands.cluster_name(cluster))
        _check_foreign(batch, cluster)
        scripts = render_batch(batch, profile, directory.absolute(), names)
        pending = []
        for job in batch.jobs:
            units = tuple(unit.index for unit in snapshot.units if unit.job == job.name and unit.state is not UnitState.DONE)
            pending += [_submission(job, names, profile_name, units, here)] if units else []
        return _hand_over(directory, batch, profile, pending, scripts)


def cancel(directory: Path, jobs: Sequence[str] = ()) -> tuple[str, ...]:
    """Cancel the jobs of these names, or all, that have not ended; returns the names of those that were cancelled."""
    known = [job.name for job in jobdir.load(directory).jobs]
    for name in jobs:
        if name not in known:
            raise UserError(f"{directory}: no job {name!r} there; known: {', '.join(known)}", "name one of them, or none for all")
    snapshot = Poller([directory]).poll()
    if snapshot.controller:
        raise ControllerDown(f"nothing was cancelled: {snapshot.controller}")
    # Slurm has a word for a unit only when the id is still that of our job: nobody else's is ever cancelled.
    wanted = [unit for unit in snapshot.units if unit.state in LIVE and unit.scheduler and unit.job in (jobs or known)]
    ids = {unit.job: unit.slurm.partition("_")[0] for unit in wanted}
    clusters: dict[str, list[str]] = {}
    for name, slurm in ids.items():
        submission = job_dir(directory, name).submission()
        clusters.setdefault(submission.cluster if submission else "", []).append(slurm)
    for cluster, found in clusters.items():
        commands.scancel(cluster, found)
    return tuple(ids)


def _hand_over(
    directory: Path, batch: Batch, profile: Profile, pending: Sequence[Submission], scripts: Mapping[str, str]
) -> tuple[Submission, ...]:
    """Write every script, then call sbatch for one job after the other."""
    jobs = {job.name: job for job in batch.jobs}
    for item in pending:
        job_dir(directory, item.job).make()
        write_text(job_dir(directory, item.job).script, scripts[item.job])
        stage(jobs[item.job], job_dir(directory, item.job).path)
    submitted: list[Submission] = []
    for item in pending:
        check_stop()
        try:
            submitted.append(_hand_over_one(directory, jobs[item.job], profile, item, submitted))
        except (ControllerDown, SlurmRefused) as error:
            raise _explained(error, directory, item, submitted, pending) from error
    return tuple(submitted)


def _hand_over_one(directory: Path, job: Job, profile: Profile, item: Submission, earlier: Sequence[Submission]) -> Submission:
    folder = job_dir(directory, job)
    launcher = _launcher(job, profile, directory, item.name)
    options = _options(job, item.units, {other.job: other.slurm or "" for other in earlier})
    write_json(folder.submission_file, item)
    try:
        if launcher:
            words = (*launcher.options, f"--comment={comment(directory)}", *options)  # a later --dependency replaces an earlier one
            slurm = commands.sbatch(Path(launcher.script), words, item.cluster, launcher.environment, Path(launcher.cwd))
        else:
            slurm = commands.sbatch(folder.script, options, item.cluster)
    except SlurmRefused:
        folder.submission_file.unlink()  # Slurm said no: there is no job to be found again
        raise
    stored = replace(item, slurm=slurm)
    write_json(folder.submission_file, stored)
    return stored


def _launcher(job: Job, profile: Profile, directory: Path, name: str) -> RaySub | None:
    return ray_sub(resolve(job, profile), profile, job_dir(directory, job).path, name) if job.launcher else None


def _options(job: Job, units: Sequence[int], ids: Mapping[str, str]) -> list[str]:
    """What only the moment of the submission knows: ids of other jobs, and units that are left."""
    waits = [f"after{after.when}:{ids[after.job]}" for after in job.after if after.job in ids]
    waits += [f"afterok:{slurm}" for slurm in job.after_ids]
    options = [f"--dependency={','.join(waits)}", "--kill-on-invalid-dep=yes"] if waits else []
    if job.array is not None and len(units) < job.array:
        options.append(f"--array={','.join(map(str, units))}" + (f"%{job.parallel}" if job.parallel else ""))
    return options


def _explained(
    error: BlockedError, directory: Path, item: Submission, submitted: Sequence[Submission], pending: Sequence[Submission]
) -> BlockedError:
    """The error with what is in the queue and what is not."""
    inside = ", ".join(f"{other.job} ({other.slurm})" for other in submitted) or "none"
    missing = ", ".join(other.job for other in pending[len(submitted) :])
    go_on = f"correct the cause, then `seatrial jobs resubmit {directory} --on slurm:{item.profile}` submits the rest"
    if submitted:
        go_on += f" once those have ended; or `seatrial jobs cancel {directory}` takes them back"
    doubt = f" Whether {item.job} is in the queue is not known; `seatrial jobs list {directory}` finds it by its name."
    message = f"job {item.job} was not accepted: {error.message}. Submitted: {inside}; not submitted: {missing}."
    if isinstance(error, ControllerDown):
        return ControllerDown(message + doubt)
    return SlurmRefused(message, go_on)


def _refuse_used(batch: Batch, directory: Path) -> None:
    """A batch needs a directory of its own: what another one left there, such as a result that says done, must never count."""
    if (directory / jobdir.BATCH).exists():
        raise UserError(f"{directory}: holds a batch already", f"seatrial jobs resubmit {directory}, or name another directory with --out")
    for job in batch.jobs:
        if (path := job_dir(directory, job).path).exists():
            raise UserError(f"{path}: is there already, and no {jobdir.BATCH} says what of", "name another directory with --out")


def _names(batch: Batch) -> dict[str, str]:
    return {job.name: f"seatrial-{job.name}-{secrets.token_hex(4)}" for job in batch.jobs}


def _submission(job: Job, names: Mapping[str, str], profile: str, units: tuple[int, ...], cluster: tuple[str, str]) -> Submission:
    return Submission(
        job=job.name,
        name=names[job.name],
        slurm=None,
        profile=profile,
        units=units,
        submitted=int(time.time()),
        cluster=cluster[0],
        cluster_name=cluster[1],
    )


def _check_arrays(batch: Batch, cluster: str) -> None:
    """sbatch says only "Invalid job array specification"."""
    largest = max(batch.jobs, key=lambda job: job.array or 0)
    if (largest.array or 0) <= _ALWAYS_ALLOWED:
        return
    limit = commands.largest_array(cluster)
    if (largest.array or 0) > limit:
        message = f"job {largest.name}: array = {largest.array}, but this cluster takes at most {limit} units in one array (MaxArraySize)"
        raise UserError(message, f"cut it into jobs of at most {limit} units, or let each unit do more")


def _check_foreign(batch: Batch, cluster: str) -> None:
    """An id that Slurm does not know counts as satisfied there: the job would start at once."""
    wanted = {slurm.partition("_")[0]: job.name for job in batch.jobs for slurm in job.after_ids}
    if not wanted:
        return
    known = {row.job for row in commands.squeue(cluster, ids=list(wanted))}
    missing = [slurm for slurm in wanted if slurm not in known]
    if missing:
        known = {row.job for row in commands.sacct(cluster, ids=missing) or () if row.state == "COMPLETED"}
    for slurm in missing:
        if slurm not in known:
            message = f"job {wanted[slurm]}: after_ids: Slurm does not know job {slurm}, and would not wait for it"
            raise UserError(message, f"correct the id; if job {slurm} has ended well, leave it out of after_ids")


def locked(directory: Path) -> AbstractContextManager[None]:
    """One seatrial at a time submits from a directory, or runs its jobs here."""
    return exclusive(directory / LOCK, f"another seatrial that submits or runs {directory}", lambda _: None, _LOCK_S)
