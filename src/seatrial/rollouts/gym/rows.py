"""Rows as Gym's own collector sends and writes them (nemo_gym/rollout_collection.py), and what a record's head takes from them.

- What is sent: the user's row with its parameters, the seed as `num_repeats_add_seed` says it, and our global indices.
- What is written: the agent's answer with indices and agent_ref, in Gym's order.
- An agent may say itself that a rollout failed (`_ng_failure_class`, `_ng_failure_terminal`), or that it must leave no trace
  (`_ng_no_persist`: killed from outside, so owed again): these are failures here, never rewards.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from seatrial.model.guarded import parse_json
from seatrial.rollouts.campaign import Campaign
from seatrial.rollouts.direct.answer import count_of
from seatrial.rollouts.direct.request import Sampling
from seatrial.rollouts.inputs.prompts import PARAMS, expected, prompt_messages
from seatrial.rollouts.record import FailureKind
from seatrial.rollouts.units import NO_SEED
from seatrial.rollouts.work import Outcome, RolloutError, Unit

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
        raise RolloutError(FailureKind.AGENT, f"the agent was ended from outside: {_said(result)}", heals=True)
    if result.get(_CLASS) is not None:
        raise RolloutError(FailureKind.AGENT, f"the agent failed: {_said(result)}", heals=not result.get(_TERMINAL), row=result)
    return result


def outcome_of(result: Mapping[str, Any]) -> Outcome:
    """The outcome of a row that `result_of`, or Gym's collector, made."""
    reward = result.get("reward")
    if isinstance(reward, bool) or not isinstance(reward, int | float) or not math.isfinite(reward):
        raise RolloutError(FailureKind.REWARD, f"the resources server gave the reward {reward!r}, which is no finite number", row=result)
    response = result.get("response")
    response = response if isinstance(response, dict) else {}
    usage = response["usage"] if isinstance(response.get("usage"), dict) else {}
    output = response.get("output")
    items = [item for item in output if isinstance(item, dict)] if isinstance(output, list) else []
    return Outcome(
        result,
        float(reward),
        _answer(result),
        count_of(usage.get("input_tokens")),
        count_of(usage.get("output_tokens")),
        sum(item.get("type") == "message" and item.get("role") == "assistant" for item in items),
        _finish(response),
        {key: float(value) for key, value in result.items() if _is_metric(key, value)},
    )


def _answer(result: Mapping[str, Any]) -> str | None:
    found = next((result[key] for key in _ANSWERS if result.get(key) is not None), None)
    return found if found is None or isinstance(found, str) else json.dumps(found)


def _finish(response: Mapping[str, Any]) -> str:
    """As the direct backend says it: a response that reached its limit of tokens ended for its length."""
    details = response.get("incomplete_details")
    reason = details.get("reason") if isinstance(details, dict) else None
    return "length" if reason == "max_output_tokens" else str(reason or "stop")


def _is_metric(key: str, value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and key != "reward" and not key.startswith("_")


def _said(result: Mapping[str, Any]) -> str:
    """Class and message of an agent's own failure."""
    words = [result.get(_CLASS), *(result.get(key) for key in ("_ng_failure_message", "error", "message"))]
    return " ".join(word for word in words if isinstance(word, str))[:500] or "it does not say why"
