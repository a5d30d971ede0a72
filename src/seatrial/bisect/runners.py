"""Run prepared steps on this machine or as Slurm jobs.

- Each step comes back exactly once, when it ends; one that no longer matters comes back as `interrupted`.
- An interrupt or an error ends what runs before it propagates.
"""

from __future__ import annotations

import math
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path

from seatrial.bisect.bisect_records import BisectPlan
from seatrial.bisect.step_preparer import BisectStep, PreparedStep, RunFacts
from seatrial.core.errors import BlockedError, UserError
from seatrial.core.files import write_bytes
from seatrial.core.jobs import PLACEHOLDER, Batch, Component, Ending, Job, Profile, UnitState, UnitStatus
from seatrial.core.verdict import ExitCode
from seatrial.evidence.redact import Redactor
from seatrial.runtime import slurm_submit
from seatrial.runtime.environments import mounts_of
from seatrial.runtime.interrupt import check_stop, rest, stop_requested
from seatrial.runtime.jobdir import BATCH, job_dir
from seatrial.runtime.process import CannotStart, Control, ProcessSpec, end_leftovers, run_stoppable
from seatrial.runtime.ray import ray_job
from seatrial.runtime.slurm_status import FIRST_WAIT_S, LIVE, LONGEST_WAIT_S, Poller, redact_logs
from seatrial.trial.slurm_job import CACHES, outside_git

GRACE_S = 10.0
"""Between asking a command to end and killing it."""
_LOOK_S = 0.2
_LEFTOVERS = ("steps/*/*.pids", "steps/*/trial/**/*.pids", "stores/*/*.pids")
"""Where runs and fetches note their processes. Not in the trees, which may be large."""


Running = dict[Future[RunFacts], tuple[PreparedStep, Control]]


class LocalRunner:
    """Runs steps as processes of this machine."""

    def __init__(self, plan: BisectPlan, redactor: Redactor, tell: Callable[[str], None]) -> None:
        self._plan, self._redactor, self._tell = plan, redactor, tell

    def run(self, prepared: Sequence[PreparedStep], useless: Callable[[], set[int]]) -> Iterator[tuple[PreparedStep, RunFacts]]:
        """Each step with its facts, as they end. `useless` names, by their numbers, steps that no longer matter."""
        waiting = list(prepared)
        running: Running = {}
        controls: list[Control] = []
        pool = ThreadPoolExecutor(self._plan.jobs, "run")
        try:
            while waiting or running:
                while waiting and len(running) < self._plan.jobs:
                    begun = waiting.pop(0), Control()
                    controls.append(begun[1])  # first: an interrupt may come before the run is known to be under way
                    running[pool.submit(self._follow, *begun)] = begun
                for future in wait(running, _LOOK_S, FIRST_COMPLETED).done:
                    yield running.pop(future)[0], future.result()
                    for idle in self._cancel(waiting, running, useless()):
                        yield idle, idle.facts(None, "interrupted")
                if stop_requested():
                    _stop(controls, GRACE_S)
                    wait(running)
                    check_stop()
        finally:
            _stop(controls, 0.0)
            pool.shutdown()

    def _cancel(self, waiting: list[PreparedStep], running: Running, gone: set[int]) -> list[PreparedStep]:
        """End those that run and no longer matter; gives those that were not begun, which are not begun any more."""
        for one, control in running.values():
            if one.step.number in gone and not control.asked:
                self._tell(f"{one.step.point.commit[:12]}: its result no longer matters, ending it")
                control.stop("its result no longer matters", GRACE_S)
        idle = [one for one in waiting if one.step.number in gone]
        waiting[:] = [one for one in waiting if one.step.number not in gone]
        return idle

    def _follow(self, prepared: PreparedStep, control: Control) -> RunFacts:
        step = prepared.step
        spec = ProcessSpec(
            argv=prepared.argv,
            env=prepared.env,
            cwd=step.tree,
            log=step.log,
            run_id=f"bisect-{step.directory.name}-{time.time_ns()}",
            deadline_s=60 * self._plan.minutes,
            stall_s=math.inf,  # a command that says nothing is not stuck: only the deadline ends it
            grace_s=GRACE_S,
            line_filter=self._redactor.lines().line,
            control=control,
        )
        try:
            outcome = run_stoppable(spec)
        except CannotStart as error:
            return prepared.facts(error.code, "exited")
        return prepared.facts(outcome.exit_code, outcome.ended)


def _stop(controls: Sequence[Control], grace_s: float) -> None:
    for control in controls:
        control.stop("Seatrial was interrupted", grace_s)


def end_local_leftovers(directory: Path) -> int:
    """End what runs of a killed Seatrial left behind in a bisect directory; returns how many processes that were."""
    return sum(end_leftovers(file) for pattern in _LEFTOVERS for file in sorted(directory.glob(pattern)))


JOBS = "job"
JOB = "bisect"
CLIENT = "client"
WARN_S = 120
SPARE_MINUTES = 3
"""Beyond the deadline: the warning comes `WARN_S` before the limit, and up to a minute earlier than asked for."""
CANCEL_S = 60.0
"""How long cancelled jobs may take to end."""
_BY_ITSELF = ("", "COMPLETED", "FAILED")
"""Slurm's words for a script that ended by itself."""


class SlurmRunner:
    """Runs steps as jobs of one profile. For a nightly the profile has the nodes and GPUs that its script asks for."""

    def __init__(self, plan: BisectPlan, profile: Profile, profile_name: str, tell: Callable[[str], None]) -> None:
        self._plan, self._profile, self._name, self._tell = plan, profile, profile_name, tell
        self._redactor = Redactor({**os.environ, **plan.variables})
        self._told: dict[int, str] = {}

    def run(self, prepared: Sequence[PreparedStep], useless: Callable[[], set[int]]) -> Iterator[tuple[PreparedStep, RunFacts]]:
        """Each step with its facts, as they end. `useless` names, by their numbers, steps that no longer matter."""
        waiting, queued, cancelled = list(prepared), list[PreparedStep](), set[int]()
        pause = FIRST_WAIT_S
        try:
            while waiting or queued:
                while waiting and len(queued) < self._plan.jobs:
                    check_stop()
                    queued.append(waiting[0])  # before it is handed over: whatever happens there, it is cancelled in the end
                    self._hand_over(waiting.pop(0))
                    pause = FIRST_WAIT_S
                for one, status in self._ended(queued):
                    queued.remove(one)
                    yield one, self._facts(one, status, one.step.number in cancelled)
                    gone = useless()
                    cancelled |= self._cancel([item for item in queued if item.step.number in gone - cancelled])
                    for idle in [item for item in waiting if item.step.number in gone]:
                        waiting.remove(idle)
                        yield idle, idle.facts(None, "interrupted")
                if len(queued) == self._plan.jobs or not waiting:
                    rest(pause if queued else 0.0)
                    pause = min(pause * 1.2, LONGEST_WAIT_S)
        finally:
            # What is in the queue is cancelled and waited for: its tree is removed next.
            if left := [_batch(one.step) for one in queued if (_batch(one.step) / BATCH).is_file()]:
                cancel_all(left, self._tell)

    def _hand_over(self, one: PreparedStep) -> None:
        directory = _batch(one.step)
        if is_queued(one.step.directory):
            return
        # Written before sbatch is called: without it there is no job, only what a killed Seatrial had begun.
        shutil.rmtree(directory, ignore_errors=True)
        sent = slurm_submit.submit(Batch(jobs=(job_of(self._plan, one, self._profile),)), self._profile, self._name, directory)[0]
        self._tell(f"{one.step.point.commit[:12]}: submitted as Slurm job {sent.slurm}")

    def _ended(self, queued: Sequence[PreparedStep]) -> list[tuple[PreparedStep, UnitStatus]]:
        snapshot = Poller([_batch(one.step) for one in queued]).poll()
        found = []
        for one, (_, units) in zip(queued, snapshot.batches, strict=True):
            status = units[0]
            text = f"{status.state} {status.reason}".strip()
            if status.state not in LIVE:
                found.append((one, status))
            elif self._told.get(one.step.number) != text:
                self._told[one.step.number] = text
                self._tell(f"{one.step.point.commit[:12]}: Slurm job {status.slurm}: {text}")
        return found

    def _facts(self, one: PreparedStep, status: UnitStatus, cancelled: bool) -> RunFacts:
        self._take_log(one)
        if cancelled and status.state is not UnitState.DONE:
            return one.facts(None, "interrupted")
        return facts_of(one, status, self._plan.minutes, in_ray=self._profile.ray != "none")

    def _take_log(self, one: PreparedStep) -> None:
        """What the command wrote on the node, without secrets; of a job whose command never began, what its script wrote."""
        folder = job_dir(_batch(one.step), JOB)
        logs = [folder.log(CLIENT, 0, None), *sorted(folder.path.glob("logs/*-logs/ray-driver.log"))]
        found = [log for log in logs if log.is_file()] or [log for log in (folder.path / "logs" / "slurm.log",) if log.is_file()]
        redact_logs(Poller([_batch(one.step)]).poll(), self._redactor.log, self._tell)
        for log in found:
            self._redactor.file(log)
        write_bytes(one.step.log, b"".join(log.read_bytes() for log in found))

    def _cancel(self, several: Sequence[PreparedStep]) -> set[int]:
        """Numbers of those that were cancelled; a controller that does not answer now is asked again after the next end."""
        done = set()
        for one in several:
            commit = one.step.point.commit[:12]
            try:
                slurm_submit.cancel(_batch(one.step))
            except BlockedError as error:
                self._tell(f"{commit}: its result no longer matters, but its job was not cancelled: {error.message}")
                continue
            self._tell(f"{commit}: its result no longer matters, its job is cancelled")
            done.add(one.step.number)
        return done


def job_of(plan: BisectPlan, one: PreparedStep, profile: Profile) -> Job:
    step = one.step
    if one.withheld:
        message = f"{', '.join(one.withheld)}: a secret, which is never written into a job"
        raise UserError(message, "export it where you start the bisect instead: it reaches the job from there")
    if PLACEHOLDER.search(str(step.directory)):
        raise UserError(f"{step.directory}: words in braces have a meaning in a job", "choose another directory with --out")
    if profile.ray == "none" and profile.nodes > 1:
        message = f"nodes = {profile.nodes}: without Ray a command runs on one node"
        raise UserError(message, 'set ray = "symmetric-run" or "ray.sub" in the profile, or nodes = 1')
    boxed = profile.container or profile.image
    client = Component(
        name=CLIENT,
        role="client",
        command=("bash", str(step.command_file)),
        workdir=str(step.tree),
        gpus=profile.gpus or 0,
        cpus=profile.cpus,
        memory_mb=profile.memory_mb,
        container=profile.container,
        image=profile.image,
        mounts=mounts_of(step.directory.parents[1], _outside(plan, one)) if boxed else (),
    )
    minutes = math.ceil(plan.minutes) + SPARE_MINUTES
    job = Job(name=JOB, components=(client,), minutes=minutes, warn_s=WARN_S, requeue=False)
    return _in_ray(job, one, profile)


def _in_ray(job: Job, one: PreparedStep, profile: Profile) -> Job:
    """The job with Ray around its client, as the profile says."""
    if profile.ray == "symmetric-run":
        home = one.env.get("VIRTUAL_ENV")
        tool, python = (f"{home}/bin/ray", f"{home}/bin/python") if home else ("ray", "python3")
        return ray_job(job, profile.nodes, ray=tool, python=python)
    if profile.ray == "ray.sub":
        launcher = Path(profile.ray_sub) if profile.ray_sub else one.step.tree / "ray.sub"
        if not launcher.is_file():
            raise UserError(f"{launcher}: is not there", 'set ray_sub = "/path/of/ray.sub" in the profile')
        client = {**job.client.model_dump(), "nodes": profile.nodes, "tasks": profile.nodes}
        return Job.model_validate({**job.model_dump(), "components": [client], "launcher": str(launcher)})
    return job


def _outside(plan: BisectPlan, one: PreparedStep) -> Iterator[Path]:
    """What a run reads outside of the bisect directory: its environment, caches, and the objects of the user's repositories."""
    yield from (Path(one.env[name]) for name in ("VIRTUAL_ENV", *CACHES) if one.env.get(name))
    for repo in plan.repos:
        yield Path(repo.path)
        yield from outside_git(Path(repo.path))


def facts_of(one: PreparedStep, status: UnitStatus, minutes: float, *, in_ray: bool = False) -> RunFacts:
    if status.state is UnitState.DONE:
        return one.facts(0, "exited")
    word = status.scheduler if status.scheduler not in _BY_ITSELF else ""
    why = ", ".join(text for text in (word, status.reason) if text) or str(status.state)
    scheduler = f"Slurm job {status.slurm or '(no id)'}: {why}"
    result = status.result
    if result is None or (result.job, result.index) != (status.job, status.index):
        return one.facts(None, "exited", scheduler)
    # Of a job in Ray, 99 is what says that Ray itself broke.
    own = result.exit_code is not None and not (in_ray and result.exit_code == ExitCode.BLOCKED)
    if result.ending is Ending.CLIENT_FAILED and own:
        return one.facts(result.exit_code, "exited", scheduler if word else "")
    if result.ending is Ending.TIME_LIMIT and result.ended - result.started >= 60 * minutes:
        return one.facts(None, "deadline")
    return one.facts(None, "exited", scheduler)


def is_queued(step: Path) -> bool:
    return (step / JOBS / BATCH).is_file() and job_dir(step / JOBS, JOB).submission_file.is_file()


def _batch(step: BisectStep) -> Path:
    return step.directory / JOBS


def cancel_all(directories: Sequence[Path], tell: Callable[[str], None]) -> int:
    """Cancel the jobs of these batches and wait for their end; returns how many were cancelled. What cannot be is told, with the fix."""
    count, stops = 0, time.monotonic() + CANCEL_S
    try:
        for directory in directories:
            count += len(slurm_submit.cancel(directory))
        poller = Poller(list(directories))
        while any(unit.state in LIVE and unit.slurm for unit in poller.poll().units):
            if time.monotonic() >= stops:
                tell(f"cancelled jobs have not ended within {CANCEL_S:.0f} s; see: squeue --me")
                break
            time.sleep(_LOOK_S)
    except BlockedError as error:
        tell(f"jobs may still be in the queue: {error.message}; cancel them: seatrial jobs cancel {directories[0]}")
    return count


def cancel_slurm_jobs(directory: Path, tell: Callable[[str], None]) -> int:
    """Cancel the jobs that a killed Seatrial left in the queue of a bisect directory; returns how many."""
    open_ones = _open(directory)
    return cancel_all(open_ones, tell) if open_ones else 0


def queued(directory: Path) -> set[Path]:
    """The steps of a bisect directory whose jobs may be in the queue; while the controller does not answer, all that have not ended."""
    snapshot = Poller(_open(directory)).poll()
    live = ((path, unit) for path, units in snapshot.batches for unit in units if unit.state in LIVE)
    return {path.parent for path, unit in live if unit.slurm or snapshot.controller}


def _open(directory: Path) -> list[Path]:
    batches = sorted(file.parent for file in directory.glob(f"steps/*/{JOBS}/{BATCH}"))
    return [path for path in batches if job_dir(path, JOB).submission_file.is_file() and job_dir(path, JOB).not_done(range(1))]


@contextmanager
def no_leftovers(directory: Path, tell: Callable[[str], None]) -> Iterator[None]:
    """Afterwards no job of this bisect directory is in the queue: jobs of an earlier session that nobody waited for are cancelled."""
    try:
        yield
    finally:
        cancel_slurm_jobs(directory, tell)
