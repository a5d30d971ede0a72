"""One unit of a job on this machine: start the services, wait for them, run the client, write the result, end everything.

- Everything is looked at ten times a second, the client before the services: a client that exits with 0 counts only if every
  service is seen alive after that. Both ended in one look is `service-ended`, never a false Pass.
- What keeps a program from running at all (no such program, a full disk) is raised as it is, after everything has been ended.
"""

from __future__ import annotations

import shutil
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from seatrial.files import write_json
from seatrial.launch.interrupt import stop_requested
from seatrial.launch.jobdir import JobDir
from seatrial.launch.linelog import LineFilter
from seatrial.launch.local.copies import HOST, Copy, prepare
from seatrial.launch.process import end_leftovers
from seatrial.launch.ready import Missed, Target, foreign_target, wait_ready
from seatrial.model.job import Ending, Job, Result

_LOOK_S = 0.1
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


class Unit:
    """One unit, to be run once, in any thread."""

    def __init__(
        self,
        job: Job,
        index: int,
        directory: JobDir,
        gpus: tuple[str, ...],
        halt: Halt,
        progress: Callable[[str], None],
        line_filter: Callable[[], LineFilter],
    ) -> None:
        self._line_filter = line_filter
        self._job, self._index, self._directory, self._gpus, self._halt = job, index, directory, gpus, halt
        self._say: Callable[[str], None] = lambda text: progress(f"{job.name}[{index}]: {text}" if job.array else f"{job.name}: {text}")
        self._stops_at = time.monotonic() + _MINUTE_S * job.minutes if job.minutes is not None else None
        self._copies: tuple[Copy, ...] = ()

    def run(self) -> Result:
        """Run it to its end. The result is on disk before the services are asked to end."""
        started = time.time()
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
            time.sleep(_LOOK_S / 10)
        waited = wait_ready(self._targets(), self._look, self._say)
        if isinstance(waited, Missed):
            return End(Ending.NOT_READY, waited.name, None, waited.message)
        if waited is not None:
            return waited
        self._client.start(pool)
        self._say(f"{self._client.step.name} started; its log: {self._client.log}")
        while (end := self._look()) is None:
            time.sleep(_LOOK_S)
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
            time.sleep(_LOOK_S)
        return End(Ending.TIME_LIMIT, self._client.step.name, self._client.peek(), message)

    def _end_all(self, why: str) -> None:
        """Nothing of the unit is left when this returns: every run is bounded by its grace."""
        for copy in self._copies:
            copy.stop(why, _GRACE_S)
        while not all(copy.ended() for copy in self._copies):
            for copy in self._copies:
                self._pass_on_haste(copy)
            time.sleep(_LOOK_S / 2)

    def _pass_on_haste(self, copy: Copy) -> None:
        if (reason := self._halt.reason()) is not None:
            copy.stop(reason, 0 if self._halt.hurry.is_set() else _GRACE_S)
