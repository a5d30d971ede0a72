"""Driver of the refit probe without an engine: a transformers policy that really trains, and a generator process refitted after every step.

    python -m seatrial.instruments.engines.transformers_loop --model DIR --out DIR --steps N [--transport …] [--fault NAME]

This process is the policy: it samples from the generator, makes one policy-gradient step, and refits. Each refit is compared before (the
negative control) and after, name by name, by the bits of the generator's live parameters.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from seatrial.instruments import provenance
from seatrial.instruments.engines import transformers_generator
from seatrial.instruments.engines.transformers_generator import Remote, logprobs
from seatrial.instruments.refit import refit_driver
from seatrial.instruments.refit.agreement import Mismatch, token_mult_prob_error
from seatrial.instruments.refit.payload_header import TRANSPORTS
from seatrial.instruments.refit.refit_driver import RefitDriver, say

OWN_FAULTS = {
    "unstamped-sample": "one sample carries no version",
    "unsynced-buffer": "a buffer of the policy changes at each step, and nobody exports it",
    "frozen-policy": "the policy never changes: a vacuous run, which must be Blocked",
}
"""Faults of the policy, with any engine."""
FAULTS: dict[str, str] = {**transformers_generator.FAULTS, **refit_driver.FAULTS, **OWN_FAULTS}
PROMPTS, WIDTH, LENGTH = 16, 8, 12
RATE = 1e-3


class TrainedPolicy:
    def __init__(self, directory: Path, frozen: bool, device: str = "cpu") -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype="auto", local_files_only=True).eval().to(device)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.0 if frozen else RATE)
        draw = random.Random(0)
        words = self.model.config.get_text_config().vocab_size
        self.prompts = [[draw.randrange(words) for _ in range(WIDTH)] for _ in range(PROMPTS)]

    def export(self) -> dict[str, Any]:
        return {name: value.detach() for name, value in self.model.named_parameters()}

    def step(self, completions: Sequence[Sequence[int]]) -> float:
        import torch

        rewards = torch.tensor([sum(token % 2 == 0 for token in row) / len(row) for row in completions])
        advantages = (rewards - rewards.mean()).to(self.model.device)
        loss = -(advantages[:, None] * logprobs(self.model, self.rows(completions), WIDTH)).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return float(rewards.mean())

    def drift(self) -> None:
        found = next((value for _, value in self.model.named_buffers() if value.is_floating_point() and value.numel()), None)
        if found is None:
            raise ValueError("this model has no buffer of floating-point numbers: it cannot have the fault unsynced-buffer")
        found.mul_(1.01)

    def rows(self, completions: Sequence[Sequence[int]]) -> list[list[int]]:
        return [[*prompt, *done] for prompt, done in zip(self.prompts, completions, strict=True)]

    def logprobs(self, completions: Sequence[Sequence[int]]) -> list[list[float]]:
        """What the policy itself gives the completions."""
        import torch

        with torch.no_grad():
            found: list[list[float]] = logprobs(self.model, self.rows(completions), WIDTH).tolist()
        return found


class Loop:
    def __init__(
        self, policy: TrainedPolicy, remote: refit_driver.RefittedGenerator, out: Path, transports: Sequence[str], fault: str | None
    ) -> None:
        self.policy, self.remote, self.fault = policy, remote, fault
        self.driver = RefitDriver(remote, out / "facts.jsonl", policy.export(), transports, fault)
        self.completions: list[list[int]] | None = None

    def run(self, steps: int) -> None:
        """The base first, then steps."""
        self.begin()
        self.refit(0)
        for step in range(1, steps + 1):
            self.sample(step)
            assert self.completions is not None
            reward = self.policy.step(self.completions)
            if self.fault == "unsynced-buffer":
                self.policy.drift()
            self.refit(step)
            say(f"step {step} of {steps}: reward {reward:.3f}")
        self.driver.end()

    def begin(self) -> None:
        self.driver.begin(self.policy.export())

    def sample(self, step: int) -> None:
        """Completions from the generator, each stamped with the version it came from, and compared with the policy."""
        made = self.remote.ask("sample", self.policy.prompts, LENGTH, step)
        self.completions = made["tokens"]
        unstamped = 0 if self.fault == "unstamped-sample" and step == 2 else None
        self.driver.samples(made, self.policy.logprobs(made["tokens"]), unstamped)

    def gap(self) -> Mismatch | None:
        """How far generator and policy are apart right now, on the last samples."""
        if self.completions is None:
            return None
        theirs = self.remote.ask("logprobs", self.policy.rows(self.completions), WIDTH)
        return token_mult_prob_error(theirs, self.policy.logprobs(self.completions))

    def refit(self, step: int) -> None:
        """One refit. A dead generator ends the run; a refused payload does not."""
        self.driver.refit(step, self.policy.model, self.policy.export(), self.gap)


def parser(text: str | None, faults: Iterable[str]) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=text)
    made.add_argument("--model", type=Path, required=True)
    made.add_argument("--out", type=Path, required=True)
    made.add_argument("--steps", type=int, default=4)
    made.add_argument("--transport", choices=(*TRANSPORTS, "all"), default="all")
    made.add_argument("--fault", choices=tuple(faults))
    return made


def prepared(arguments: argparse.Namespace) -> tuple[str, ...]:
    """Make the place for the facts; the transports to use in turn."""
    arguments.out.mkdir(parents=True, exist_ok=True)
    return TRANSPORTS if arguments.transport == "all" else (arguments.transport,)


def main() -> None:
    arguments = parser(__doc__, FAULTS).parse_args()
    transports = prepared(arguments)
    fault = ("--fault", arguments.fault) if arguments.fault else ()
    with Remote(("--model", str(arguments.model), *fault)) as remote:
        with provenance.uncollected():
            policy = TrainedPolicy(arguments.model, arguments.fault == "frozen-policy")
        Loop(policy, remote, arguments.out, transports, arguments.fault).run(arguments.steps)
    say("run complete")


if __name__ == "__main__":
    main()
