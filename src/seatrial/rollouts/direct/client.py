"""One HTTP session over the servers of a policy, all of the same kind.

- A request goes to the server with the fewest open. One whose connection failed is left alone for a while: it would have the fewest
  open for ever.
- Redirects are not followed. Proxies of the environment are asked only for https:// servers: what is served in the job is near.
- The key stands in the Authorization header and nowhere else: it is taken out of everything that a server sends back.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import aiohttp

from seatrial.model.errors import BlockedError, UserError
from seatrial.model.guarded import BadValue
from seatrial.model.verdict import Boundary
from seatrial.rollouts.campaign import Requests
from seatrial.rollouts.direct.errors import ABOUT_THE_SERVER, of_exception, of_status
from seatrial.rollouts.record import FailureKind
from seatrial.rollouts.server_json import parse_json_fast
from seatrial.rollouts.work import RolloutError

MOST_BYTES = 128 << 20
"""Of one answer."""
_ASIDE_S = 5.0
_ASK_S = 10.0
_AGAIN_S = 1.0
_SILENT_S = 3.0
"""Of waiting before it is said that and why we wait."""
_HIDDEN = b"[redacted:api-key]"
_VLLM = "vllm"
"""What vLLM calls itself in its listing of models."""
_SHORT_KEY = 6
"""A key below this length ("EMPTY" is usual for vLLM) hides nothing and would be found in half of all answers."""


@dataclass(slots=True)
class _Server:
    base: str
    path: str
    shown: str
    open: int = 0
    aside_until: float = 0.0


class Client:
    """Asks the servers; made once per collector."""

    def __init__(
        self, urls: Sequence[str], path: str, key: str | None, requests: Requests, progress: Callable[[str], None] = lambda _: None
    ) -> None:
        bases = [url.rstrip("/") for url in urls]
        self._servers = [_Server(base, f"{base}/{path}", _shown(base)) for base in bases]
        self._requests = requests
        self._key = key
        self._progress = progress
        self._hidden = key.encode() if key and len(key) >= _SHORT_KEY else None
        self._proxies = any(base.startswith("https://") for base in bases)
        self._session: aiohttp.ClientSession | None = None
        self.is_vllm = False
        """Whether the servers say that they are vLLM; known after `models`."""
        self.unlisted = ""
        """Why there is no listing of models, after `models`; empty when there is one."""

    async def open(self) -> None:
        """Make the session; connections come with the first requests."""
        headers = {"Content-Type": "application/json", "Accept": "application/json", "User-Agent": "seatrial"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        self._session = aiohttp.ClientSession(
            # The collector bounds what is open; the connector must not do it a second time.
            connector=aiohttp.TCPConnector(limit=0, ttl_dns_cache=300),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._requests.connect_s),
            headers=headers,
            skip_auto_headers=("Accept-Encoding",),
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=self._proxies,
        )

    async def close(self) -> None:
        """Close every connection."""
        if self._session:
            await self._session.close()
            self._session = None

    async def post(self, body: bytes) -> bytes:
        """The body of a 200 answer; raises RolloutError for anything else. Deadlines are the caller's."""
        server = self._pick()
        server.open += 1
        try:
            async with self._live().post(server.path, data=body, allow_redirects=False) as answer:
                data = self._clean(await _body(answer))
                if answer.status == 200:
                    return data
                error = of_status(answer.status, data, answer.headers)
                if answer.status in ABOUT_THE_SERVER:
                    error.args = (f"{error} (POST {server.shown}{server.path.removeprefix(server.base)})",)
                raise self._hide(error)
        except (aiohttp.ClientError, OSError) as error:
            # TimeoutError is an OSError: here it can only be the connection's, the request has no limit of its own.
            server.aside_until = time.monotonic() + _ASIDE_S
            raise self._hide(of_exception(error, server.shown)) from error
        finally:
            server.open -= 1

    async def alive(self) -> str | None:
        """None when at least one server answers, else why none does."""
        answers = await asyncio.gather(*(self._ask(server) for server in self._servers))
        if any(status is not None and status < 500 for status, _ in answers):
            return None
        return "; ".join(f"{server.shown}: {words}" for server, (_, words) in zip(self._servers, answers, strict=True))

    async def models(self) -> list[str]:
        """Names of the models that the servers list, waited for as long as the campaign lets nobody answer; may be none."""
        began, dead_s, said_so = time.monotonic(), self._requests.dead_s, False
        while (why := await self.alive()) is not None:
            waited = time.monotonic() - began
            if waited >= dead_s:
                fix = "see that the server runs and that policy.url is its base, such as http://host:8000/v1"
                raise BlockedError(Boundary.ROLLOUT, f"no server of the policy answered within {dead_s:g} s: {why}", fix)
            if waited >= _SILENT_S and not said_so:
                said_so = True
                self._progress(f"no answer yet from {why}; waiting up to {dead_s:g} s (requests.dead_s)")
            await asyncio.sleep(min(_AGAIN_S, dead_s / 4))
        for server in self._servers:
            status, said = await self._ask(server)
            if status in (401, 403):
                fix = "policy.key_env names the variable that holds the key: set it" if self._key is None else "check the key"
                raise UserError(f"{server.shown} refuses the key: HTTP {status}", fix)
            if status == 200:
                listed = _listed(said)
                self.is_vllm = any(entry.get("owned_by") == _VLLM for entry in listed)
                return [name for entry in listed if isinstance(name := entry.get("id"), str)]
            self.unlisted = f"GET {server.shown}/models {said}"
        return []

    async def _ask(self, server: _Server) -> tuple[int | None, str]:
        """GET models: the status and the body, or None and why there is none."""
        try:
            async with (
                asyncio.timeout(_ASK_S),
                self._live().get(f"{server.base}/models", allow_redirects=False) as answer,
            ):
                data = self._clean(await _body(answer)).decode("utf-8", "replace")
                return answer.status, data if answer.status == 200 else f"answered {answer.status}"
        except TimeoutError:
            return None, f"did not answer within {_ASK_S:g} s"
        except (aiohttp.ClientError, OSError, RolloutError) as error:
            return None, self._without_key(_words(error))

    def _pick(self) -> _Server:
        if len(self._servers) == 1:
            return self._servers[0]
        now = time.monotonic()
        return min(self._servers, key=lambda server: (max(server.aside_until - now, 0.0), server.open))

    def _clean(self, data: bytes) -> bytes:
        return data.replace(self._hidden, _HIDDEN) if self._hidden and self._hidden in data else data

    def _hide(self, error: RolloutError) -> RolloutError:
        """A message may quote headers, such as where a redirect leads."""
        error.args = (self._without_key(str(error)),)
        return error

    def _without_key(self, text: str) -> str:
        return text.replace(self._hidden.decode(), _HIDDEN.decode()) if self._hidden else text

    def _live(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise RuntimeError("the client is not open")
        return self._session


async def _body(answer: aiohttp.ClientResponse) -> bytes:
    """The whole body; a RolloutError for one that does not end where any answer does: it would take the memory of all others."""
    parts, size = [], 0
    async for part in answer.content.iter_any():
        size += len(part)
        if size > MOST_BYTES:
            raise RolloutError(FailureKind.PARSE, f"the answer is longer than {MOST_BYTES >> 20} MiB", heals=True)
        parts.append(part)
    return b"".join(parts)


def _words(error: Exception) -> str:
    """What the system calls it, where a connection failed for a reason that has a name."""
    number = error.os_error.errno if isinstance(error, aiohttp.ClientConnectorError) else None
    return os.strerror(number).lower() if number and number > 0 else str(error) or type(error).__name__


def _listed(text: str) -> list[dict[str, Any]]:
    """The models of a listing; none when it is of another shape."""
    try:
        data = parse_json_fast(text)
    except BadValue:
        return []
    entries = data.get("data") if isinstance(data, dict) else None
    return [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []


def _shown(base: str) -> str:
    """The server without what its URL may hold of secrets."""
    parts = urlsplit(base)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))
