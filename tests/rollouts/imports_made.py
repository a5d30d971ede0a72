"""Rollouts as NeMo Gym and NeMo-Skills write them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.rollouts.inputs_made import gym, jsonl

KEYS = [(task, rollout) for task in (0, 1, 2) for rollout in (0, 1)]


def materialized(task: int, rollout: int, agent: str = "solver", **more: Any) -> dict[str, Any]:
    """A row of Gym's materialized inputs."""
    row = gym(task, agent_ref={"name": agent}, _ng_task_index=task, _ng_rollout_index=rollout, **more)
    row["responses_create_params"]["metadata"] = {"extra_body": f'{{"seed": {rollout}}}'}
    return row


def rollout(task: int, number: int, agent: str = "solver", *, reward: Any = 1.0, **more: Any) -> dict[str, Any]:
    """A row of Gym's rollouts."""
    asked = materialized(task, number, agent)
    asked["responses_create_params"] |= {"temperature": None, "tools": []}
    message = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "A"}]}
    usage = {"input_tokens": 10 + task, "output_tokens": 20, "total_tokens": 30 + task}
    answered = {"id": f"resp_{task}_{number}", "object": "response", "status": "completed", "output": [message], "usage": usage}
    return {**asked, "response": answered, "reward": reward, "extracted_answer": "A", "steps": 3, **more}


def skills(line: int, *, correct: bool = True, **more: Any) -> dict[str, Any]:
    """A row of Skills."""
    return {
        "problem": f"Problem {line}",
        "expected_answer": str(line),
        "generation": f"It is {line if correct else 'no idea'}.",
        "predicted_answer": str(line) if correct else None,
        "symbolic_correct": correct,
        "num_generated_tokens": 7,
        **more,
    }


def gym_files(folder: Path, **rewards: float) -> tuple[Path, Path]:
    """Rollouts and materialized inputs of KEYS; `t1_0=0.5` is the reward of task 1, rollout 0."""
    rows = [rollout(task, number, reward=rewards.get(f"t{task}_{number}", 1.0)) for task, number in reversed(KEYS)]
    return jsonl(folder / "out.jsonl", rows), jsonl(folder / "out_materialized_inputs.jsonl", [materialized(*key) for key in KEYS])
