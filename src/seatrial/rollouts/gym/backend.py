"""The Gym backend: a unit is posted to its agent's /run, as Gym's own collector would, and each failure is that row's alone.

- Requests have a deadline, which Gym's have not. A 500 costs its row, and says what the server said.
- Gym's servers ask each other, and the policy, for ever: a death that nobody is told of would hang every rollout until its deadline.
  So processes are watched twice a second, and the policy is asked now and then; what dies ends every open request at once.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import aiohttp
import orjson

from seatrial.evidence.redact import MINIMUM_LENGTH
from seatrial.model.errors import UserError
from seatrial.model.guarded import BadValue
from seatrial.rollouts.campaign import Campaign
from seatrial.rollouts.direct.client import Client
from seatrial.rollouts.direct.errors import of_exception, of_status
from seatrial.rollouts.direct.model import choose
from seatrial.rollouts.direct.request import sort_sampling
from seatrial.rollouts.gym import install
from seatrial.rollouts.gym.command import Asked
from seatrial.rollouts.gym.rows import body_of, outcome_of, result_of
from seatrial.rollouts.gym.servers import GymServers
from seatrial.rollouts.place import Place
from seatrial.rollouts.record import FailureKind
from seatrial.rollouts.server_json import parse_json_fast
from seatrial.rollouts.work import Outcome, RolloutError, ServersGoneError, Unit

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
        place: Place | None = None,
        progress: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`logs` is the attempt's directory; `agents` are those that rows name; `sandbox` is where its service listens; `place` is where
        the model's name is pinned."""
        assert campaign.gym is not None
        self.campaign, self.gym = campaign, campaign.gym
        self.sampling = sort_sampling(campaign.sampling)
        self._urls, self._key, self._logs, self._agents = tuple(urls), key, logs, sorted({*agents})
        self._sandbox, self._place, self._progress = sandbox, place, progress
        self._policy = Client(urls, "", key, campaign.requests, progress)
        self._hidden = key.encode() if key and len(key) >= MINIMUM_LENGTH else None
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
        installation = install.find(self.gym)
        install.check(self.gym, installation)
        try:
            await self._policy.open()
            asked = Asked(self._urls, await choose(self._policy, self.campaign.policy.model, self._place), self._key)
            self._servers = GymServers(self.gym, installation, asked, self._logs, self._progress, self._sandbox)
            await self._start(self._servers)
            self._runs = {name: f"{url}/run" for name, url in self._servers.agents().items()}
            self._know(self._agents)
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

    async def roll(self, unit: Unit) -> Outcome:
        """One rollout by the unit's agent."""
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

    def clean(self, data: bytes) -> bytes:
        """What a server sent, without the key, should it repeat it."""
        return data.replace(self._hidden, b"[redacted:api-key]") if self._hidden and self._hidden in data else data

    async def alive(self) -> str | None:
        """None, or who does not answer."""
        return self.gone() or self.servers.gone() or await self._policy.alive()

    async def close(self) -> None:
        """End everything."""
        if self._watching is not None:
            self._watching.cancel()
        if self._session is not None:
            await self._session.close()
            self._session = None
        await self._policy.close()
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

    def _know(self, agents: Sequence[str]) -> None:
        for name in agents:
            if name not in self._runs:
                raise UserError(f"campaign: {self._unknown(name)}", "correct agent_ref of the rows, the dataset's agent, or gym.agent")

    def _unknown(self, name: str) -> str:
        return f"Gym has no agent {name!r}; it has: {', '.join(sorted(self._runs)) or 'none'}"

    async def _post(self, url: str, body: bytes) -> object:
        assert self._session is not None
        try:
            async with self._session.post(url, data=body, headers={"Content-Type": "application/json"}) as answer:
                data = self.clean(await answer.read())
                if answer.status != 200:
                    raise of_status(answer.status, data, answer.headers)
                return parse_json_fast(data)
        except aiohttp.ClientError as error:
            raise of_exception(error, url) from error
        except TimeoutError as error:
            raise RolloutError(FailureKind.TIMEOUT, f"no rollout within {self.campaign.requests.timeout_s:g} s") from error
        except OSError as error:
            raise of_exception(error, url) from error
        except BadValue as error:
            raise RolloutError(FailureKind.PARSE, f"the agent's answer is not JSON: {error}", heals=True) from error

    async def _watch(self) -> None:
        """Until something is gone for good."""
        assert self._gone is not None
        asked = answered = time.monotonic()
        while True:
            await asyncio.sleep(_WATCH_S)
            why = self.servers.gone()
            if why is None and time.monotonic() - asked >= min(_POLICY_S, self.campaign.requests.dead_s / 4):
                silent = await self._policy.alive()
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
