"""Runs of prepared steps on this machine.

- Up to `plan.jobs` at once, each followed by a thread of its own until nothing of it is left.
- Every step is given back exactly once, as it ends; one that was ended because it no longer matters, or never begun, as `interrupted`.
- An interrupt, or any error, ends what runs before it passes on. Nothing outlives the iterator.
- A command that cannot be started has the exit code that a shell would give: 127 or 126.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from seatrial.evidence.redact import Redactor
from seatrial.launch.control import Control
from seatrial.launch.interrupt import check_stop, stop_requested
from seatrial.launch.process import CannotStart, ProcessSpec, end_leftovers, run
from seatrial.regress.bisect.record import Plan
from seatrial.regress.bisect.running.steps import Facts, Prepared
from seatrial.trial.level import stopped_too

GRACE_S = 10.0
"""Between asking a command to end and killing it."""
_LOOK_S = 0.2
_LEFTOVERS = ("steps/*/*.pids", "steps/*/trial/**/*.pids", "stores/*/*.pids")
"""Where runs and fetches note their processes. Not in the trees, which may be large."""


@dataclass(frozen=True, slots=True)
class _Running:
    prepared: Prepared
    control: Control


class LocalRunner:
    """Runs steps as processes of this machine."""

    def __init__(self, plan: Plan, redactor: Redactor, tell: Callable[[str], None]) -> None:
        self._plan, self._redactor, self._tell = plan, redactor, tell

    def run(self, prepared: Sequence[Prepared], useless: Callable[[], set[int]]) -> Iterator[tuple[Prepared, Facts]]:
        """Each step with its facts, as they end. `useless` names, by their numbers, steps that no longer matter."""
        waiting = list(prepared)
        running: dict[Future[Facts], _Running] = {}
        controls: list[Control] = []
        pool = ThreadPoolExecutor(self._plan.jobs, "run")
        try:
            while waiting or running:
                while waiting and len(running) < self._plan.jobs:
                    begun = _Running(waiting.pop(0), Control())
                    controls.append(begun.control)  # first: an interrupt may come before the run is known to be under way
                    running[pool.submit(self._follow, begun)] = begun
                for future in wait(running, _LOOK_S, FIRST_COMPLETED).done:
                    yield running.pop(future).prepared, future.result()
                    for idle in self._cancel(waiting, running, useless()):
                        yield idle, idle.facts(None, "interrupted")
                if stop_requested():
                    _stop(controls, GRACE_S)
                    wait(running)
                    check_stop()
        finally:
            _stop(controls, 0.0)
            pool.shutdown()

    def _cancel(self, waiting: list[Prepared], running: dict[Future[Facts], _Running], gone: set[int]) -> list[Prepared]:
        """End those that run and no longer matter; gives those that were not begun, which are not begun any more."""
        for one in running.values():
            if one.prepared.step.number in gone and not one.control.asked:
                self._tell(f"{one.prepared.step.point.commit[:12]}: its result no longer matters, ending it")
                one.control.stop("its result no longer matters", GRACE_S)
        idle = [one for one in waiting if one.step.number in gone]
        waiting[:] = [one for one in waiting if one.step.number not in gone]
        return idle

    def _follow(self, one: _Running) -> Facts:
        prepared, step = one.prepared, one.prepared.step
        spec = ProcessSpec(
            argv=prepared.argv,
            env=prepared.env,
            cwd=prepared.cwd,
            log=prepared.log,
            run_id=f"bisect-{step.directory.name}-{time.time_ns()}",
            deadline_s=60 * self._plan.minutes,
            stall_s=math.inf,  # a command that says nothing is not stuck: only the deadline ends it
            grace_s=GRACE_S,
            line_filter=self._redactor.lines().line,
            control=one.control,
        )
        try:
            outcome = run(spec)
        except CannotStart as error:
            return prepared.facts(error.code, "exited")
        # Whoever stops Seatrial may signal all its processes at once: then the command did not fail by itself.
        cut = outcome.ended == "exited" and outcome.exit_code != 0 and stopped_too(outcome.signal)
        return prepared.facts(None, "interrupted") if cut else prepared.facts(outcome.exit_code, outcome.ended)


def _stop(controls: Sequence[Control], grace_s: float) -> None:
    for control in controls:
        control.stop("Seatrial was interrupted", grace_s)


def clean_up(directory: Path) -> int:
    """End what runs of a killed Seatrial left behind in a bisect directory; returns how many processes that were."""
    return sum(end_leftovers(file) for pattern in _LEFTOVERS for file in sorted(directory.glob(pattern)))
