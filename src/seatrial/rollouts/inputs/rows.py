"""What a row must have, and its agent and tags. Everything that would fail for certain later is refused here, as a BadRowError."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from seatrial.rollouts.campaign import Campaign, Dataset
from seatrial.rollouts.inputs.prompts import PARAMS, expected, is_gym
from seatrial.rollouts.inputs.reading import BadRowError
from seatrial.rollouts.verify.cases import column as column_of
from seatrial.rollouts.verify.choice import why_no_choice

TASK_INDEX, ROLLOUT_INDEX = "_ng_task_index", "_ng_rollout_index"
_KEYS = {
    *("background", "include", "input", "instructions", "max_output_tokens", "max_tool_calls", "metadata", "model"),
    *("parallel_tool_calls", "previous_response_id", "prompt", "reasoning", "service_tier", "store", "stream", "temperature"),
    *("text", "tool_choice", "tools", "top_logprobs", "top_p", "truncation", "user"),
}
"""Of the Responses API, as NeMo Gym 0.4.0 takes them (NeMoGymResponseCreateParamsNonStreaming); it forbids all others."""
_HINTS = {
    "seed": "say work.seed: each rollout gets its own",
    "max_tokens": "the Responses API calls it max_output_tokens",
    "messages": "the Responses API calls it input",
}

_LIKELY = {
    "prompt": ("problem", "question", "instruction", "query", "input", "text"),
    "answer": ("expected_answer", "answer", "solution", "gold", "target", "label", "ground_truth", "correct_answer"),
}
"""How others call these columns."""


def agent_of(data: Mapping[str, Any], dataset: Dataset, campaign: Campaign) -> str | None:
    """Who rolls a row out: the row's own agent_ref, else the dataset's agent, else the campaign's; Gym needs one."""
    reference = data.get("agent_ref")
    if reference is not None:
        name = reference.get("name") if isinstance(reference, Mapping) else None
        if not isinstance(name, str) or not name:
            raise BadRowError('agent_ref is not {"name": "…"}')
        return name
    name = dataset.agent or (campaign.gym.agent if campaign.gym else None)
    if campaign.gym and name is None:
        message = "no agent: the row has no agent_ref, the dataset no agent, and gym.agent is not said"
        raise BadRowError(message, "say gym.agent, or agent of the dataset in [[datasets]]")
    return name


def tags_of(data: Mapping[str, Any], dataset: Dataset) -> tuple[str, ...]:
    """The dataset's tags, and `column=value` for each of its tag columns; a list gives several, None gives none."""
    tags = list(dataset.tags)
    for column in dataset.tag_columns:
        value = data.get(column)
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, str | int | float):
                tags.append(f"{column}={item}")
            elif item is not None:
                raise BadRowError(f"tag column {column!r} holds a {type(item).__name__}")
    return tuple(dict.fromkeys(tags))


def check(data: Mapping[str, Any], dataset: Dataset, campaign: Campaign) -> None:
    """See that a row can be asked and scored."""
    if is_gym(data, dataset):
        _check_params(data, dataset)
    else:
        _check_prompt(data, dataset)
    if dataset.answer is not None and data.get(dataset.answer) is None:
        raise BadRowError(f"no answer: the column {dataset.answer!r} is missing or empty{_there_are(data)}", _say("answer", data))
    if campaign.gym:
        return
    verify = campaign.verifier_of(dataset)
    if verify.kind in ("exact", "choice", "math") and expected(data, dataset) is None:
        message = f"no answer: the verifier {verify.kind} needs a column expected_answer or answer, or the dataset's key answer"
        raise BadRowError(message, _say("answer", data))
    if verify.kind == "choice" and (why := why_no_choice(data, expected(data, dataset))):
        raise BadRowError(why)
    if verify.kind == "code" and not _has(data, verify.tests):
        fix = 'say tests = "COLUMN" of a [verifiers.NAME] with kind = "code", or correct these rows'
        raise BadRowError(f"no tests: the verifier code needs the column {verify.tests!r}{_there_are(data)}", fix)


def _check_params(data: Mapping[str, Any], dataset: Dataset) -> None:
    params = data.get(PARAMS)
    if not isinstance(params, Mapping):
        raise BadRowError(f"no {PARAMS}" if params is None else f"{PARAMS} is not an object")
    if unknown := sorted(params.keys() - _KEYS):
        hint = next((f" ({_HINTS[key]})" for key in unknown if key in _HINTS), "")
        raise BadRowError(f"{PARAMS} has keys that the Responses API does not have: {', '.join(unknown)}{hint}")
    if params.get("stream"):
        raise BadRowError(f"{PARAMS}.stream: answers are taken whole, not as a stream")
    if not isinstance(params.get("metadata") or {}, Mapping):
        raise BadRowError(f"{PARAMS}.metadata is not an object")
    if dataset.system is not None:
        raise BadRowError("the dataset's system message is for plain rows: this one has its own input")
    _check_messages(f"{PARAMS}.input", params.get("input"), need_role=False)


def _check_prompt(data: Mapping[str, Any], dataset: Dataset) -> None:
    if PARAMS in data:
        raise BadRowError(f'it has {PARAMS}, so it is Gym\'s: the dataset says format = "plain"')
    if dataset.prompt not in data:
        neither = f"neither {PARAMS} nor" if dataset.format == "auto" else "no"
        raise BadRowError(f"{neither} a column {dataset.prompt!r}{_there_are(data)}", _say("prompt", data))
    _check_messages(f"column {dataset.prompt!r}", data[dataset.prompt], need_role=True)


def _has(data: Mapping[str, Any], name: str) -> bool:
    """Whether the verifier of code will find its tests, in a column or deeper."""
    try:
        return column_of(data, name) is not None
    except ValueError:
        return False


def _there_are(data: Mapping[str, Any]) -> str:
    return f"; there are: {', '.join(list(data)[:10]) or 'none'}"


def _say(key: str, data: Mapping[str, Any]) -> str:
    """What to do when a column has another name than we look for."""
    likely = next((name for name in _LIKELY[key] if data.get(name) is not None), "COLUMN")
    return f'say which column holds the {key}: {key} = "{likely}" of [[datasets]] (--{key} {likely} with --input), or correct these rows'


def _check_messages(where: str, value: Any, *, need_role: bool) -> None:
    """A text or a list of messages, and not an empty one; Gym's input may hold items without a role, such as tool results."""
    if isinstance(value, str) and value.strip():
        return
    if not isinstance(value, list) or not value:
        empty = value in ([], None) or isinstance(value, str)
        raise BadRowError(f"{where} is {'empty' if empty else 'no text and no list of messages'}")
    for number, item in enumerate(value):
        if not isinstance(item, Mapping) or (need_role and not {"role", "content"} <= item.keys()):
            raise BadRowError(f"{where}[{number}] is no message with role and content")
