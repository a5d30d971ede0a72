"""The Gym backend: posts each unit to its agent's /run, or drives Gym's own collector (`driver = "collector"`).

- Requests have a deadline, which Gym's have not. A 500 costs its row alone. Processes are watched twice a second and the policy is asked
  now and then; a death ends every open request at once.
- Rows are sent and written as Gym's collector does, with our global indices and seeds. An agent may report a failure
  (`_ng_failure_class`, `_ng_failure_terminal`) or ask for no trace (`_ng_no_persist`): failures here, never rewards.
- Gym's own collector gets materialized inputs and an empty output, and rows are handed on as they arrive. A row that ends it, or that
  stalls it for a rollout's time, is found by halving the rest. Repeated failure before the first row is a BlockedError.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import shutil
import time
import uuid
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import aiohttp
import orjson

from seatrial.core import files
from seatrial.core.errors import BlockedError, UserError
from seatrial.core.guarded import BadValue, parse_json
from seatrial.core.verdict import Boundary
from seatrial.rollouts.backends import gym_install
from seatrial.rollouts.backends.direct_backend import OpenAIClient, choose_model, error_of_exception, error_of_status
from seatrial.rollouts.backends.gym_servers import GymServers, PolicyEndpoint, collect_words
from seatrial.rollouts.backends.openai_format import Sampling, count_of, sort_sampling
from seatrial.rollouts.campaign import PARAMS, Campaign, expected, prompt_messages
from seatrial.rollouts.campaign_dir import CampaignDir
from seatrial.rollouts.fast_json import parse_json_fast
from seatrial.rollouts.manifest import NO_SEED
from seatrial.rollouts.rollout_record import FailureKind, RolloutError, RolloutOutcome, ServersGoneError, Unit
from seatrial.runtime.process import STAMP_LENGTH, Control, ProcessSpec, run
from seatrial.runtime.process import Outcome as Ended

TASK, REPEAT, AGENT = "_ng_task_index", "_ng_rollout_index", "agent_ref"
_SKILLS = "skills_ref"
_CLASS, _TERMINAL, _NO_PERSIST = "_ng_failure_class", "_ng_failure_terminal", "_ng_no_persist"
_ANSWERS = ("extracted_answer", "predicted_answer", "model_answer")
"""Where Gym's resources servers put what they read out of a response."""


def body_of(unit: Unit, campaign: Campaign, sampling: Sampling) -> dict[str, Any]:
    """What the unit's agent is sent; raises RolloutError for a row that cannot be sent."""
    row = dict(unit.row.data)
    own = row.get(PARAMS)
    if own is None:
        dataset = next(dataset for dataset in campaign.datasets if dataset.name == unit.row.dataset)
        own = {"input": prompt_messages(row, dataset)}
        # By this name Gym's resources servers know what is expected.
        row.setdefault("expected_answer", expected(row, dataset))
    row.setdefault(AGENT, {"name": unit.row.agent})
    params = {**own, **sampling.known}
    try:
        metadata = dict(params.get("metadata") or {})
        extra = {**parse_json(metadata.get("extra_body") or "{}"), **sampling.extra}
    except (ValueError, TypeError) as error:
        message = f"{unit.row.source}: {PARAMS}.metadata.extra_body is no JSON object in a text: {error}"
        raise RolloutError(FailureKind.PARSE, message) from error
    if unit.seed != NO_SEED:
        extra["seed"] = unit.seed
    if extra:
        params["metadata"] = {**metadata, "extra_body": json.dumps(extra)}
    return row | {PARAMS: params, TASK: unit.row.index, REPEAT: unit.repeat}


def result_of(sent: Mapping[str, Any], answer: Any) -> dict[str, Any]:
    """The row as Gym's collector writes it; raises RolloutError for an answer that is none, or a failure."""
    if not isinstance(answer, dict):
        raise RolloutError(FailureKind.PARSE, f"the agent answered with a {type(answer).__name__}, not an object", heals=True)
    result = {**answer, TASK: sent[TASK], REPEAT: sent[REPEAT], AGENT: sent[AGENT]}
    if _SKILLS in sent:
        result[_SKILLS] = sent[_SKILLS]
    if result.get(_NO_PERSIST):
        raise RolloutError(FailureKind.AGENT, f"the agent was ended from outside: {_error_text(result)}", heals=True)
    if result.get(_CLASS) is not None:
        raise RolloutError(FailureKind.AGENT, f"the agent failed: {_error_text(result)}", heals=not result.get(_TERMINAL), row=result)
    return result


def outcome_of(result: Mapping[str, Any]) -> RolloutOutcome:
    reward = result.get("reward")
    if isinstance(reward, bool) or not isinstance(reward, int | float) or not math.isfinite(reward):
        raise RolloutError(FailureKind.REWARD, f"the resources server gave the reward {reward!r}, which is no finite number", row=result)
    response = result.get("response")
    response = response if isinstance(response, dict) else {}
    usage = response["usage"] if isinstance(response.get("usage"), dict) else {}
    output = response.get("output")
    items = [item for item in output if isinstance(item, dict)] if isinstance(output, list) else []
    turns = sum(item.get("type") == "message" and item.get("role") == "assistant" for item in items)
    answer = next((result[key] for key in _ANSWERS if result.get(key) is not None), None)
    answer = answer if answer is None or isinstance(answer, str) else json.dumps(answer)
    details = response.get("incomplete_details")
    reason = details.get("reason") if isinstance(details, dict) else None
    # As the direct backend says it: a response that reached its limit of tokens ended for its length.
    finish = "length" if reason == "max_output_tokens" else str(reason or "stop")
    numbers = {key: value for key, value in result.items() if isinstance(value, int | float) and math.isfinite(value)}
    metrics = {key: float(value) for key, value in numbers.items() if key != "reward" and not key.startswith("_")}
    tokens = count_of(usage.get("input_tokens")), count_of(usage.get("output_tokens"))
    return RolloutOutcome(result, float(reward), answer, *tokens, turns, finish, metrics)


def _error_text(result: Mapping[str, Any]) -> str:
    words = [result.get(_CLASS), *(result.get(key) for key in ("_ng_failure_message", "error", "message"))]
    return " ".join(word for word in words if isinstance(word, str))[:500] or "it does not say why"


_WATCH_S = 0.5
_POLICY_S = 5.0
_INNER = re.compile(r"Hit an exception in (\S+) calling an inner server: ")
_BYTES = re.compile("^b['\"]")
_QUOTES = "'\" "
_ESCAPED = re.compile(r"\\+(?=['\"]|$)")
_DOUBLED = re.compile(r"\\{2,}")
"""Each server that quotes another doubles the backslashes of what was said, and puts some before its quotes."""


class GymBackend:
    """Drives the agents of one instance of Gym; a `Backend`."""

    def __init__(
        self,
        campaign: Campaign,
        urls: Sequence[str],
        key: str | None,
        logs: Path,
        *,
        agents: Collection[str] = (),
        sandbox: tuple[str, int] | None = None,
        place: CampaignDir | None = None,
        progress: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`logs` is the attempt's directory; `agents` are those that rows name; `sandbox` is where its service listens; `place` is where
        the model's name is pinned."""
        assert campaign.gym is not None
        self.campaign, self.gym = campaign, campaign.gym
        self.sampling = sort_sampling(campaign.sampling)
        self._urls, self._key, self._logs, self._agents = tuple(urls), key, logs, sorted({*agents})
        self._sandbox, self._place, self._progress = sandbox, place, progress
        self.policy = OpenAIClient(urls, "", key, campaign.requests, progress)
        self._session: aiohttp.ClientSession | None = None
        self._runs: dict[str, str] = {}
        self._servers: GymServers | None = None
        self._watching: asyncio.Task[None] | None = None
        self._gone: asyncio.Future[str] | None = None

    @property
    def servers(self) -> GymServers:
        """Gym's servers, once they run."""
        if self._servers is None:
            raise RuntimeError("the backend is not open")
        return self._servers

    async def open(self) -> None:
        """Start Gym's servers and wait until they are ready; raises BlockedError or UserError, and then leaves nothing behind."""
        installation = gym_install.find_gym(self.gym)
        gym_install.check_gym(self.gym, installation)
        try:
            await self.policy.open()
            asked = PolicyEndpoint(self._urls, await choose_model(self.policy, self.campaign.policy.model, self._place), self._key)
            self._servers = GymServers(self.gym, installation, asked, self._logs, self._progress, self._sandbox)
            await self._start(self._servers)
            self._runs = {name: f"{url}/run" for name, url in self._servers.agents().items()}
            if missing := [name for name in self._agents if name not in self._runs]:
                fix = "correct agent_ref of the rows, the dataset's agent, or gym.agent"
                raise UserError(f"campaign: {self._unknown(missing[0])}", fix)
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=15.0),
                timeout=aiohttp.ClientTimeout(total=self.campaign.requests.timeout_s, sock_connect=self.campaign.requests.connect_s),
                cookie_jar=aiohttp.DummyCookieJar(),
            )
            self._gone = asyncio.get_running_loop().create_future()
            self._watching = asyncio.create_task(self._watch())
        except BaseException:
            await self.close()
            raise

    async def roll(self, unit: Unit) -> RolloutOutcome:
        sent = body_of(unit, self.campaign, self.sampling)
        name = sent["agent_ref"].get("name")
        if name not in self._runs:
            raise RolloutError(FailureKind.AGENT, f"{unit.row.source}: {self._unknown(name)}")
        assert self._gone is not None
        asking = asyncio.create_task(self._post(self._runs[name], orjson.dumps(sent)))
        try:
            await asyncio.wait((asking, self._gone), return_when=asyncio.FIRST_COMPLETED)
            if not asking.done():
                raise ServersGoneError(self._gone.result())
            return outcome_of(result_of(sent, asking.result()))
        except RolloutError as error:
            error.args = (self.servers.redactor.text(readable(str(error))),)
            raise
        finally:
            asking.cancel()

    def gone(self) -> str | None:
        """None, or who is gone for good, as the watch has found."""
        return self._gone.result() if self._gone is not None and self._gone.done() else None

    async def alive(self) -> str | None:
        return self.gone() or self.servers.gone() or await self.policy.alive()

    async def close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
        if self._session is not None:
            await self._session.close()
            self._session = None
        await self.policy.close()
        if self._servers is not None:
            await asyncio.to_thread(self._servers.end)
            self._servers = None

    async def _start(self, servers: GymServers) -> None:
        """In a thread. That cannot be cancelled: when this is, the servers are ended, which ends the thread."""
        starting = asyncio.create_task(asyncio.to_thread(servers.start))
        try:
            await asyncio.shield(starting)
        except asyncio.CancelledError:
            await asyncio.to_thread(servers.end)
            await asyncio.gather(starting, return_exceptions=True)
            raise

    def _unknown(self, name: str) -> str:
        return f"Gym has no agent {name!r}; it has: {', '.join(sorted(self._runs)) or 'none'}"

    async def _post(self, url: str, body: bytes) -> object:
        assert self._session is not None
        try:
            async with self._session.post(url, data=body, headers={"Content-Type": "application/json"}) as answer:
                data = self.policy.clean(await answer.read())
                if answer.status != 200:
                    raise error_of_status(answer.status, data, answer.headers)
                return parse_json_fast(data)
        except aiohttp.ClientError as error:
            raise error_of_exception(error, url) from error
        except TimeoutError as error:
            raise RolloutError(FailureKind.TIMEOUT, f"no rollout within {self.campaign.requests.timeout_s:g} s") from error
        except OSError as error:
            raise error_of_exception(error, url) from error
        except BadValue as error:
            raise RolloutError(FailureKind.PARSE, f"the agent's answer is not JSON: {error}", heals=True) from error

    async def _watch(self) -> None:
        assert self._gone is not None
        asked = answered = time.monotonic()
        while True:
            await asyncio.sleep(_WATCH_S)
            why = self.servers.gone()
            if why is None and time.monotonic() - asked >= min(_POLICY_S, self.campaign.requests.dead_s / 4):
                silent = await self.policy.alive()
                asked = time.monotonic()
                answered = asked if silent is None else answered
                if asked - answered >= self.campaign.requests.dead_s:
                    why = f"nobody of the policy answered for {asked - answered:.0f} s: {silent}"
            if why is not None:
                self._gone.set_result(why)
                return


def readable(message: str) -> str:
    """An error that went through several of Gym's servers, each of which quotes the one before: who, and what the last one said."""
    before, *through = _INNER.split(message)
    if not through:
        return message
    said = _BYTES.sub("", _DOUBLED.sub(r"\\", _ESCAPED.sub("", through[-1]))).strip(_QUOTES)
    return f"{before.rstrip(_QUOTES)} {' -> '.join(dict.fromkeys(through[:-1:2]))}: {said or 'it said no more'}"


LOG = "gym-collect.log"
_LOOK_S = 0.2
_START_S = 300.0
"""Until the collector has imported all it needs and sends its first row."""
_GRACE_S = 5.0
_HOPELESS = 5
"""So many collectors in a row may end without a single row before the first one."""

Key = tuple[int, int]
Done = tuple[Unit, RolloutOutcome | RolloutError]


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
            attempt = _GymCollectorRun(backend, group, scratch, directory / LOG)
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


class _GymCollectorRun:
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
                done = self._take(self._backend.policy.clean(line))
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

    def _take(self, line: bytes) -> Done | None:
        """The unit of a row and what became of it; None for a line that is none, and for a row that is not owed."""
        try:
            row = parse_json_fast(line)
        except BadValue:
            return None
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
        words = collect_words(backend.gym, servers.installation, servers.ports.head, self._output, backend.campaign.requests.concurrency)
        return servers.spec("gym-collect", words, self._log, self._control, _GRACE_S)


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


class GymCollector(GymBackend):
    """A `Streaming` backend."""

    def stream(self, units: Sequence[Unit]) -> AsyncGenerator[tuple[Unit, RolloutOutcome | RolloutError], None]:
        """Roll them out with Gym's collector; what it never hands on is owed."""
        return collect_with_gym(self, units, self._logs)
