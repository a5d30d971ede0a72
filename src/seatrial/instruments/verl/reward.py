"""The reward: the share of characters with an even code. verl loads this file as `reward.custom_reward_function`.

It is dense and every vocabulary has such characters, so rewards vary within a group from the first step. Each call
leaves a fact: a rollout that was lost before or in the reward is missing among them.
"""

from __future__ import annotations

import os
import zlib
from typing import Any

from seatrial.instruments import facts
from seatrial.instruments.verl import verl_process


def even_share(text: str) -> float:
    """Share of even characters; an empty answer earns 0."""
    return sum(ord(mark) % 2 == 0 for mark in text) / len(text) if text else 0.0


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **_: Any) -> float:
    """The reward of one completion."""
    fault = verl_process.current_fault()
    if fault == "reward-raises" and zlib.crc32(ground_truth.encode()) % 3 == 0:
        raise RuntimeError("reward backend unavailable")
    score = 0.5 if fault == "constant-reward" else even_share(solution_str)
    if data_source == "train":
        verl_process.rewarded(int((extra_info or {}).get("index", -1)), solution_str, score)
    facts.append(os.environ["SEATRIAL_FACTS"], {"fact": "reward", "split": data_source, "score": score})
    return score
