"""Driver of the refit probe without an engine: a transformers policy that really trains, and a generator process refitted after every step.

    python -m seatrial.probes.engines.transformers_loop --model DIR --out DIR --steps N [--transport full|packed|sparse|all] [--fault NAME]

Runs inside an interpreter with torch and transformers. This process is the policy: it samples from the generator, makes one
policy-gradient step, and refits. Each refit is compared before (the negative control) and after, name by name, by the bits that
the generator's live parameters hold. Everything found goes to DIR/facts.jsonl; the judgement is made outside.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from seatrial.probes import facts, fingerprint, provenance
from seatrial.probes.engines import export_faults
from seatrial.probes.engines.transformers_generator import logprobs
from seatrial.probes.engines.transformers_remote import Remote, say
from seatrial.probes.refit import coverage, mismatch
from seatrial.probes.refit.errors import UNMAPPED, RefitRefused
from seatrial.probes.refit.header import TRANSPORTS
from seatrial.probes.refit.producer import Producer

FAULTS: dict[str, str] = {
    "skip-refit": "the generator acknowledges and keeps its old weights",
    "skip-tensor": "one tensor keeps its old weights",
    "flip-bit": "one bit of one weight is wrong after each refit",
    "swap-layers": "the same tensor of two layers changes places",
    "shift-layer": "a layer holds the tensor of the layer before it",
    "zero-tensor": "one tensor is zero after each refit",
    "nan-tensor": "one element is NaN after each refit",
    "truncated": "the payload of the second refit loses its last byte",
    "replayed": "the first payload is sent again instead of the third",
    "restarted-replica": "the generator says that it was started anew",
    "dead-generator": "the generator dies at the third refit",
    "unstamped-sample": "one sample carries no version",
    "unsynced-buffer": "a buffer of the policy changes at each step, and nobody exports it",
    "frozen-policy": "the policy never changes: a vacuous run, which must be Blocked",
    **{name: text for name, (text, _) in export_faults.FAULTS.items()},
}
REPLICA = "0"
PROMPTS, WIDTH, LENGTH = 16, 8, 12
RATE = 1e-3


class Policy:
    """The model that trains."""

    def __init__(self, directory: Path, frozen: bool, device: str = "cpu") -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype="auto", local_files_only=True).eval().to(device)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.0 if frozen else RATE)
        draw = random.Random(0)
        words = self.model.config.get_text_config().vocab_size
        self.prompts = [[draw.randrange(words) for _ in range(WIDTH)] for _ in range(PROMPTS)]

    def export(self) -> dict[str, Any]:
        """The weights as they are sent: tied ones once."""
        return {name: value.detach() for name, value in self.model.named_parameters()}

    def step(self, completions: Sequence[Sequence[int]]) -> float:
        """One policy-gradient step towards even tokens; the mean reward."""
        import torch

        rewards = torch.tensor([sum(token % 2 == 0 for token in row) / len(row) for row in completions])
        advantages = (rewards - rewards.mean()).to(self.model.device)
        loss = -(advantages[:, None] * logprobs(self.model, self.rows(completions), WIDTH)).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return float(rewards.mean())

    def drift(self) -> None:
        """Change a buffer, which no export has: the fault `unsynced-buffer`."""
        found = next((value for _, value in self.model.named_buffers() if value.is_floating_point() and value.numel()), None)
        if found is None:
            raise ValueError("this model has no buffer of floating-point numbers: it cannot have the fault unsynced-buffer")
        found.mul_(1.01)

    def rows(self, completions: Sequence[Sequence[int]]) -> list[list[int]]:
        """Prompts and completions together."""
        return [[*prompt, *done] for prompt, done in zip(self.prompts, completions, strict=True)]

    def logprobs(self, completions: Sequence[Sequence[int]]) -> list[list[float]]:
        """What the policy itself gives the completions."""
        import torch

        with torch.no_grad():
            found: list[list[float]] = logprobs(self.model, self.rows(completions), WIDTH).tolist()
        return found


class Loop:
    """The run: samples, steps, refits, and a fact about each."""

    def __init__(self, policy: Policy, remote: Remote, out: Path, transports: Sequence[str], fault: str | None) -> None:
        self.policy, self.remote, self.facts, self.transports, self.fault = policy, remote, out / "facts.jsonl", transports, fault
        first = policy.export()
        self.producer = Producer(first)
        self.first = {name: value.clone() for name, value in first.items()}
        self.payloads: list[Any] = []
        self.completions: list[list[int]] | None = None
        self.seen: list[dict[str, str]] = []
        self.owned = coverage.Owned()

    def write(self, fact: str, **fields: Any) -> None:
        """One row."""
        facts.append(self.facts, {"fact": fact, **fields})

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
        self.end()

    def begin(self) -> None:
        """Let the generator learn the map. A loader that raises is what the probe found: it is a fact before the run ends by it."""
        try:
            mapped = self.remote.ask("map")
        except RuntimeError as error:
            if not isinstance(error, RefitRefused):
                self.write("probe_error", where=UNMAPPED, error=str(error))
            raise
        self.write("map", replica=REPLICA, **mapped)

    def end(self) -> None:
        """What became of every tensor of both sides."""
        mine = {"never_changed": coverage.never_changed(self.seen), "unexported": self.owned.unexported()}
        self.write(**{**self.remote.ask("cover"), "replica": REPLICA, **mine})

    def sample(self, step: int) -> None:
        """Completions from the generator, each stamped with the version it came from."""
        self.completions, version = self.remote.ask("sample", self.policy.prompts, LENGTH, step)
        assert self.completions is not None
        for index in range(len(self.completions)):
            unstamped = self.fault == "unstamped-sample" and (step, index) == (2, 0)
            self.write("sample", id=f"{step}-{index}", version=None if unstamped else version, replica=REPLICA)

    def gap(self) -> mismatch.Mismatch | None:
        """How far generator and policy are apart right now, on the last samples."""
        if self.completions is None:
            return None
        theirs = self.remote.ask("logprobs", self.policy.rows(self.completions), WIDTH)
        return mismatch.token_mult_prob_error(theirs, self.policy.logprobs(self.completions))

    def refit(self, index: int) -> None:
        """Compare, send, compare again, and write it all down. A dead generator ends the run."""
        export = self.policy.export()
        before, stale = self.remote.ask("state"), self.gap()
        row, hashes = self.prepare(index, export, before["hashes"], stale)
        try:
            version, root = self.remote.ask("apply", self.payload(index))
            self.producer.commit(root, version)
            refused = None
        except RefitRefused as error:
            refused = error
            if self.producer.prepared is not None:
                self.producer.rollback()
        self.compare(row, hashes, before, refused)

    def prepare(
        self, index: int, export: dict[str, Any], held: dict[str, str], stale: mismatch.Mismatch | None
    ) -> tuple[dict[str, Any], dict[str, str]]:
        """Make the payload; what is known before it is sent, and the hashes of what the policy itself holds."""
        self.owned.look(self.policy.model, export)
        given = export_faults.broken(self.fault if index > 1 else None, export, self.first)
        self.payloads.append(self.producer.prepare(given, self.transports[index % len(self.transports)]))
        sent = self.producer.prepared
        assert sent is not None
        hashes = sent.hashes if given is export else fingerprint.tensors(export.items())
        self.write("hashes", side="sent", version=sent.version, step=index, hashes=hashes)
        row = {"index": index, "step": index, "version": sent.version, "transport": sent.transport, "kind": sent.kind, "modes": sent.modes}
        row |= {"names": len(export), "bytes": sent.bytes, "changed": sent.changed, "elements": sent.elements}
        row |= {"produced": fingerprint.tree(hashes).root, "stale_names": len(fingerprint.differing(hashes, held))}
        row |= {"replica": REPLICA, "stale_max_dlogp": stale.max_abs if stale else None, "nonfinite": sent.nonfinite}
        return row, hashes

    def payload(self, index: int) -> Any:
        """What is put on the wire."""
        if self.fault == "truncated" and index == 1:
            return self.payloads[index][:-1]
        return self.payloads[0 if self.fault == "replayed" and index == 2 else index]

    def compare(self, row: dict[str, Any], sent: dict[str, str], before: dict[str, Any], refused: RefitRefused | None) -> None:
        """What the live weights are after it."""
        held: dict[str, Any] = {"hashes": {}, "incarnation": before["incarnation"]}
        if refused is None or refused.reason != "dead":
            held = self.remote.ask("state")
        after, fresh = held["hashes"], self.gap() if held["hashes"] else None
        self.seen.append(sent)
        row |= {"consumed": fingerprint.tree(after).root if after else None, "incarnation": held["incarnation"]}
        row |= {"wrong_names": [] if refused else fingerprint.differing(sent, after)}
        row |= {"methods": {"read": sum(name in after for name in sent)}}
        row |= {"touched_names": len(fingerprint.differing(before["hashes"], after)) if after else 0}
        row |= {"fresh_max_dlogp": fresh.max_abs if fresh else None, "refused": str(refused) if refused else None}
        if refused is None:
            self.write(
                "hashes",
                side="live",
                step=row["step"],
                replica=REPLICA,
                **{key: held[key] for key in ("version", "hashes", "zeros", "nans")},
            )
        if after:
            self.write("version", replica=REPLICA, incarnation=held["incarnation"], version=held["version"], root=row["consumed"])
        self.write("refit", **row)
        if fresh:
            self.write("mismatch", step=row["step"], **dataclasses.asdict(fresh))
        if refused is not None and refused.reason == "dead":
            raise refused


def parser(text: str | None, faults: Iterable[str]) -> argparse.ArgumentParser:
    """The options that every driver has."""
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
    """Parse, start both sides, run."""
    arguments = parser(__doc__, FAULTS).parse_args()
    transports = prepared(arguments)
    with Remote(arguments.model, arguments.fault) as remote:
        with provenance.uncollected():
            policy = Policy(arguments.model, arguments.fault == "frozen-policy")
        remote.connect()
        Loop(policy, remote, arguments.out, transports, arguments.fault).run(arguments.steps)
    say("run complete")


if __name__ == "__main__":
    main()
