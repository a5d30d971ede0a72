"""The runs that the closed loop is held against: one whose generator is never refitted, and one whose learning rate is zero.

Both use the generator of the real run, so nothing but the one thing differs. They measure; what they show is judged outside.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from seatrial.probes import fingerprint
from seatrial.probes.bridge.policy_model import MegatronPolicy
from seatrial.probes.bridge.rank import Rank
from seatrial.probes.engines.transformers_loop import LENGTH, WIDTH, Loop
from seatrial.probes.refit import mismatch

OTHER_SEEDS = 1000
"""Samples of a control are drawn from other seeds than those of the real run: the two are compared as independent samples."""


def train(loop: Loop, first: int, steps: int) -> None:
    """Sample, step, refit, so many times; the first step has the number `first`."""
    for step in range(first, first + steps):
        loop.sample(step)
        assert loop.completions is not None
        loop.policy.step(loop.completions)
        loop.refit(step)


def no_refit(rank: Rank, loop: Loop, policy: MegatronPolicy, steps: int) -> None:
    """A policy that learns from a generator that keeps the weights it has: the base."""
    before = loop.remote.ask("state")["hashes"]
    gaps = []
    for step in range(1, steps + 1):
        done = loop.remote.ask("sample", policy.prompts, LENGTH, OTHER_SEEDS + step)["tokens"]
        policy.step(done)
        theirs = loop.remote.ask("logprobs", policy.rows(done), WIDTH)
        gap = mismatch.token_mult_prob_error(theirs, policy.logprobs(done))
        gaps.append({"value": gap.value, "p50": gap.p50})
    touched = fingerprint.differing(before, loop.remote.ask("state")["hashes"])
    rank.write(
        "control", run="no-refit", rewards=policy.rewards, still=[len(names) for names in policy.unmoved], mismatch=gaps, touched=touched
    )


def no_learning(rank: Rank, loop: Loop, policy: MegatronPolicy, last: int, steps: int) -> None:
    """The whole loop with a learning rate of zero, on the generator of a run that ended with step `last`: the base is put back first."""
    loop.policy, loop.driver.facts = policy, rank.out / "no-learning.jsonl"
    loop.refit(last + 1)
    train(loop, last + 2, steps)
    rows = [row for row in read(loop.driver.facts) if row["fact"] == "refit"]
    kept = [{key: row[key] for key in ("step", "changed", "wrong_names", "refused")} for row in rows]
    still = [len(names) for names in policy.unmoved]
    rank.write("control", run="no-learning", rewards=policy.rewards, still=still, parameters=count(policy), refits=kept)


def count(policy: MegatronPolicy) -> int:
    """How many parameters the Megatron model has."""
    return sum(1 for _ in policy.model.named_parameters())


def read(path: Path) -> list[dict[str, Any]]:
    """The facts that a loop wrote."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
