"""The direct backend: one request to an OpenAI-compatible server and one call of the dataset's verifier per unit; and its HTTP client.

- One turn only. A row whose tools must be executed needs NeMo Gym. Rows come out in Gym's shape.
- A request goes to the server with the fewest open requests; one whose connection failed is left alone for a while. Redirects are not
  followed; proxies of the environment are used for https:// only. The key is removed from everything that a server sends back.
- Errors become classes of failure: 429 and 503 ask for patience (Retry-After); a prompt that does not fit never heals; 401, 403, 404, 405
  and redirects are about the server, so the row is pending again.
- All collectors of a campaign ask the same model: the first one's is pinned in model.json.
"""

from __future__ import annotations

import asyncio
import email.utils
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import aiohttp

from seatrial.core.errors import BlockedError, UserError
from seatrial.core.files import read_model
from seatrial.core.guarded import BadValue
from seatrial.core.records import Record
from seatrial.core.verdict import Boundary
from seatrial.evidence.redact import MINIMUM_LENGTH
from seatrial.rollouts.backends import openai_format as answers
from seatrial.rollouts.backends.openai_format import build_request, sort_sampling
from seatrial.rollouts.campaign import PARAMS, Campaign, Requests, is_gym, prompt_messages
from seatrial.rollouts.campaign_dir import CampaignDir, write_once
from seatrial.rollouts.fast_json import parse_json_fast
from seatrial.rollouts.rollout_record import FailureKind, RolloutError, RolloutOutcome, Unit, Verifier, close_verifiers, score_answer

_READ = 4000
"""Characters of an error body that are looked at."""
_CONTEXT = re.compile(
    r"context_length_exceeded|maximum context length|model'?s context length|maximum model length|context window|max_model_len"
    r"|max_tokens must be at least 1, got (?:0|-\d)",
    re.I,
)
_TOO_LONG = frozenset({400, 413, 422})
ABOUT_THE_SERVER = frozenset({401, 403, 404, 405, 407})
_LONGEST_WAIT_S = 300.0


def error_of_status(status: int, body: bytes, headers: Mapping[str, str]) -> RolloutError:
    said = _error_text(body)
    message = f"HTTP {status}: {said}" if said else f"HTTP {status}"
    if status in _TOO_LONG and _CONTEXT.search(said):
        return RolloutError(FailureKind.CONTEXT_LENGTH, message)
    if status in (429, 503):
        return RolloutError(FailureKind.RATE_LIMIT, message, after_s=retry_after(headers.get("Retry-After")))
    if status == 408:
        return RolloutError(FailureKind.TIMEOUT, message)
    if status >= 500:
        return RolloutError(FailureKind.HTTP_5XX, message)
    if status < 400:
        where = headers.get("Location", "nowhere")
        return RolloutError(FailureKind.HTTP_4XX, f"HTTP {status}: leads to {where}; redirects are not followed", heals=True)
    return RolloutError(FailureKind.HTTP_4XX, message, heals=status in ABOUT_THE_SERVER)


def error_of_exception(error: aiohttp.ClientError | OSError, where: str) -> RolloutError:
    """The failure that an exception of the client means; `where` is the server without secrets."""
    if isinstance(error, aiohttp.ClientResponseError):
        return RolloutError(FailureKind.PARSE, f"{where}: the answer is not HTTP: {error.message}", heals=True)
    words = str(error) or type(error).__name__
    return RolloutError(FailureKind.CONNECTION, f"{where}: {words}")


def retry_after(value: str | None) -> float | None:
    """Seconds that a Retry-After header asks for, at most five minutes; None when it says nothing that can be read."""
    if not value:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(value).timestamp() - time.time()
        except (ValueError, TypeError, OverflowError, OSError):
            return None
    # NaN is not above zero either.
    return min(seconds, _LONGEST_WAIT_S) if seconds > 0 else 0.0


def _error_text(body: bytes) -> str:
    text = body[:_READ].decode("utf-8", "replace")
    try:
        data = parse_json_fast(body)
    except BadValue:
        return " ".join(text[:_READ].split())
    if isinstance(data, dict):
        inner = data.get("error")
        inner = inner if isinstance(inner, dict) else data
        parts = (inner.get("message") or inner.get("detail"), inner.get("code"), inner.get("type"))
        text = " ".join(part for part in parts if isinstance(part, str)) or text
    return " ".join(text[:_READ].split())


MOST_BYTES = 128 << 20
_ASIDE_S = 5.0
_ASK_S = 10.0
_AGAIN_S = 1.0
_SILENT_S = 3.0
"""Of waiting before it is said that and why we wait."""
_HIDDEN = b"[redacted:api-key]"
_VLLM = "vllm"
"""What vLLM calls itself in its listing of models."""


@dataclass(slots=True)
class _Server:
    base: str
    path: str
    shown: str
    open: int = 0
    aside_until: float = 0.0


class OpenAIClient:
    """Asks the servers; made once per collector."""

    def __init__(
        self, urls: Sequence[str], path: str, key: str | None, requests: Requests, progress: Callable[[str], None] = lambda _: None
    ) -> None:
        bases = [url.rstrip("/") for url in urls]
        self._servers = [_Server(base, f"{base}/{path}", _shown(base)) for base in bases]
        self._requests, self._key, self._progress = requests, key, progress
        self._hidden = key.encode() if key and len(key) >= MINIMUM_LENGTH else None  # "EMPTY" is usual for vLLM, and no secret
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
        if self._session:
            await self._session.close()
            self._session = None

    async def post(self, body: bytes) -> bytes:
        """The body of a 200 answer; raises RolloutError for anything else. Deadlines are the caller's."""
        now = time.monotonic()
        server = min(self._servers, key=lambda one: (max(one.aside_until - now, 0.0), one.open))
        server.open += 1
        try:
            async with self._live().post(server.path, data=body, allow_redirects=False) as answer:
                data = self.clean(await _body(answer))
                if answer.status == 200:
                    return data
                error = error_of_status(answer.status, data, answer.headers)
                if answer.status in ABOUT_THE_SERVER:
                    error.args = (f"{error} (POST {server.shown}{server.path.removeprefix(server.base)})",)
                raise self._hide(error)
        except (aiohttp.ClientError, OSError) as error:
            # TimeoutError is an OSError: here it can only be the connection's, the request has no limit of its own.
            server.aside_until = time.monotonic() + _ASIDE_S
            raise self._hide(error_of_exception(error, server.shown)) from error
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
            async with asyncio.timeout(_ASK_S), self._live().get(f"{server.base}/models", allow_redirects=False) as answer:
                data = self.clean(await _body(answer)).decode("utf-8", "replace")
                return answer.status, data if answer.status == 200 else f"answered {answer.status}"
        except TimeoutError:
            return None, f"did not answer within {_ASK_S:g} s"
        except (aiohttp.ClientError, OSError, RolloutError) as error:
            number = error.os_error.errno if isinstance(error, aiohttp.ClientConnectorError) else None
            named = os.strerror(number).lower() if number and number > 0 else ""
            return None, self._without_key(named or str(error) or type(error).__name__)

    def clean(self, data: bytes) -> bytes:
        """What a server sent, without the key, should it repeat it."""
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


def _listed(text: str) -> list[dict[str, Any]]:
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


class PinnedModel(Record):
    """model.json."""

    name: str


async def choose_model(client: OpenAIClient, named: str | None, place: CampaignDir | None) -> str:
    """The model's name, pinned in `place`; a UserError when it cannot be known, is not served, or is not the one before."""
    listed = await client.models()
    before = _pinned(place)
    if named is None and len(listed) != 1:
        found = client.unlisted or (f"the server lists {len(listed)}: {', '.join(listed[:5])}" if listed else "the server lists none")
        fix = "say policy.model"
        if client.unlisted:
            fix = "see that policy.url is the server's base, such as http://host:8000/v1; if it is, say policy.model"
        raise UserError(f"campaign: policy.model is not said, and {found}", fix)
    name = named or listed[0]
    if listed and name not in listed:
        fix = f"serve {name} there, or name its server with policy.url"
        if before is None:
            fix = f"nothing was collected: start anew with --model {listed[0]} (policy.model)"
        raise UserError(f"campaign: policy.model: the server has no {name!r}; it has {', '.join(listed[:5])}", fix)
    if place is not None:
        write_once(place.model, PinnedModel(name=name))
        before = _pinned(place)
    if before is not None and before != name:
        fix = f"serve {before} again, or start a new campaign"
        raise UserError(f"campaign: the server has the model {name!r}, and this campaign began with {before!r}", fix)
    return name


def _pinned(place: CampaignDir | None) -> str | None:
    return read_model(place.model, PinnedModel).name if place is not None and place.model.is_file() else None


AGENT = "seatrial_direct"
_PATHS = {"chat": "chat/completions", "responses": "responses"}


class DirectBackend:
    """Asks an OpenAI-compatible server and verifies; a `Backend`."""

    def __init__(
        self,
        campaign: Campaign,
        urls: Sequence[str],
        verifiers: Mapping[str, Verifier],
        key: str | None,
        *,
        place: CampaignDir | None = None,
        progress: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._api = campaign.policy.api
        self._model = campaign.policy.model
        self._sampling = sort_sampling(campaign.sampling)
        self._datasets = {dataset.name: dataset for dataset in campaign.datasets}
        verifies = {dataset.name: campaign.verifier_of(dataset) for dataset in campaign.datasets}
        self._tests = {name: verify.tests for name, verify in verifies.items() if verify.kind == "code"}
        """Columns with tests, by dataset: like prompts they are not repeated in each rollout."""
        self._verifiers, self._place = verifiers, place
        self._client = OpenAIClient(urls, _PATHS[self._api], key, campaign.requests, progress)

    async def open(self) -> None:
        """Connect, and find the model's name; raises BlockedError when nobody answers, UserError for a wrong key or model."""
        await self._client.open()
        self._model = await choose_model(self._client, self._model, self._place)

    async def roll(self, unit: Unit) -> RolloutOutcome:
        row = unit.row
        dataset = self._datasets[row.dataset]
        own = row.data[PARAMS] if is_gym(row.data, dataset) else {"input": prompt_messages(row.data, dataset)}
        try:
            asked = build_request(own, self._sampling, api=self._api, model=self._model or "", seed=unit.seed, vllm=self._client.is_vllm)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise RolloutError(FailureKind.HTTP_4XX, f"{row.source}: not asked: {type(error).__name__}: {error}") from error
        answer = answers.read(await self._client.post(asked.body), self._api, unit.number)
        kept = {PARAMS: asked.params, "response": answer.response}
        score = await score_answer(self._verifiers[row.dataset], row, answer.text, answer.output, kept)
        left_out = (dataset.prompt, self._tests.get(dataset.name))
        record = {
            **({"tags": [*row.tags]} if row.tags else {}),
            **{key: value for key, value in row.data.items() if key not in left_out},
            **score.fields,
            **kept,
            "reward": score.reward,
            "_ng_task_index": row.index,
            "_ng_rollout_index": unit.repeat,
            "agent_ref": {"name": AGENT},
            "task_id": row.id,
            "dataset": row.dataset,
        }
        tokens = answer.input_tokens, answer.output_tokens
        return RolloutOutcome(record, score.reward, score.answer, *tokens, 1, answer.finish, score.metrics)

    async def alive(self) -> str | None:
        return await self._client.alive()

    async def close(self) -> None:
        await self._client.close()
        await close_verifiers(self._verifiers)
