"""What is asked of the policy: the row's prompt with the campaign's sampling, in either interface.

- The campaign's sampling wins over a row's own parameters, as in Gym. The seed is the unit's: repetitions of a row must differ.
- What is recorded is what the Responses interface calls it; parameters that it does not know (top_k, seed) stand in
  `metadata.extra_body`, a JSON text, as Gym writes them. Chat completions get them beside the others, as their servers expect.
- The Responses interface of vLLM takes a seed beside the others and none from metadata. Gym's servers refuse it there.
- The limit of tokens may be called max_output_tokens, max_tokens or max_completion_tokens. A chat server is told the name that
  the campaign used, and `max_tokens` otherwise, which every server knows.
- One turn: tools are passed on, and an answer that calls them is the rollout; nobody executes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import orjson

from seatrial.model.errors import UserError
from seatrial.model.guarded import BadValue
from seatrial.rollouts.direct.chat import chat_body
from seatrial.rollouts.server_json import parse_json_fast
from seatrial.rollouts.units import NO_SEED

_RESPONSES = {
    *("background", "include", "input", "instructions", "max_output_tokens", "max_tool_calls", "metadata", "model"),
    *("parallel_tool_calls", "previous_response_id", "prompt", "reasoning", "service_tier", "store", "stream", "temperature"),
    *("text", "tool_choice", "tools", "top_logprobs", "top_p", "truncation", "user"),
}
PARAMETERS = frozenset(
    {
        *_RESPONSES,
        *("stop", "stop_token_ids", "logprobs", "ignore_eos", "skip_special_tokens", "include_stop_str_in_output", "bad_words"),
        *("logit_bias", "reasoning_effort", "response_format", "chat_template_kwargs", "guided_json", "guided_regex", "guided_choice"),
        *("structured_outputs", "allowed_token_ids", "return_token_ids", "add_generation_prompt", "spaces_between_special_tokens"),
    }
)
"""What servers are known to take, besides numbers; any other is passed on as well."""
_LIMITS = ("max_output_tokens", "max_tokens", "max_completion_tokens")
_REFUSED = {
    "model": "say policy.model",
    "input": "prompts come from the datasets",
    "messages": "prompts come from the datasets",
    "seed": "say work.seed: each unit has a seed of its own",
    "n": "say work.repeats: each rollout is a request of its own",
    "stream": "answers are read whole",
}


@dataclass(frozen=True, slots=True)
class Asked:
    """A request, and how it is recorded."""

    body: bytes
    params: dict[str, Any]
    """responses_create_params of the row that is stored."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """The campaign's parameters, sorted once for all requests."""

    known: dict[str, Any] = field(default_factory=dict)
    """Parameters of the Responses interface."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Those that only some servers know."""
    limit: str = "max_tokens"
    """What a chat server is told for max_output_tokens."""


def sort_sampling(sampling: Mapping[str, Any]) -> Sampling:
    """Sort [sampling]; a UserError names a key that cannot stand there."""
    for key, fix in _REFUSED.items():
        if key in sampling:
            raise UserError(f"campaign: sampling.{key} cannot be said", fix)
    said = [name for name in _LIMITS if sampling.get(name) is not None]
    if len(said) > 1:
        raise UserError(f"campaign: sampling.{said[0]} and sampling.{said[1]} are the same thing", "keep one of them")
    if said and not (type(limit := sampling[said[0]]) is int and limit >= 1):
        raise UserError(f"campaign: sampling.{said[0]} is {limit!r}", "say a whole number of tokens, at least 1")
    known = {key: value for key, value in sampling.items() if key in _RESPONSES and value is not None}
    if said:
        known["max_output_tokens"] = sampling[said[0]]
    extra = {key: value for key, value in sampling.items() if key not in _RESPONSES and key not in _LIMITS and value is not None}
    return Sampling(known, extra, said[0] if said and said[0] != "max_output_tokens" else "max_tokens")


def build(
    own: Mapping[str, Any],
    sampling: Sampling,
    *,
    api: Literal["chat", "responses"],
    model: str,
    seed: int,
    vllm: bool = False,
) -> Asked:
    """The request for a row whose own parameters, `input` among them, are `own`; `vllm`: the server is one. A ValueError says what
    cannot be asked."""
    params = {key: value for key, value in own.items() if value is not None and key not in ("stream", "model")} | sampling.known
    metadata = params.pop("metadata", None) or {}
    if not isinstance(metadata, Mapping):
        raise ValueError("responses_create_params.metadata is no object")
    extra = _loads(metadata, "extra_body") | sampling.extra
    if seed != NO_SEED:
        extra["seed"] = seed
    if api == "chat":
        template = _loads(metadata, "chat_template_kwargs")
        asked = chat_body(params, limit=sampling.limit)
        asked.update((key, value) for key, value in extra.items() if key not in asked)
        if template:
            asked["chat_template_kwargs"] = {**(asked.get("chat_template_kwargs") or {}), **template}
    else:
        asked = {**params, **{key: value for key, value in extra.items() if vllm or key != "seed"}}
    if extra:
        metadata = {**metadata, "extra_body": orjson.dumps(extra).decode()}
    if metadata:
        params["metadata"] = metadata
        if api == "responses":
            asked["metadata"] = metadata
    asked["model"] = model
    return Asked(orjson.dumps(asked), params)


def _loads(metadata: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Gym keeps objects in metadata as JSON texts."""
    text = metadata.get(key)
    if not text:
        return {}
    try:
        value = parse_json_fast(text) if isinstance(text, str) else text
    except BadValue as error:
        raise ValueError(f"responses_create_params.metadata.{key} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"responses_create_params.metadata.{key} is no object")
    return value
