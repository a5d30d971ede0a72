"""verl's replay buffer, watched and put in a fixed order (`trainer.v1.sampler.custom_sampler`).

- Trajectories arrive in the order in which they happen to finish, under random names; sorted by their tokens, the same
  rollouts give the same batch, so that two runs can be compared bit for bit.
- A rollout that failed is padded over by verl; how many were asked for and how many came is written down here.
"""

from __future__ import annotations

import os
from typing import Any

import transfer_queue
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

from seatrial.instruments import facts
from seatrial.instruments.bits import fingerprint


class Sampler(ReplayBuffer):  # type: ignore[misc]
    """The buffer of the synchronous trainer; `sampler_kwargs` say how many trajectories a prompt has, by partition."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # verl looks every two seconds, which would be most of the time of a step.
        super().__init__(*args, **{**kwargs, "poll_interval": 0.1})

    def _materialize_batch(self, partition_id: str, selected_prompt_uids: list[str], partition_snapshot: dict[str, Any]) -> Any:
        steps = [self.prompt_global_steps[partition_id][uid] for uid in selected_prompt_uids]
        batch = super()._materialize_batch(partition_id, selected_prompt_uids, partition_snapshot)
        row = {"fact": "rollouts", "split": partition_id, "step": max(steps), "prompts": len(selected_prompt_uids)}
        row["failed"] = sum(uid in self.failure_keys[partition_id] for uid in selected_prompt_uids)
        row["expected"] = len(selected_prompt_uids) * int(self.sampler_kwargs[partition_id])
        row["trajectories"] = len(batch.keys)
        if batch.keys:
            data = transfer_queue.kv_batch_get(keys=batch.keys, partition_id=partition_id, select_fields=["prompts", "responses"])
            questions, answers = ([tuple(part.tolist()) for part in data[name]] for name in ("prompts", "responses"))
            order = sorted(range(len(questions)), key=lambda place: (questions[place], answers[place]))
            batch.reorder(order)
            row["asked"] = fingerprint.digest(fingerprint.state([questions[place] for place in order]))
            row["answered"] = fingerprint.digest(fingerprint.state([answers[place] for place in order]))
        facts.append(os.environ["SEATRIAL_FACTS"], row)
        return batch
