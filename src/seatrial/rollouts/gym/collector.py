"""Gym's own collector (`gym eval run --no-serve`, `ng_collect_rollouts`) through its seam, made safe.

- It is given materialized inputs with our indices and seeds, and an empty output: going on with that it rolls out exactly these rows, and
  no file of Gym's is the truth: rows are handed on as they arrive, and what a killed collector wrote is simply owed again.
- One row that its agent answers with an error ends Gym's collector. The rest is run again in halves, so that the row is found and
  becomes a failure of its own. The same goes for a collector that hands on nothing for as long as one rollout may take.
- A collector that fails again and again before the first row does not fail because of a row: that is a BlockedError.
"""

from __future__ import annotations

import asyncio
import math
import shutil
import time
import uuid
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from seatrial import files
from seatrial.launch.linelog import STAMP_LENGTH
from seatrial.launch.process import Control, ProcessSpec, run
from seatrial.launch.process import Outcome as Ended
from seatrial.model.errors import BlockedError
from seatrial.model.guarded import BadValue
from seatrial.model.verdict import Boundary
from seatrial.rollouts.gym.backend import GymBackend
from seatrial.rollouts.gym.command import collect_words
from seatrial.rollouts.gym.rows import REPEAT, TASK, body_of, outcome_of, result_of
from seatrial.rollouts.record import FailureKind
from seatrial.rollouts.server_json import parse_json_fast
from seatrial.rollouts.work import Outcome, RolloutError, ServersGoneError, Unit

LOG = "gym-collect.log"
_LOOK_S = 0.2
_START_S = 300.0
"""Until the collector has imported all it needs and sends its first row."""
_GRACE_S = 5.0
_HOPELESS = 5
"""So many collectors in a row may end without a single row before the first one."""

Key = tuple[int, int]
Done = tuple[Unit, Outcome | RolloutError]


async def collect_with_gym(backend: GymBackend, units: Iterable[Unit], directory: Path) -> AsyncGenerator[Done, None]:
    """Roll out `units` with Gym's collector against the servers of an open backend; each comes out once, in any order.

    Files lie below `directory` while it goes on, the collector's log stays there. Raises ServersGoneError and BlockedError; then, as
    when this is closed early, the collector is ended and what did not come out is owed.
    """
    everything = list(units)
    groups: deque[list[Unit]] = deque([everything] if everything else [])
    scratch = directory / f"gym-{uuid.uuid4().hex[:8]}"
    came, barren = 0, 0
    try:
        while groups:
            group = groups.popleft()
            attempt = _Collector(backend, group, scratch, directory / LOG)
            try:
                async for done in attempt.rows():
                    came += 1
                    yield done
            finally:
                await attempt.end()
            rest = list(attempt.owed.values())
            barren = barren + 1 if len(rest) == len(group) else 0
            if not came and barren >= _HOPELESS:
                message = f"Gym's collector ended {barren} times without a single rollout: {attempt.last_line()}"
                raise BlockedError(Boundary.ROLLOUT, message, f"see {directory / LOG}")
            if (failure := attempt.failure()) is not None:
                for unit in rest:
                    yield unit, failure
            else:
                # In the order of their making, not depth first: one half of them is sound more often than not.
                groups.extend((rest[: len(rest) // 2], rest[len(rest) // 2 :]))
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


class _Collector:
    """One run of Gym's collector over a group of units."""

    def __init__(self, backend: GymBackend, group: list[Unit], scratch: Path, log: Path) -> None:
        self._backend, self._log = backend, log
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        self._output, self._failures = scratch / "rollouts.jsonl", scratch / "rollouts_failures.jsonl"
        self._output.touch()
        self._refused: list[Done] = []
        self._sent: dict[Key, dict[str, Any]] = {}
        self.owed: dict[Key, Unit] = {}
        """What has not come out yet."""
        with (scratch / "rollouts_materialized_inputs.jsonl").open("wb") as inputs:
            for unit in group:
                self._materialize(unit, inputs)
        self._control = Control()
        self._stalled = False
        self._code: int | None = None
        self._running: asyncio.Task[Ended] | None = None

    def _materialize(self, unit: Unit, inputs: BinaryIO) -> None:
        try:
            body = body_of(unit, self._backend.campaign, self._backend.sampling)
        except RolloutError as error:
            self._refused.append((unit, error))
            return
        key = (body[TASK], body[REPEAT])
        self.owed[key] = unit
        self._sent[key] = {name: body[name] for name in (TASK, REPEAT, "agent_ref", "skills_ref") if name in body}
        inputs.write(orjson.dumps(body, option=orjson.OPT_APPEND_NEWLINE))

    async def rows(self) -> AsyncIterator[Done]:
        """Rows as they arrive, until the collector ends or is ended because none does."""
        for refused in self._refused:
            yield refused
        if not self.owed:
            return
        self._running = asyncio.create_task(asyncio.to_thread(run, self._spec()))
        tails = (_Tail(self._output), _Tail(self._failures))
        began = time.monotonic()
        moved: float | None = None
        while True:
            if moved is None and self._failures.exists():  # made right before the first row is sent
                moved = time.monotonic()
            ended = self._running.done()
            for line in [line for tail in tails for line in tail.read()]:
                done = self._take(_parsed(self._backend.clean(line)))
                if done is not None:
                    moved = time.monotonic()
                    yield done
            if ended:
                self._code = self._running.result().exit_code
                return
            self._end_if_stalled(began, moved)
            if why := self._backend.gone():
                raise ServersGoneError(why)
            await asyncio.wait((self._running,), timeout=_LOOK_S)

    def _end_if_stalled(self, began: float, moved: float | None) -> None:
        """`moved` is when the last row came, or the first was sent; None before that."""
        now, limit = time.monotonic(), self._backend.campaign.requests.timeout_s
        if moved is None and now - began > _START_S:
            raise BlockedError(Boundary.ROLLOUT, f"Gym's collector sent no row within {_START_S:g} s of its start", f"see {self._log}")
        if moved is not None and now - moved > limit and not self._stalled:
            self._stalled = True
            self._control.stop(f"no row for {limit:g} s", _GRACE_S)

    async def end(self) -> None:
        """End the collector, if it still runs."""
        if self._running is not None and not self._running.done():
            self._control.stop("the rest is owed", _GRACE_S)
            await asyncio.wait((self._running,))

    def failure(self) -> RolloutError | None:
        """Why each unit that is left did not come out; None when that is not known of all of them."""
        requests = self._backend.campaign.requests
        if self._stalled and len(self.owed) <= requests.concurrency:
            # No more than may be open at once: every one of them was, all the time.
            return RolloutError(FailureKind.TIMEOUT, f"no rollout within {requests.timeout_s:g} s")
        if self._code == 0:
            return RolloutError(FailureKind.AGENT, "Gym's collector wrote no row: the agent was ended from outside", heals=True)
        if len(self.owed) <= 1:
            return RolloutError(FailureKind.HTTP_5XX, f"Gym's collector ended because of it: {self.last_line()}")
        return None

    def last_line(self) -> str:
        """What the collector said last, mostly its exception; without secrets, as the log is."""
        lines = files.read_text(self._log).splitlines() if self._log.is_file() else []
        said = [line[STAMP_LENGTH:].strip() for line in lines[-50:]]
        return next((line for line in reversed(said) if line and not line.startswith("[seatrial]")), "it said nothing")

    def _take(self, row: Any) -> Done | None:
        """The unit of a row and what became of it; None for a row that is not owed."""
        key: Any = (row.get(TASK), row.get(REPEAT)) if isinstance(row, dict) else None
        unit = self.owed.pop(key, None) if key is not None and all(type(part) is int for part in key) else None
        if unit is None:
            return None
        try:
            return unit, outcome_of(result_of(self._sent[key], row))
        except RolloutError as error:
            return unit, error

    def _spec(self) -> ProcessSpec:
        backend, servers = self._backend, self._backend.servers
        return ProcessSpec(
            argv=collect_words(backend.gym, servers.installation, servers.ports.head, self._output, backend.campaign.requests.concurrency),
            env=servers.environment,
            cwd=servers.private.work,
            log=self._log,
            run_id=f"gym-collect-{uuid.uuid4().hex}",
            deadline_s=math.inf,
            stall_s=math.inf,
            grace_s=_GRACE_S,
            line_filter=servers.redactor.lines().line,
            control=self._control,
        )


class _Tail:
    """What is appended to a file, as whole lines."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def read(self) -> list[bytes]:
        """Lines since the last call; one that has no end yet is left for the next call."""
        if not self._path.is_file():
            return []
        with self._path.open("rb") as stream:
            stream.seek(self._offset)
            whole, newline, _ = stream.read().rpartition(b"\n")
        self._offset += len(whole) + len(newline)
        return whole.split(b"\n") if whole else []


def _parsed(line: bytes) -> Any:
    """A row; None for a line that is none, whose unit stays owed."""
    try:
        return parse_json_fast(line)
    except BadValue:
        return None
