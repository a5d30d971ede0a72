"""What went wrong with a request, as a class of failure: from a status, or from an exception of the client.

- 429 and 503 ask for patience; what the server says in Retry-After is passed on.
- A prompt that does not fit is told by the words of vLLM, SGLang and OpenAI; it can never heal. Where it fills the context to the last
  token, vLLM complains of the nothing that is left for max_tokens.
- 401, 403, 404, 405 and redirects speak of the server's address or key, not of the row: the row is owed again in a later attempt.
- Messages are of bounded length; redaction, and how much of them is stored, is the collector's.
"""

from __future__ import annotations

import email.utils
import re
import time
from collections.abc import Mapping

import aiohttp

from seatrial.model.guarded import BadValue
from seatrial.rollouts.record import FailureKind
from seatrial.rollouts.server_json import parse_json_fast
from seatrial.rollouts.work import RolloutError

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


def of_status(status: int, body: bytes, headers: Mapping[str, str]) -> RolloutError:
    """The failure that an answer other than 200 means."""
    said = _said(body)
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


def of_exception(error: aiohttp.ClientError | OSError, where: str) -> RolloutError:
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


def _said(body: bytes) -> str:
    """The message of an error body, in whatever shape it comes."""
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
