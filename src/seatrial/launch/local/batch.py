"""All jobs of a batch on this machine, in order: what may run, how many at a time, and what is left out.

- Everything that can be refused is refused before the first process starts.
- The first Ctrl-C ends the units in order (see `interrupt`), the second at once; an error in one unit ends the others in order.
- A unit that was never started leaves no result: it is still owed.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

from seatrial.files import write_json
from seatrial.launch.jobdir import BATCH, job_dir, load, save
from seatrial.launch.linelog import LineFilter
from seatrial.launch.local.machine import gpus_here, refuse_what_needs_a_cluster, slots
from seatrial.launch.local.unit import End, Halt, Unit, put_aside, result_of
from seatrial.launch.staged import stage
from seatrial.model.errors import UserError
from seatrial.model.job import Batch, Ending, Job, Result

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
    """The first job it comes after that is not done."""
    wanted = {after.job for after in job.after if after.when == "ok"}
    for earlier in batch.jobs:
        units = job_dir(directory, earlier).not_done(earlier.units()) if earlier.name in wanted else ()
        if units:
            some = ", ".join(map(str, units[:10])) + (", ..." if len(units) > 10 else "")
            message = f"{len(units)} of {len(earlier.units())} units of job {earlier.name} are not done: {some}"
            return End(Ending.INPUTS_MISSING, earlier.name, None, message)
    return None
