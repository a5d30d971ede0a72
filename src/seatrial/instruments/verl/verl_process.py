"""A process of verl: what it is, the fault that acts in it, its part of the batch record, the reward, and the check of its imports.

By command line and environment; standard library only. verl loads this file as `reward.custom_reward_function`.

    python -m seatrial.instruments.verl.verl_process SHIM PACKAGE...

imports packages once, with what makes them run on a CPU, and prints a line with MARK and a JSON object: empty when all could be imported;
otherwise `package`, `missing` (a module's name), `said` and `core`, the version of the installed Megatron-Core. Whatever else is raised
is left to the caller, as the traceback that it is.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import sys
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from seatrial.instruments import facts
from seatrial.instruments.facts import LoopFault


def process_kind(command: Sequence[str]) -> str:
    """`driver`, `worker` or `child`. The wrapper's own question for the device (`python3 -`) and spawned children are no drivers: were they
    taken for one, the real driver could be missing without anybody noticing."""
    if any(word.endswith("default_worker.py") for word in command):
        return "worker"
    return "driver" if main_module(command).startswith(("verl.", "seatrial.")) else "child"


def main_module(command: Sequence[str]) -> str:
    """The module that `python -m` runs, or nothing."""
    words = list(command)
    return words[words.index("-m") + 1] if "-m" in words[:-1] else ""


def current_fault() -> str:
    return os.environ.get("SEATRIAL_FAULT", "")


def before_step(engine: Any) -> None:
    if current_fault() == "frozen" and engine.role == "actor":
        for group in (group for optimizer in engine.optimizers() for group in optimizer.param_groups):
            group["lr"] = 0.0


def after_load(engine: Any) -> None:
    if current_fault() == "fresh-optimizer" and engine.optimizer is not None:
        for optimizer in engine.optimizers():
            optimizer.state.clear()


EVERY = (0, 1, 5)
FAULTS: dict[str, LoopFault] = {
    "stale-generator": LoopFault("the generation server keeps its first weights: every later sync is dropped", EVERY),
    "frozen": LoopFault("the actor's optimizer steps with a learning rate of 0, whatever is logged", EVERY),
    "reward-raises": LoopFault("the reward function raises for every third prompt, and the loop swallows it", EVERY),
    "constant-reward": LoopFault("every completion earns 0.5: no advantage anywhere", EVERY),
    "fresh-optimizer": LoopFault("the checkpoint's optimizer state is not restored", (1,)),
}


RECORD_VARIABLE = "SEATRIAL_RECORD"
"""Names the directory of the parts; without it nothing is recorded."""
PARTS = "parts"
REWARDS = "rewards.jsonl"


def record_directory() -> Path | None:
    """Where the parts go; None when nothing is recorded."""
    place = os.environ.get(RECORD_VARIABLE)
    return Path(place) if place else None


def rewarded(row: int, text: str, reward: float) -> None:
    place = record_directory()
    if place is not None:
        place.mkdir(parents=True, exist_ok=True)
        facts.append(place / REWARDS, {"row": row, "text": text, "reward": reward})


def even_share(text: str) -> float:
    """Share of characters with an even code; an empty answer earns 0. Every vocabulary has some, so rewards vary from the first step."""
    return sum(ord(mark) % 2 == 0 for mark in text) / len(text) if text else 0.0


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **_: Any) -> float:
    """The reward of one completion. Each call leaves a fact: a rollout that was lost before or in the reward is missing among them."""
    fault = current_fault()
    if fault == "reward-raises" and zlib.crc32(ground_truth.encode()) % 3 == 0:
        raise RuntimeError("reward backend unavailable")
    score = 0.5 if fault == "constant-reward" else even_share(solution_str)
    if data_source == "train":
        rewarded(int((extra_info or {}).get("index", -1)), solution_str, score)
    facts.append(os.environ["SEATRIAL_FACTS"], {"fact": "reward", "split": data_source, "score": score})
    return score


MARK = "seatrial imports: "


def check_imports(shim: str, packages: list[str]) -> dict[str, str]:
    """The first package that needs a module which is not there, or nothing."""
    importlib.import_module(f"seatrial.instruments.verl.{shim}")
    for package in packages:
        try:
            importlib.import_module(package)
        except ImportError as error:
            return {"package": package, "missing": error.name or "", "said": str(error), "core": _core()}
    return {}


def _core() -> str:
    try:
        return importlib.metadata.version("megatron-core")
    except importlib.metadata.PackageNotFoundError:
        return ""


if __name__ == "__main__":
    print("\n" + MARK + json.dumps(check_imports(sys.argv[1], sys.argv[2:])))
