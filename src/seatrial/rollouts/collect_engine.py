"""Collects the pending units of some shards from one backend, in one event loop.

- At most `requests.concurrency` units are in memory. Shards follow each other without an idle tail.
- It ends when all was tried (`done`), on request (`stopped`), when too many units failed over all shards (`budget`), when no server
  answers (`servers`), or when other attempts hold the rest (`fenced`). Open rollouts get `drain_s`. What was not written is pending.
- The failure budget counts units that failed for good in any shard, and units that running attempts gave up for now; other collectors'
  counts come from their state files.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from typing import Literal, NamedTuple

from seatrial.core.errors import UserError
from seatrial.rollouts.campaign import Campaign, Failures
from seatrial.rollouts.campaign_dir import CampaignDir, newest_states, read_stop_file
from seatrial.rollouts.campaign_dir import write_stop_file as stop_campaign
from seatrial.rollouts.dispatcher import Dispatcher, Limiter, ShardWriter
from seatrial.rollouts.executor import Executor, ServerHealth
from seatrial.rollouts.journal.journal_scan import Scanner
from seatrial.rollouts.manifest import Units, load_manifest
from seatrial.rollouts.rollout_record import Backend, ServersGoneError, Streaming

_RUNNING_S = 60.0
_RECOUNT_S = 10.0
_RECOUNT_S_PER_SHARD = 0.25
"""Hundreds of collectors read hundreds of files each: the more shards, the less often."""


class FailureBudget:
    """Says when to stop the campaign."""

    def __init__(self, failures: Failures, place: CampaignDir, shards: int, own: frozenset[int]) -> None:
        self._failures = failures
        self._place = place
        self._others = [shard for shard in range(shards) if shard not in own]
        self._every_s = _RECOUNT_S + _RECOUNT_S_PER_SHARD * shards
        self._looked = float("-inf")
        self._ok = self._failed = 0

    def look(self, now: float) -> None:
        """Read the states of other shards, when it is time; `now` is a fresh time of the file system's clock."""
        if time.monotonic() - self._looked < self._every_s:
            return
        self._looked = time.monotonic()
        self._ok = self._failed = 0
        for state, written in newest_states(self._place, self._others).values():
            self._ok += state.ok
            running = state.ended is None and now - written < _RUNNING_S
            self._failed += state.failed + (state.failed_now if running else 0)

    def exceeded(self, ok: int, failed: int) -> tuple[str, str] | None:
        """Why to stop, when our own shards have so many, and the setting with which it goes on, with room for more; else None."""
        ok, failed = ok + self._ok, failed + self._failed
        known = ok + failed
        limits = self._failures
        if limits.max_count is not None and failed > limits.max_count:
            reason = f"{failed} of {known} units failed; failures.max_count is {limits.max_count}"
            return (reason, f"failures.max_count={2 * failed}")
        if known >= limits.after and failed > limits.max_share * known:
            reason = f"{failed} of {known} units failed ({failed / known:.0%}); failures.max_share is {limits.max_share:g}"
            return (reason, f"failures.max_share={min(math.floor(10 * failed / known + 2) / 10, 1):g}")
        return None


Reason = Literal["done", "stopped", "budget", "servers", "fenced"]
_LOOK_S = 0.2
_KEEP_S = 2.0
_SAY_S = 15.0
_BATCH = 2000
"""Units that a streaming backend is handed at once."""


class CollectEnd(NamedTuple):
    """How a collector ended."""

    reason: Reason
    ok: int
    """Units of its shards that are settled well, earlier attempts included."""
    failed: int
    owed: int
    message: str = ""


class Collector:
    """Collects what is owed in these shards. `stop` is asked five times a second and gives a reason or None; `only` names the units that
    can be done at all. `run` raises BlockedError and UserError for what no attempt can mend by itself."""

    def __init__(
        self,
        place: CampaignDir,
        campaign: Campaign,
        units: Units,
        shards: Sequence[int],
        backend: Backend,
        *,
        stop: Callable[[], str | None],
        progress: Callable[[str], None],
        drain_s: float = 60.0,
        only: Callable[[int], bool] | None = None,
    ) -> None:
        manifest = load_manifest(place)
        if (source := manifest.rescored) and only is None:
            raise UserError(f"{place.root}: holds the rollouts of {source}, scored anew: nothing is collected here", f"resume {source}")
        self._drain_s = drain_s
        self._place, self._units, self._shards = place, units, tuple(dict.fromkeys(shards))
        self._backend, self._stop, self._progress, self._only = backend, stop, progress, only
        requests = campaign.requests
        self._limiter = Limiter(requests.concurrency)
        self._health = ServerHealth(backend, requests.dead_s, self._limiter, progress)
        self._executor = Executor(backend, requests, self._limiter, self._health, units.total)
        self._dispatcher = Dispatcher(place, units, self._shards)
        self._budget = FailureBudget(campaign.failures, place, manifest.shards, frozenset(self._shards))
        self._halt: asyncio.Future[tuple[Reason, str]] = asyncio.get_running_loop().create_future()
        self._workers: list[asyncio.Task[None]] = []
        self._listener: asyncio.Task[None] | None = None

    async def run(self) -> CollectEnd:
        ticker, work = asyncio.create_task(self._tick()), asyncio.create_task(self._work())
        how: str = "error"
        try:
            await asyncio.wait((self._halt, ticker, work), return_when=asyncio.FIRST_COMPLETED)
            how, message = self._why(ticker, work)
            if how in ("stopped", "budget"):
                await self._drain()
        finally:
            await _cancel(ticker, work, *self._workers, *([self._listener] if self._listener else []))
            await self._health.close()
            try:
                self._dispatcher.close(how)
            finally:
                await self._backend.close()
        return self._ended(how, message)

    def _why(self, ticker: asyncio.Task[None], work: asyncio.Task[None]) -> tuple[Reason, str]:
        """The reason to end. What was asked for comes first, then what went wrong."""
        if self._halt.done():
            return self._halt.result()
        if ticker.done():
            ticker.result()
        try:
            work.result()
        except ServersGoneError as gone:
            return "servers", str(gone)
        lost = self._dispatcher.lost()
        return ("fenced", lost) if lost else ("done", "")

    def _ended(self, how: Reason, message: str) -> CollectEnd:
        """Counts come from the journal, not from what we think that we wrote."""
        scan = Scanner(self._place, self._units).update(self._shards)
        total = sum(1 for shard in self._shards for _ in self._units.of_shard(shard))
        owed = total - scan.ok - scan.failed
        if how == "done" and owed and (last := self._dispatcher.message):
            message = f"What is owed failed, and may heal; the last message: {last}"
        return CollectEnd(how, scan.ok, scan.failed, owed, message)

    async def _work(self) -> None:
        if read_stop_file(self._place):
            return self._stop_for_budget()
        if not await self._dispatcher.open_next():
            return None
        await self._backend.open()
        self._health.heard()
        if isinstance(self._backend, Streaming):
            self._workers = [asyncio.create_task(self._stream(self._backend))]
        else:
            self._workers = [asyncio.create_task(self._worker()) for _ in range(self._limiter.cap)]
        await asyncio.gather(*self._workers)
        return None

    async def _worker(self) -> None:
        while (slot := await self._limiter.acquire()) is not None:
            try:
                given = await self._dispatcher.next(self._only)
            except BaseException:
                self._limiter.release(slot)
                raise
            if given is None:
                return self._limiter.release(slot)
            number, writer = given
            worked: bool | None = None
            try:
                worked = await self._executor.settle(self._units.unit(number), writer, slot)
            finally:
                self._dispatcher.back(writer, written=worked is not None)
            if worked is False:
                self._check_budget()
        return None

    async def _stream(self, backend: Streaming) -> None:
        """Hand over many units at a time; the backend has its own way with them."""
        while True:
            batch: dict[int, ShardWriter] = {}
            while len(batch) < _BATCH and (given := await self._dispatcher.next(self._only)) is not None:
                batch[given[0]] = given[1]
            if not batch:
                return
            try:
                async with aclosing(backend.stream([self._units.unit(number) for number in batch])) as stream:
                    async for unit, result in stream:
                        writer = batch.pop(unit.number)
                        worked = self._executor.note(unit, writer, result)
                        self._dispatcher.back(writer, written=True)
                        if not worked:
                            self._check_budget()
            finally:
                for writer in batch.values():
                    self._dispatcher.back(writer, written=False)

    async def _drain(self) -> None:
        """Let open rollouts finish; whoever waits for anything else goes at once."""
        self._executor.closing = True
        for worker in self._workers:
            if worker not in self._executor.rolling:
                worker.cancel()
        left = [worker for worker in self._workers if not worker.done()]
        if left:
            self._progress(f"stopping: {len(left)} open rollouts have {self._drain_s:g} s to finish")
            await asyncio.wait(left, timeout=self._drain_s)

    async def _tick(self) -> None:
        kept = said = time.monotonic()
        while True:
            if why := self._stop():
                self._end("stopped", why)
            await asyncio.sleep(_LOOK_S)
            now = time.monotonic()
            if now - kept >= _KEEP_S:
                kept = now
                await self._keep()
            if now - said >= _SAY_S:
                said = now
                self._progress(f"{self._dispatcher.describe()}; {self._limiter.open} open of {int(self._limiter.limit)} allowed")

    async def _keep(self) -> None:
        written = self._dispatcher.keep(self._limiter)
        self._stop_for_budget()
        if self._limiter.open and self._health.silent() and (self._listener is None or self._listener.done()):
            self._listener = asyncio.create_task(self._listen())
        if written is not None:
            await asyncio.to_thread(self._budget.look, written)
            self._check_budget()

    async def _listen(self) -> None:
        """A server that hangs fails no connection: ask."""
        try:
            await self._health.check()
        except ServersGoneError as gone:
            self._end("servers", str(gone))

    def _check_budget(self) -> None:
        if not self._halt.done() and (why := self._budget.exceeded(self._dispatcher.ok, self._dispatcher.failed)):
            stop_campaign(self._place, why[0], self._dispatcher.who(), why[1])
            self._stop_for_budget()

    def _stop_for_budget(self) -> None:
        if found := read_stop_file(self._place):
            self._end("budget", found.reason)

    def _end(self, reason: Reason, message: str) -> None:
        """End the collector; the first reason stays."""
        if not self._halt.done():
            self._halt.set_result((reason, message))
            self._limiter.close()


async def _cancel(*tasks: asyncio.Task[None]) -> None:
    """Cancel and collect tasks. What else went wrong by then left its units owed."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
