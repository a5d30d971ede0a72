"""Values of a campaign.toml that are more than their type: what cannot be stored, counted or kept secret is refused when it is said."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, Strict, StringConstraints

from seatrial.evidence.redact import Redactor
from seatrial.model.secret_names import looks_random
from seatrial.rollouts.inputs.reading import unstorable

MOST_REPEATS = 100_000
"""Of a row. They are listed one by one; more are a slip of the keyboard."""
_SHAPES = Redactor({})
_LARGEST_LABEL = (1 << 63) - 1
NUMBERS = frozenset(
    {
        *("temperature", "top_p", "top_k", "min_p", "typical_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
        *("length_penalty", "max_output_tokens", "max_tokens", "max_completion_tokens", "min_tokens", "top_logprobs"),
        *("prompt_logprobs", "truncate_prompt_tokens", "thinking_token_budget", "max_tool_calls", "priority"),
    }
)
"""Of [sampling]: parameters that are numbers on every server that knows them."""


def _without_secrets(url: str) -> str:
    """An address is stored and shown, so it holds no key."""
    parts = urlsplit(url)
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise ValueError("only scheme, host, port and path: the address is stored, a key is named by key_env")
    return url


def secret_in(value: Any, where: str = "", clear: Callable[[Any], Any] = _SHAPES.value) -> str | None:
    """The key below `where` whose value is a secret, "" for the value itself; None where there is none. `clear` takes secrets out."""
    entries = list(value.items()) if isinstance(value, Mapping) else []
    for key, entry in entries:
        inner = f"{where}.{key}" if where else str(key)
        found = secret_in(entry, inner, clear)
        if found is not None or (not isinstance(entry, Mapping) and clear({key: entry}) != {key: entry}):
            return found or inner
    for entry in value if isinstance(value, list | tuple) else ():
        if (found := secret_in(entry, where, clear)) is not None:
            return found
    return where if clear(value) != value else None


def _refuse_secrets(value: Any) -> Any:
    """What stands in a campaign is stored, shown and sent to every shard."""
    if (key := secret_in(value)) is not None:
        raise ValueError(secret_message(key))
    return value


def tokens_in(value: Any) -> str | None:
    """The key whose value holds a token; a prompt may speak of passwords."""
    return secret_in(value, clear=_SHAPES.names)


def secret_message(key: str) -> str:
    """Why a secret is refused; it is not repeated."""
    what = f"{key} holds a secret" if key else "a secret stands here"
    return f"{what}; campaign.toml is stored and shown: export it, and name its variable with policy.key_env"


def _variable(name: str) -> str:
    """A name is stored and shown; a key that was typed in its place is neither."""
    if (
        not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,127}", name)
        or _SHAPES.tokens(name) != name
        or (looks_random(name) and not name.isupper())
    ):
        raise ValueError("the name of a variable is meant, not a key: export the key, and write the name of its variable here")
    return name


def _sayable(sampling: Mapping[str, Any]) -> Mapping[str, Any]:
    """A date of TOML would become a text on its way, and NaN nothing at all; a text for a number fails each request."""
    for key, value in sampling.items():
        if what := unstorable(value):
            raise ValueError(f"{key} holds {what}, which no request can say")
    _refuse_secrets(sampling)
    for key, value in sampling.items():
        if key in NUMBERS and (isinstance(value, bool) or not isinstance(value, int | float | None)):
            raise ValueError(f"{key} = {value!r}: a number is meant")
    return sampling


Label = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,79}$")]
Url = Annotated[str, StringConstraints(pattern=r"^https?://[!-~]+$"), AfterValidator(_without_secrets)]
Variable = Annotated[str, AfterValidator(_variable)]
Arguments = Annotated[tuple[str, ...], AfterValidator(_refuse_secrets)]
"""Words of a command line."""
Whole = Annotated[int, Strict()]
"""A text is no number: `repeats = "4"` is a slip, and would be another key's value as easily."""
Number = Annotated[float, Strict()]
Count = Annotated[Whole, Field(ge=1)]
Seconds = Annotated[Number, Field(ge=1e-3, le=1e9)]
Share = Annotated[Number, Field(ge=0, le=1)]
Repeats = Annotated[Whole, Field(ge=1, le=MOST_REPEATS)]
Sampling = Annotated[Mapping[str, Any], AfterValidator(_sayable)]


def parse_numbers(text: str) -> tuple[int, ...]:
    """`0-3,7` as numbers; a ValueError for anything else, for a number said twice, and for more than anybody means."""
    found: list[int] = []
    for part in text.replace(" ", "").split(","):
        match = re.fullmatch(r"([0-9]{1,20})(?:(?:-|\.\.)([0-9]{1,20}))?", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, -1)
        if last < first or last > _LARGEST_LABEL:
            raise ValueError(f"{part!r} is no number and no range: write 0-3,7")
        if len(found) + last - first >= MOST_REPEATS:
            raise ValueError(f"{text}: more than {MOST_REPEATS} repetitions")
        found += range(first, last + 1)
    if len(set(found)) < len(found):
        raise ValueError(f"{text}: a number is said twice")
    return tuple(found)
