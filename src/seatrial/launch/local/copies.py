"""Copies of components: what each is given, and its processes while they run.

- Ports are chosen here, all at once, just before the start; a service that loses the race for its port ends, which fails the unit.
- Every copy has one log; where it has several tasks, a line begins with the rank of its task.
- A copy has failed as soon as one of its tasks has. A client has ended with 0 when all of its tasks have, a service when one has.
"""

from __future__ import annotations

import math
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from pathlib import Path

from seatrial.files import write_text
from seatrial.launch.jobdir import JobDir
from seatrial.launch.layout import Step, layout
from seatrial.launch.linelog import LineFilter
from seatrial.launch.local.machine import VISIBLE, gpus_of
from seatrial.launch.ports import free_port
from seatrial.launch.process import CannotStart, Control, Outcome, ProcessSpec, run
from seatrial.launch.words import fill
from seatrial.model.job import PLACEHOLDERS, Job, shell_name

HOST = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Address:
    """Where one copy listens."""

    port: int
    head_port: int


class Copy:
    """One copy of a component."""

    def __init__(self, step: Step, address: Address | None, specs: Sequence[ProcessSpec]) -> None:
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
        ranks = range(step.component.tasks)
        copies.append(
            Copy(step, address, [_spec(step, rank, {**shared, **_own(step, rank, address)}, more, log, line_filter()) for rank in ranks])
        )
    return tuple(copies)


def _urls(job: Job, steps: Sequence[Step], addresses: Mapping[str, Address | None]) -> dict[str, str]:
    """Variables with the endpoints of every service, and of the servers that run elsewhere."""
    found = {name: [url] for name, url in job.servers.items()}
    for step in steps:
        if (address := addresses[step.name]) is not None:
            found.setdefault(step.component.name, []).append(f"http://{HOST}:{address.port}")
    first = {f"SEATRIAL_URL_{shell_name(name)}": urls[0] for name, urls in found.items()}
    return first | {f"SEATRIAL_URLS_{shell_name(name)}": ",".join(urls) for name, urls in found.items()}


def _own(step: Step, rank: int, address: Address | None) -> dict[str, str]:
    return {
        "SEATRIAL_COPY": str(step.copy),
        "SEATRIAL_RANK": str(rank),
        "SEATRIAL_PORT": str(address.port) if address else "",
        "SEATRIAL_HEAD": HOST if address else "",
        "SEATRIAL_HEAD_PORT": str(address.head_port) if address else "",
    }


def _spec(step: Step, rank: int, variables: Mapping[str, str], more: Mapping[str, str], log: Path, line_filter: LineFilter) -> ProcessSpec:
    component = step.component
    values = {name: fill(value, variables) for name, value in component.environment.items()}
    several = component.tasks > 1
    return ProcessSpec(
        argv=tuple(fill(word, variables) for word in component.command),
        env={**_inherited(), **variables, **more, **values},
        cwd=Path(fill(component.workdir, variables) if component.workdir else ".").absolute(),
        log=log,
        run_id=f"{step.name}.{rank}-{uuid.uuid4().hex}",
        deadline_s=math.inf,
        stall_s=math.inf,
        line_filter=_labelled(rank, line_filter) if several else line_filter,
        control=Control(),
        part=str(rank) if several else "",
    )


def _inherited() -> dict[str, str]:
    """This process's environment without what an outer job told it."""
    ours = set(PLACEHOLDERS.values())
    return {
        name: value for name, value in os.environ.items() if name not in ours and not name.startswith(("SEATRIAL_URL_", "SEATRIAL_URLS_"))
    }


def _labelled(rank: int, line_filter: LineFilter) -> LineFilter:
    return lambda line: f"{rank}: {line_filter(line)}"
