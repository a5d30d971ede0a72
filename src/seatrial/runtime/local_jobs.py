"""Jobs on this machine, by the rules of the Slurm script, with the same files (see `jobdir`).

- The client decides; a service that ends before it, even with 0, fails the unit. Only a result that says `done` counts as done.
- Whatever can be refused is refused before the first process starts. The first Ctrl-C ends the running units and starts no more.
- GPUs are those that CUDA_VISIBLE_DEVICES names, else the device files; simultaneous units have their own.
- Ports are chosen together, just before the start; a service that loses the race for its port ends, which fails the unit.
"""

from __future__ import annotations

import math
import os
import queue
import re
import shutil
import socket
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from seatrial.core.errors import BlockedError, UserError
from seatrial.core.files import write_json, write_text
from seatrial.core.jobs import PLACEHOLDERS, Batch, Ending, Job, Result, fill, shell_name
from seatrial.core.verdict import Boundary
from seatrial.runtime.interrupt import stop_requested
from seatrial.runtime.jobdir import BATCH, JobDir, PlacedStep, job_dir, layout, load, save
from seatrial.runtime.process import CannotStart, Control, LineFilter, Outcome, ProcessSpec, end_leftovers, run
from seatrial.runtime.servers import Missed, Target, foreign_target, free_port, wait_ready
from seatrial.runtime.staged import stage

VISIBLE = "CUDA_VISIBLE_DEVICES"


def gpus_here(environment: Mapping[str, str] = os.environ, devices: Path = Path("/dev")) -> tuple[str, ...]:
    """The GPUs that may be used, as CUDA_VISIBLE_DEVICES calls them."""
    if VISIBLE not in environment:
        found = (re.fullmatch(r"nvidia([0-9]+)", path.name) for path in devices.glob("nvidia*"))
        return tuple(str(number) for number in sorted(int(match[1]) for match in found if match))
    named: list[str] = []
    for word in environment[VISIBLE].split(","):
        if word.strip() in ("", "-1"):  # CUDA hides what comes after an invalid one
            break
        named.append(word.strip())
    return tuple(named)


def gpus_of(job: Job) -> int:
    """GPUs that one unit needs."""
    return sum(item.gpus * item.replicas for item in job.components)


def slots(job: Job, here: tuple[str, ...]) -> list[tuple[str, ...]]:
    """The GPUs of each unit that may run at the same time. Raises a BlockedError when not even one has enough."""
    needed, most = gpus_of(job), job.parallel or 1
    if needed > len(here):
        raise BlockedError(
            Boundary.ENVIRONMENT,
            f"job {job.name} needs {needed} GPUs, and there are {len(here)} on this machine"
            + (f" ({VISIBLE}={os.environ[VISIBLE]})" if VISIBLE in os.environ else ""),
            "run it on a machine or a cluster that has them, or ask for fewer",
        )
    units = min(most, len(here) // needed) if needed else most
    return [here[number * needed : (number + 1) * needed] for number in range(units)]


def refuse_what_needs_a_cluster(job: Job) -> None:
    """Raise a UserError for what this machine cannot honour."""
    for item in job.components:
        where = f"job {job.name}, component {item.name}"
        if item.container or item.image:
            key = "container" if item.container else "image"
            fix = f"submit it to Slurm (seatrial ... --on slurm:PROFILE), or leave out {key} if the programs are installed here"
            raise UserError(f"{where}: {key} = {item.container or item.image}: containers are not run on this machine", fix)
        if item.nodes > 1:
            raise UserError(f"{where}: nodes = {item.nodes}: this is one machine", "submit it to Slurm, or set nodes = 1")
    if job.after_ids:
        raise UserError(
            f"job {job.name}: after_ids = {', '.join(job.after_ids)}: Slurm jobs are not known here",
            "submit it to the cluster, or leave out after_ids once they have ended well",
        )


HOST = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Address:
    """Where one copy listens."""

    port: int
    head_port: int


class Copy:
    """One copy of a component."""

    def __init__(self, step: PlacedStep, address: Address | None, specs: Sequence[ProcessSpec]) -> None:
        self.step = step
        self.address = address
        self.log = specs[0].log
        self._specs = specs
        self._runs: list[Future[Outcome]] = []

    def __len__(self) -> int:
        return len(self._specs)

    def start(self, pool: Executor) -> None:
        """Start every task, each followed by a thread of `pool`."""
        self._runs = [pool.submit(run, spec) for spec in self._specs]

    def started(self) -> bool:
        """Whether the program of every task has been started."""
        return all(control.tree is not None for control in self._controls())

    def peek(self) -> int | None:
        """Exit code as of now; None while it runs or was not started, a shell's own for a program that cannot be started.

        Raises what else kept a task from running.
        """
        for running in self._runs:
            if running.done() and (error := running.exception()) is not None:
                if isinstance(error, CannotStart):
                    return error.code
                raise error
        codes = [control.peek() for control in self._controls()]
        failed = next((code for code in codes if code), None)
        if failed is not None:
            return failed
        enough = all if self.step.component.role == "client" else any
        return 0 if enough(code == 0 for code in codes) else None

    def stop(self, why: str, grace_s: float) -> None:
        """Ask every task to end."""
        for control in self._controls():
            control.stop(why, grace_s)

    def ended(self) -> bool:
        """Whether nothing of it is left."""
        return all(running.done() for running in self._runs)

    def trouble(self) -> BaseException | None:
        """What went wrong while it was run or ended, if anything did. For a copy that has ended."""
        return next((error for running in self._runs if (error := running.exception()) is not None), None)

    def _controls(self) -> list[Control]:
        return [spec.control for spec in self._specs if spec.control is not None]


def prepare(job: Job, index: int, directory: JobDir, gpus: tuple[str, ...], line_filter: Callable[[], LineFilter]) -> tuple[Copy, ...]:
    """Every copy of a unit, ready to start, with its endpoint published. Services first, the client last."""
    steps = layout(job, gpus_of(job)).steps
    addresses = {step.name: Address(free_port(), free_port()) if step.component.port else None for step in steps}
    for name, address in addresses.items():
        if address is not None:
            write_text(directory.endpoints(index) / name, f"{HOST} {address.port} {address.head_port}\n")
    shared = {"SEATRIAL_JOB": str(directory.path), "SEATRIAL_INDEX": str(index), "SEATRIAL_BIND": HOST, **_urls(job, steps, addresses)}
    copies: list[Copy] = []
    taken = 0
    for step in steps:
        visible = gpus[taken : taken + step.component.gpus]
        taken += step.component.gpus
        more = {VISIBLE: ",".join(visible)} if gpus_of(job) else {}
        log = directory.log(step.component.name, step.copy, index if job.array else None)
        address = addresses[step.name]
        own = shared | {
            "SEATRIAL_COPY": str(step.copy),
            "SEATRIAL_PORT": str(address.port) if address else "",
            "SEATRIAL_HEAD": HOST if address else "",
            "SEATRIAL_HEAD_PORT": str(address.head_port) if address else "",
        }
        specs = [_spec(step, rank, {**own, "SEATRIAL_RANK": str(rank)}, more, log, line_filter()) for rank in range(step.component.tasks)]
        copies.append(Copy(step, address, specs))
    return tuple(copies)


def _urls(job: Job, steps: Sequence[PlacedStep], addresses: Mapping[str, Address | None]) -> dict[str, str]:
    found = {name: [url] for name, url in job.servers.items()}
    for step in steps:
        if (address := addresses[step.name]) is not None:
            found.setdefault(step.component.name, []).append(f"http://{HOST}:{address.port}")
    first = {f"SEATRIAL_URL_{shell_name(name)}": urls[0] for name, urls in found.items()}
    return first | {f"SEATRIAL_URLS_{shell_name(name)}": ",".join(urls) for name, urls in found.items()}


def _spec(
    step: PlacedStep, rank: int, variables: Mapping[str, str], more: Mapping[str, str], log: Path, line_filter: LineFilter
) -> ProcessSpec:
    component = step.component
    values = {name: fill(value, variables) for name, value in component.environment.items()}
    several, outer = component.tasks > 1, ("SEATRIAL_URL_", "SEATRIAL_URLS_")
    # Without what an outer job told this process.
    inherited = {key: value for key, value in os.environ.items() if key not in PLACEHOLDERS.values() and not key.startswith(outer)}
    return ProcessSpec(
        argv=tuple(fill(word, variables) for word in component.command),
        env={**inherited, **variables, **more, **values},
        cwd=Path(fill(component.workdir, variables) if component.workdir else ".").absolute(),
        log=log,
        run_id=f"{step.name}.{rank}-{uuid.uuid4().hex}",
        deadline_s=math.inf,
        stall_s=math.inf,
        line_filter=(lambda line: f"{rank}: {line_filter(line)}") if several else line_filter,
        control=Control(),
        part=str(rank) if several else "",
    )


_UNIT_LOOK_S = 0.1
_MINUTE_S = 60.0
_FOREIGN_S = 300.0
"""How long a server that runs elsewhere may take to answer."""
_GRACE_S = 10.0
"""Between SIGTERM and SIGKILL, for whatever is ended because the unit is."""


class Halt:
    """Why units must end early: Seatrial was interrupted, or another unit met something that blocks all of them."""

    def __init__(self) -> None:
        self.abandoned = threading.Event()
        self.hurry = threading.Event()
        """No grace any more."""

    def reason(self) -> str | None:
        """Why to end, or None."""
        if stop_requested() or self.hurry.is_set():
            return "Seatrial was interrupted"
        return "another unit could not be run" if self.abandoned.is_set() else None


@dataclass(frozen=True, slots=True)
class End:
    """How a unit ended, and who ended it."""

    ending: Ending
    component: str
    exit_code: int | None
    message: str


def result_of(job: Job, index: int, end: End, started: float) -> Result:
    """What the unit leaves behind."""
    return Result(
        job=job.name,
        index=index,
        slurm="local",
        restart=0,
        ending=end.ending,
        component=end.component,
        exit_code=end.exit_code,
        node=socket.gethostname(),
        started=int(started),
        ended=int(time.time()),
        message=end.message,
    )


def put_aside(directory: JobDir, index: int) -> None:
    """Keep the result of an earlier attempt under another name."""
    old = directory.result_file(index)
    if old.exists():
        old.rename(old.with_name(f"{index}.before-local-{time.time_ns()}.json"))


@dataclass(slots=True)
class Unit:
    """One unit, to be run once, in any thread."""

    _job: Job
    _index: int
    _directory: JobDir
    _gpus: tuple[str, ...]
    _halt: Halt
    _progress: Callable[[str], None]
    _line_filter: Callable[[], LineFilter]
    _stops_at: float | None = None
    _copies: tuple[Copy, ...] = ()

    def _say(self, text: str) -> None:
        self._progress(f"{self._job.name}[{self._index}]: {text}" if self._job.array else f"{self._job.name}: {text}")

    def run(self) -> Result:
        """Run it to its end. The result is on disk before the services are asked to end."""
        started = time.time()
        self._stops_at = time.monotonic() + _MINUTE_S * self._job.minutes if self._job.minutes is not None else None
        self._tidy()
        self._copies = prepare(self._job, self._index, self._directory, self._gpus, self._line_filter)
        with ThreadPoolExecutor(sum(map(len, self._copies)), f"{self._job.name}-{self._index}") as pool:
            why = "the unit could not be run"
            try:
                end = self._supervise(pool)
                result = result_of(self._job, self._index, end, started)
                write_json(self._directory.result_file(self._index), result)
                why = f"the unit ended ({end.ending})"
            finally:
                self._end_all(why)
        for trouble in filter(None, (copy.trouble() for copy in self._copies)):
            self._say(f"after the result was written: {trouble}")
        self._say(f"{end.ending}: {end.message}")
        return result

    @property
    def _services(self) -> tuple[Copy, ...]:
        return self._copies[:-1]

    @property
    def _client(self) -> Copy:
        return self._copies[-1]

    def _tidy(self) -> None:
        """End what a killed Seatrial left of this unit, and put aside what it wrote: none of it may pass for this attempt's."""
        self._directory.make()
        for component in self._job.components:
            for copy in range(component.replicas):
                log = self._directory.log(component.name, copy, self._index if self._job.array else None)
                for record in sorted(log.parent.glob(f"{log.name}*.pids")):
                    end_leftovers(record)
        shutil.rmtree(self._directory.endpoints(self._index), ignore_errors=True)
        put_aside(self._directory, self._index)

    def _supervise(self, pool: ThreadPoolExecutor) -> End:
        for copy in self._services:
            copy.start(pool)
            self._say(f"{copy.step.name} started; its log: {copy.log}")
        # A service whose program is still to be started is not alive: a client must not win against it.
        while not all(copy.started() for copy in self._services):
            if (end := self._look()) is not None:
                return end
            time.sleep(_UNIT_LOOK_S / 10)
        waited = wait_ready(self._targets(), self._look, self._say)
        if isinstance(waited, Missed):
            return End(Ending.NOT_READY, waited.name, None, waited.message)
        if waited is not None:
            return waited
        self._client.start(pool)
        self._say(f"{self._client.step.name} started; its log: {self._client.log}")
        while (end := self._look()) is None:
            time.sleep(_UNIT_LOOK_S)
        return self._ask_client_to_stop() if end.ending is Ending.TIME_LIMIT else end

    def _targets(self) -> list[Target]:
        targets = [foreign_target(name, url, _FOREIGN_S) for name, url in self._job.servers.items()]
        for copy in self._services:
            ready, address = copy.step.component.ready, copy.address
            if ready is not None and address is not None:
                url = f"tcp://{HOST}:{address.port}" if ready.path is None else f"http://{HOST}:{address.port}{ready.path}"
                targets.append(Target(copy.step.name, url, ready.deadline_s))
        return targets

    def _look(self) -> End | None:
        """Whether the unit has ended, and how. The client is looked at first, so that whatever died before it is seen."""
        client, code = self._client, self._client.peek()
        for copy in self._services:
            if (ended := copy.peek()) is not None:
                message = f"{copy.step.name} ended with exit code {ended} before the client did; its log: {copy.log}"
                return End(Ending.SERVICE_ENDED, copy.step.name, ended, message)
        name = client.step.name
        if code == 0:
            return End(Ending.DONE, name, 0, "the client exited with 0 while every service was alive")
        if code is not None:
            return End(Ending.CLIENT_FAILED, name, code, f"the client exited with {code}; its log: {client.log}")
        if (reason := self._halt.reason()) is not None:
            return End(Ending.STOPPED, "", None, reason)
        if self._stops_at is not None and time.monotonic() >= self._stops_at - self._job.warning_s(self._job.minutes or 0):
            return End(Ending.TIME_LIMIT, "", None, f"the time limit of {self._job.minutes} min was near")
        return None

    def _ask_client_to_stop(self) -> End:
        """Give the client the rest of its time, with its services alive; then it is killed."""
        assert self._stops_at is not None
        message = f"the time limit of {self._job.minutes} min was near, and the client was asked to stop"
        self._say(message)
        self._client.stop("the time limit is near", max(0.0, self._stops_at - time.monotonic()))
        while not self._client.ended():
            self._pass_on_haste(self._client)
            time.sleep(_UNIT_LOOK_S)
        return End(Ending.TIME_LIMIT, self._client.step.name, self._client.peek(), message)

    def _end_all(self, why: str) -> None:
        """Nothing of the unit is left when this returns: every run is bounded by its grace."""
        for copy in self._copies:
            copy.stop(why, _GRACE_S)
        while not all(copy.ended() for copy in self._copies):
            for copy in self._copies:
                self._pass_on_haste(copy)
            time.sleep(_UNIT_LOOK_S / 2)

    def _pass_on_haste(self, copy: Copy) -> None:
        if (reason := self._halt.reason()) is not None:
            copy.stop(reason, 0 if self._halt.hurry.is_set() else _GRACE_S)


Progress = Callable[[str], None]
MakeFilter = Callable[[], LineFilter]
_LOOK_S = 0.5


def run_batch(batch: Batch, directory: Path, progress: Progress, line_filter: MakeFilter = lambda: str) -> tuple[Result, ...]:
    """Run every unit of every job that is not done yet; the results are in the order of the jobs and their units.

    `progress` is called from several threads, one at a time; each log goes through a filter of its own, made by `line_filter`.
    Raises a UserError for what this machine cannot do, a BlockedError when it has too few GPUs or a program cannot be run, and
    `Interrupted` at a second signal.
    """
    here = gpus_here()
    for job in batch.jobs:
        refuse_what_needs_a_cluster(job)
        slots(job, here)
    _remember(batch, directory)
    for job in batch.jobs:
        stage(job, job_dir(directory, job).path)
    lock = threading.Lock()

    def say(text: str) -> None:
        with lock:
            progress(text)

    results: list[Result] = []
    for job in batch.jobs:
        results += _run_job(batch, job, directory, slots(job, here), say, line_filter)
    return tuple(results)


def _remember(batch: Batch, directory: Path) -> None:
    """Store the batch; results of another one must never count as this one's."""
    if (directory / BATCH).is_file() and load(directory) != batch:
        raise UserError(f"{directory / BATCH}: another batch was run here", "choose a new directory, or repeat the batch as it was")
    for job in batch.jobs if not (directory / BATCH).is_file() else ():
        if len((files := job_dir(directory, job)).not_done(job.units())) < len(job.units()):
            raise UserError(f"{files.path}: holds results, and no {BATCH} says what of", "choose a new directory")
    save(directory, batch)


def _run_job(
    batch: Batch, job: Job, directory: Path, places: list[tuple[str, ...]], say: Progress, line_filter: MakeFilter
) -> list[Result]:
    files, halt = job_dir(directory, job), Halt()
    missing = _missing_inputs(batch, job, directory)
    free: queue.SimpleQueue[tuple[str, ...]] = queue.SimpleQueue()
    for place in places:
        free.put(place)

    def one(index: int) -> Result:
        stored = files.result(index)
        if stored is not None and files.is_done(index):
            return stored
        if (reason := halt.reason()) is not None:
            return result_of(job, index, End(Ending.STOPPED, "", None, f"not started: {reason}"), time.time())
        if missing is not None:
            result = result_of(job, index, missing, time.time())
            put_aside(files, index)
            write_json(files.result_file(index), result)
            return result
        gpus = free.get()
        try:
            return Unit(job, index, files, gpus, halt, say, line_filter).run()
        finally:
            free.put(gpus)

    return _each(one, job.units(), len(places), halt)


def _each(one: Callable[[int], Result], units: range, at_once: int, halt: Halt) -> list[Result]:
    """Call `one` for every unit; what one of them raises ends the others, and so does a signal, which only the main thread gets."""

    def guarded(index: int) -> Result:
        try:
            return one(index)
        except BaseException:
            halt.abandoned.set()
            raise

    with ThreadPoolExecutor(at_once) as pool:
        try:
            running = [pool.submit(guarded, index) for index in units]
            # A signal that comes right before the wait begins does not interrupt it: look again, or it would never be taken.
            while wait(running, timeout=_LOOK_S).not_done:
                pass
        except KeyboardInterrupt:
            halt.hurry.set()
            raise
    return [unit.result() for unit in running]


def _missing_inputs(batch: Batch, job: Job, directory: Path) -> End | None:
    wanted = {after.job for after in job.after if after.when == "ok"}
    for earlier in batch.jobs:
        units = job_dir(directory, earlier).not_done(earlier.units()) if earlier.name in wanted else ()
        if units:
            some = ", ".join(map(str, units[:10])) + (", ..." if len(units) > 10 else "")
            message = f"{len(units)} of {len(earlier.units())} units of job {earlier.name} are not done: {some}"
            return End(Ending.INPUTS_MISSING, earlier.name, None, message)
    return None


__all__ = ["run_batch"]
