"""What a rollout of Gym or Skills says: the task it belongs to, and the head of its record.

- The reward is `reward`, else the first of is_correct, symbolic_correct, judge_correct that the first row has; all rows must have the
  same one. A row without it is a fault, unless it says itself that it failed (`_ng_failure_class`, or `error`): then it is a failure.
- The task is the input row. Where only the rollout is there, it is what a rollout keeps of it: of Gym the request without defaults and
  seed, the expected answer and the agent (all else may be the verifier's); of Skills all columns but those that generation adds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from seatrial.model.guarded import BadValue, parse_json
from seatrial.rollouts.inputs.ids import canonical, content_of
from seatrial.rollouts.inputs.prompts import PARAMS
from seatrial.rollouts.inputs.reading import BadRowError
from seatrial.rollouts.inputs.rows import TASK_INDEX
from seatrial.rollouts.record import FailureKind, Head
from seatrial.rollouts.units import NO_SEED

REWARDS = ("reward", "is_correct", "symbolic_correct", "judge_correct")
_PROBLEM = ("id", "problem", "question", "prompt", "expected_answer")
_ANSWERS = ("extracted_answer", "predicted_answer")
_GENERATED = frozenset(
    {
        *("generation", "predicted_answer", "judgement", "num_generated_tokens", "num_input_tokens", "finish_reason", "error", "logprobs"),
        *("generation_start_time", "generation_end_time", "generation_time", "reasoning_content", "serialized_output", "tokens"),
        *("_full_generation", "_async_position", "reward_model_score", "code_execution", "num_code_executions", *REWARDS),
    }
)


def agent_of(data: Mapping[str, Any]) -> str | None:
    """Gym: who rolled it out."""
    reference = data.get("agent_ref")
    name = reference.get("name") if isinstance(reference, Mapping) else None
    if not isinstance(name, str | None):
        raise BadRowError('agent_ref is not {"name": "…"}')
    return name


def task_row(data: Mapping[str, Any], *, is_input: bool) -> dict[str, Any]:
    """The input row of a materialized one (`is_input`), or of a rollout."""
    if PARAMS not in data:
        return {key: value for key, value in data.items() if key not in _GENERATED and not key.startswith("_ng_")}
    if is_input:
        kept = {key: value for key, value in data.items() if not key.startswith("_ng_")}
    else:
        kept = {key: data[key] for key in ("expected_answer", "agent_ref") if key in data}
    return {PARAMS: _without_seed(data[PARAMS]), **{key: value for key, value in kept.items() if key != PARAMS}}


def _without_seed(params: Any) -> Any:
    """A request without what is unsaid in it, and without the seed of one repetition."""
    if not isinstance(params, Mapping):
        raise BadRowError(f"{PARAMS} is not an object")
    said = {key: value for key, value in params.items() if value is not None}
    metadata = said.get("metadata")
    if isinstance(metadata, Mapping) and isinstance(metadata.get("extra_body"), str):
        try:
            extra = parse_json(metadata["extra_body"])
        except BadValue:
            return said
        if isinstance(extra, dict) and "seed" in extra:
            del extra["seed"]
            others = {key: value for key, value in metadata.items() if key != "extra_body"}
            said["metadata"] = {**others, **({"extra_body": json.dumps(extra)} if extra else {})}
            if not said["metadata"]:
                del said["metadata"]
    return said


def fingerprint(data: Mapping[str, Any]) -> str | None:
    """What tells two problems apart, of a row that Skills aligns by its line; None for one that carries its key."""
    if TASK_INDEX in data:
        return None
    said = {key: data[key] for key in _PROBLEM if key in data}
    return content_of(canonical(said)) if said else None


def reward_key_of(data: Mapping[str, Any]) -> str | None:
    """Which column of a row is its reward."""
    return next((key for key in REWARDS if data.get(key) is not None), None)


def head(data: Mapping[str, Any], reward_key: str | None, *, unit: int, task: str, repeat: int) -> Head:
    """The head of a rollout's record. Raises BadRowError for a row that has no reward and does not say that it failed."""
    reward = None if reward_key is None else data.get(reward_key)
    failure = data.get("_ng_failure_class") or (data.get("error") if reward is None else None)
    if failure:
        message = f"{failure}: {data['error']}" if data.get("error") not in (None, failure) else str(failure)
        return Head(unit, task, repeat, NO_SEED, "failed", kind=FailureKind.AGENT, final=True, message=message[:500])
    if not isinstance(reward, int | float):
        said = f"no reward: {reward_key or ', '.join(REWARDS)} {'is no number' if reward is not None else 'is missing'}"
        raise BadRowError(said, _say_reward(data, reward_key))
    if not math.isfinite(reward):
        raise BadRowError(f"{reward_key} is {reward}")
    given, made, finish, turns = _response(data)
    answer = next((data[key] for key in _ANSWERS if data.get(key) is not None), None)
    return Head(
        unit=unit,
        task=task,
        repeat=repeat,
        seed=NO_SEED,
        outcome="ok",
        reward=float(reward),
        answer=None if answer is None else str(answer),
        input_tokens=given,
        output_tokens=made,
        finish=finish,
        turns=turns,
        metrics={key: float(value) for key, value in data.items() if _is_metric(key, value, reward_key)},
    )


def _say_reward(data: Mapping[str, Any], reward_key: str | None) -> str:
    """What to do about a missing reward, with the columns that may be meant."""
    numbers = [key for key, value in data.items() if _is_metric(key, value, reward_key)]
    there = f" (numbers stand in {', '.join(numbers[:10])})" if numbers else ""
    return f"name the column that is the reward: --reward COLUMN{there}, or import the other lines with --partial"


def _is_metric(key: str, value: Any, reward_key: str | None) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and key != reward_key and not key.startswith("_ng_")


def _response(data: Mapping[str, Any]) -> tuple[int | None, int | None, str | None, int | None]:
    """Tokens in and out, finish reason and turns: of Gym from the response, of Skills from its columns."""
    response = data.get("response")
    if not isinstance(response, Mapping):
        said = data.get("finish_reason")
        made = _count(data.get("num_generated_tokens"))
        return _count(data.get("num_input_tokens")), made, said if isinstance(said, str) else None, None
    usage, reason = _table(response.get("usage")), _table(response.get("incomplete_details")).get("reason")
    finish = "length" if reason == "max_output_tokens" else reason or ("stop" if response.get("status") == "completed" else None)
    return _count(usage.get("input_tokens")), _count(usage.get("output_tokens")), finish, _turns(response.get("output"))


def _table(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _turns(output: Any) -> int:
    """Answers of the model: runs of its items between those that others gave it."""
    items = [_table(item) for item in output] if isinstance(output, list) else []
    own = [item.get("type") != "function_call_output" and item.get("role") != "user" for item in items]
    return sum(mine and not before for mine, before in zip(own, [False, *own], strict=False))
