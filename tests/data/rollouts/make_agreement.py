"""Makes agreement.json: the same rollouts through NeMo Gym's own code and Skills' own code.

    GYM/bin/python tests/data/rollouts/make_agreement.py SKILLS/nemo_skills/evaluation/metrics/base.py > tests/data/rollouts/agreement.json

GYM is an environment with nemo-gym 0.4.0 (it has numpy too); base.py is Skills' file, which imports nothing else of Skills.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import random
import sys
from typing import Any

Rollout = dict[str, Any]


def rollouts(seed: int, tasks: int, repeats: int, rewards: tuple[float, ...]) -> list[list[Rollout]]:
    """Tasks of different difficulty; one answer in eight is missing, wrong answers tie often."""
    source = random.Random(seed)
    made = []
    for task in range(tasks):
        skill = source.random()
        row: list[Rollout] = []
        for _ in range(repeats):
            right = source.random() < skill
            reward = rewards[-1] if right else source.choice(rewards[:-1])
            answer = None if source.random() < 0.125 else "right" if right else source.choice(["wrong", "worse"])
            tokens = source.randrange(20, 900)
            row.append({"task": task, "repeat": len(row), "reward": reward, "answer": answer, "output_tokens": tokens})
        made.append(row)
    return made


def of_gym(module: Any, tasks: list[list[Rollout]], expected: int) -> dict[str, Any]:
    """Its per-task profile, its agent's line, and pass@k and majority@k."""
    inputs = [
        {"_ng_task_index": task, "_ng_rollout_index": repeat, "agent_ref": {"name": "a"}}
        for task in range(len(tasks))
        for repeat in range(expected)
    ]
    results = [
        {
            "_ng_task_index": r["task"],
            "_ng_rollout_index": r["repeat"],
            "reward": r["reward"],
            "response": {"usage": {"output_tokens": r["output_tokens"]}},
        }
        for row in tasks
        for r in row
    ]
    profiler = module.RewardProfiler()
    groups, agents = profiler.profile_from_data(inputs, results, allow_partial_rollouts=True)
    metrics = module.compute_pass_majority_metrics([row for row in tasks if row], answer_key="answer")
    module.add_avg_sample_std_dev(*metrics)
    kept = [
        {key: value for key, value in group.items() if key not in ("sample", "rollout_infos")}
        for group in profiler.prepare_for_serialization(groups)
    ]
    return {"tasks": kept, "agent": profiler.prepare_for_serialization(agents)[0], "metrics": metrics[0]}


def of_skills(module: Any, tasks: list[list[Rollout]]) -> dict[str, Any]:
    """Its metrics of one score; only where every task has as many rollouts."""

    class Metrics(module.BaseMetrics):  # type: ignore[misc]
        def _get_score_dict(self, prediction: Rollout) -> dict[str, float]:
            return {"accuracy": prediction["reward"]}

        def update(self, predictions: list[Rollout]) -> None:
            super().update(predictions)
            answers = [prediction["answer"] for prediction in predictions]
            self._compute_pass_at_k(predictions, answers)
            self._compute_majority_at_k(predictions, answers)

    counted = Metrics()
    for row in tasks:
        counted.update(row)
    found: dict[str, Any] = counted.get_metrics()
    return found


def main() -> None:
    gym = importlib.import_module("nemo_gym.reward_profile")
    spec = importlib.util.spec_from_file_location("skills_base", sys.argv[1])
    assert spec is not None
    assert spec.loader is not None
    skills = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(skills)
    cases: dict[str, Any] = {}
    for name, tasks in {
        "binary": rollouts(1, 12, 6, (0.0, 1.0)),
        "graded": rollouts(2, 6, 4, (0.0, 0.25, 0.5, 1.0)),
        "single": rollouts(3, 5, 1, (0.0, 1.0)),
    }.items():
        cases[name] = {
            "repeats": len(tasks[0]),
            "rollouts": tasks,
            "gym": of_gym(gym, tasks, len(tasks[0])),
            "skills": of_skills(skills, tasks),
        }
    partial = [[r for r in row if (3 * r["task"] + r["repeat"]) % 4] for row in rollouts(4, 7, 4, (0.0, 1.0))]
    partial[5] = []
    cases["partial"] = {"repeats": 4, "rollouts": partial, "gym": of_gym(gym, partial, 4)}
    command = "GYM/bin/python tests/data/rollouts/make_agreement.py SKILLS/nemo_skills/evaluation/metrics/base.py"
    made = {"command": command, "gym": "nemo-gym 0.4.0", "skills": "NVIDIA-NeMo/Skills 8b18f399", "cases": cases}
    sys.stdout.write(json.dumps(made, default=float, indent=None, separators=(",", ":")).replace('},{"task"', '},\n{"task"') + "\n")


if __name__ == "__main__":
    main()
