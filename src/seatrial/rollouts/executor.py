"""Executes one unit until it is written: tries, waits, server health, and what a failure means for later attempts.

- Only what can heal is tried again: `requests.tries` times, with growing waits or as long as the server asks for. A refusal (429, 503)
  has PATIENCE times as many tries.
- A lost connection costs a try only while a server answers. While none does, nothing is dispatched; after `dead_s` ServersGoneError
  ends the attempt. A unit that was open in more than `requests.tries` such losses is given up for this attempt.
- When two units with all their tries got nothing but errors about address or key (404, 401, …), the server is wrong: the attempt ends.
- A failure is final when nothing can heal it, or `requests.attempts` attempts gave it up. Messages are redacted and cut.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import time
import traceback
from collections import Counter
from collections.abc import Callable
from typing import Any

from seatrial.core.errors import BlockedError, UserError
from seatrial.evidence.redact import Redactor
from seatrial.rollouts.campaign import Requests
from seatrial.rollouts.dispatcher import Limiter, ShardWriter
from seatrial.rollouts.rollout_record import Backend, FailureKind, Head, RolloutError, RolloutOutcome, ServersGoneError, Unit

_AGAIN_S = 1.0


class ServerHealth:
    """Knows when a server answered last, and asks whether one still does."""

    def __init__(self, backend: Backend, dead_s: float, limiter: Limiter, progress: Callable[[str], None]) -> None:
        self._backend, self._dead_s, self._limiter, self._progress = backend, dead_s, limiter, progress
        self._heard = time.monotonic()
        self._question: asyncio.Task[bool] | None = None

    def heard(self) -> None:
        self._heard = time.monotonic()

    def silent(self) -> bool:
        """Whether it is time to ask, although no connection failed: a server may hang, or its node be lost."""
        return time.monotonic() - self._heard > self._dead_s / 4

    async def check(self) -> bool:
        """True when they answer at once, False when they came back after a silence; raises ServersGoneError."""
        if self._question is None or self._question.done():
            self._question = asyncio.create_task(self._ask())
        return await asyncio.shield(self._question)

    async def close(self) -> None:
        if self._question is not None:
            self._question.cancel()
            await asyncio.gather(self._question, return_exceptions=True)

    async def _ask(self) -> bool:
        until = time.monotonic() + self._dead_s
        why = await self._once(until)
        if why is None:
            return True
        self._limiter.pause()
        self._progress(f"nobody answers, waiting up to {self._dead_s:g} s: {why}")
        try:
            while (left := until - time.monotonic()) > 0:
                await asyncio.sleep(min(_AGAIN_S, self._dead_s / 10, left))
                if (said := await self._once(until)) is None:
                    self._progress("the servers answer again")
                    return False
                why = said
        finally:
            self._limiter.resume()
        raise ServersGoneError(f"nobody answered for {self._dead_s:g} s: {why}")

    async def _once(self, until: float) -> str | None:
        try:
            async with asyncio.timeout(max(until - time.monotonic(), 0.01)):
                why = await self._backend.alive()
        except TimeoutError:
            return "no answer in time"
        if why is None:
            self.heard()
        return why


PATIENCE = 4
_LONGEST_WAIT_S = 60.0
_MESSAGE = 500
_ANSWER = 500
_TWO = 2
"""Units that fail alike: one may be poisoned."""
_OVERLOAD = frozenset({FailureKind.RATE_LIMIT, FailureKind.TIMEOUT, FailureKind.CONNECTION})


class Executor:
    """Rolls units out, one call each; safe to use from many tasks."""

    def __init__(self, backend: Backend, requests: Requests, limiter: Limiter, health: ServerHealth, units: int) -> None:
        """`units` is how many there are in the campaign."""
        self._backend, self._requests, self._limiter, self._health = backend, requests, limiter, health
        self._redactor = Redactor(os.environ)
        self._strangers = 0
        self._enough = requests.tries * min(units, _TWO)
        """Answers of strangers after which the attempt ends; 0 once somebody answered in another way."""
        self.closing = False
        """Whether units that would wait are to be left owed."""
        self.rolling: set[asyncio.Task[Any]] = set()

    async def settle(self, unit: Unit, writer: ShardWriter, slot: int) -> bool | None:
        """Roll a unit out and write it: whether it worked; None when it stays pending because we are closing. Gives `slot` back."""
        tries = Counter[str]()
        while True:
            began = time.monotonic()
            result = await self._roll(unit, slot)
            if isinstance(result, RolloutOutcome):
                error = _write(writer, unit, result, tries.total() + 1, time.monotonic() - began)
                if error is None:
                    self._enough = 0
                    return True
                result = error
            self._judge_server(result, writer)
            wait = await self._after(result, tries)
            if wait is None:
                self._give_up(unit, writer, result, tries.total())
                return False
            if self.closing:
                return None
            await asyncio.sleep(wait)
            again = await self._limiter.acquire()
            if again is None:
                return None
            slot = again

    def note(self, unit: Unit, writer: ShardWriter, result: RolloutOutcome | RolloutError) -> bool:
        """Write down what a streaming backend made of a unit: whether it worked. How long it took is not known."""
        error = _write(writer, unit, result, 1, None) if isinstance(result, RolloutOutcome) else result
        if error is not None:
            self._give_up(unit, writer, error, 1)
        return error is None

    def _give_up(self, unit: Unit, writer: ShardWriter, error: RolloutError, tries: int) -> None:
        message = self._redactor.text(str(error))[:_MESSAGE]
        spent = writer.failed_before[unit.number] + 1 >= self._requests.attempts
        final = not error.heals or error.kind is FailureKind.PARSE or spent
        head = _head(unit, "failed", tries, kind=error.kind.value, final=final, message=message)
        row, indices = unit.row, {"_ng_task_index": unit.row.index, "_ng_rollout_index": unit.repeat}
        where = {"task_id": row.id, "dataset": row.dataset, "source": row.source, **indices}
        try:
            writer.write(head, {**error.row, **where})
        except (ValueError, TypeError):
            writer.write(head, where)  # what was worth keeping cannot be kept; the failure itself can

    async def _roll(self, unit: Unit, slot: int) -> RolloutOutcome | RolloutError:
        """One try, within its deadline; the slot is given back with what it taught."""
        answered = overloaded = False
        task = asyncio.current_task()
        assert task is not None
        self.rolling.add(task)
        try:
            async with asyncio.timeout(self._requests.timeout_s):
                outcome = await self._backend.roll(unit)
            answered = True
            return outcome
        except TimeoutError:
            overloaded = True
            return RolloutError(FailureKind.TIMEOUT, f"no answer within {self._requests.timeout_s:g} s")
        except RolloutError as error:
            overloaded = error.kind in _OVERLOAD
            answered = not overloaded
            return error
        except (ServersGoneError, BlockedError, UserError):
            raise
        except Exception as error:  # noqa: BLE001 - whatever one row breaks costs that row: it must not end every attempt at the same place
            last = traceback.extract_tb(error.__traceback__)[-1]  # the message of a bug seldom says anything without its place
            return RolloutError(FailureKind.AGENT, f"{type(error).__name__}: {error} ({last.filename}:{last.lineno})", heals=True)
        finally:
            self.rolling.discard(task)
            self._limiter.release(slot, answered=answered, overloaded=overloaded)
            if answered:
                self._health.heard()

    def _judge_server(self, error: RolloutError, writer: ShardWriter) -> None:
        """End the attempt when every answer so far was about address or key."""
        if error.kind is FailureKind.CONNECTION:
            return
        if error.kind is not FailureKind.HTTP_4XX or not error.heals:
            self._enough = 0
        elif self._enough and not writer.ok:
            self._strangers += 1
            if self._strangers >= self._enough:
                said = self._redactor.text(str(error))[:_MESSAGE]
                raise ServersGoneError(f"no request was answered in any other way than: {said}. See policy.url and policy.key_env")

    async def _after(self, error: RolloutError, tries: Counter[str]) -> float | None:
        """How long to wait before the next try; None when there is none."""
        gone = error.kind is FailureKind.CONNECTION and not await self._health.check()
        sort = "gone" if gone else "refused" if error.kind is FailureKind.RATE_LIMIT else "made"
        tries[sort] += 1
        count = tries[sort]
        allowed = self._requests.tries * (PATIENCE if error.kind is FailureKind.RATE_LIMIT else 1)
        if gone:
            return 0.0 if count <= self._requests.tries else None
        if not error.heals or count >= allowed:
            return None
        wait = min(self._requests.backoff_s * 2.0 ** (count - 1), _LONGEST_WAIT_S) * random.uniform(0.5, 1.5)
        return max(wait, error.after_s or 0.0)


def _head(unit: Unit, outcome: str, tries: int, **fields: Any) -> Head:
    return Head(unit.number, unit.row.id, unit.repeat, unit.seed, outcome, tries=tries, ended=round(time.time(), 3), **fields)


def _write(writer: ShardWriter, unit: Unit, outcome: RolloutOutcome, tries: int, latency_s: float | None) -> RolloutError | None:
    """Write a rollout down; an error when it cannot be stored, such as a metric that is not finite."""
    took = latency_s if outcome.latency_s is None else outcome.latency_s
    answer = outcome.answer
    if answer is not None and len(answer) > _ANSWER:  # for majority votes: different ones stay apart
        answer = f"{answer[:_ANSWER]}… sha256:{hashlib.sha256(answer.encode('utf-8', 'surrogatepass')).hexdigest()[:16]}"
    head = _head(
        unit,
        "ok",
        tries,
        reward=outcome.reward,
        answer=answer,
        input_tokens=outcome.input_tokens,
        output_tokens=outcome.output_tokens,
        turns=outcome.turns,
        latency_s=None if took is None else round(took, 4),
        finish=outcome.finish,
        metrics=outcome.metrics,
    )
    try:
        writer.write(head, outcome.row)
    except (ValueError, TypeError) as error:
        return RolloutError(FailureKind.REWARD, f"the rollout cannot be stored: {error}")
    return None
