"""The generator of the transformers driver: a process of its own with its own copy of the model, asked over a local socket.

Runs inside an engine's interpreter. It takes payloads by `refit.consumer`, hashes what its live parameters really hold, and
learns the coordinate map through its own loader. Seeded faults act here, after the consumer has proven its work: that is where
engines lose weights (caches, copies, late writes), and where only reading the live weights can find it.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from multiprocessing.connection import Client, Connection
from typing import Any

from seatrial.probes import provenance
from seatrial.probes.engines.transformers_cover import Covered
from seatrial.probes.refit.consumer import Consumer
from seatrial.probes.refit.errors import RefitRefused


def logprobs(model: Any, rows: Sequence[Sequence[int]], start: int) -> Any:
    """Log-probabilities of the tokens from `start` on, of rows of equal length; with gradient where there is one."""
    import torch

    ids = torch.tensor(rows, device=model.device)
    table = torch.log_softmax(model(input_ids=ids, use_cache=False).logits.float(), -1)
    return table[:, start - 1 : -1].gather(-1, ids[:, start:, None])[..., 0]


def sample(model: Any, prompts: Sequence[Sequence[int]], length: int, seed: int) -> list[list[int]]:
    """Completions of equal length, at temperature 1."""
    import torch

    draw = torch.Generator().manual_seed(seed)
    ids = torch.tensor(prompts, device=model.device)
    for _ in range(length):
        last = model(input_ids=ids, use_cache=False).logits[:, -1].float().softmax(-1).cpu()
        ids = torch.cat([ids, torch.multinomial(last, 1, generator=draw).to(ids.device)], dim=1)
    done: list[list[int]] = ids[:, len(prompts[0]) :].tolist()
    return done


class Generator(Covered):
    """The live model, its consumer, and the fault that acts on it."""

    def __init__(self, model: Any, fault: str | None) -> None:
        super().__init__(model)
        self.fault = fault
        self.consumer = Consumer(self.weights)
        self.incarnation = f"{os.getpid()}-{time.time_ns()}"
        self.refits = 0

    def state(self) -> dict[str, Any]:
        """What the live model holds right now, and what of it a hash cannot say."""
        zeros = [name for name, value in self.weights.items() if value.numel() and not bool(value.any())]
        nans = {name: int(value.isnan().sum()) for name, value in self.weights.items() if bool(value.isnan().any())}
        held = {"version": self.consumer.version, "incarnation": self.incarnation}
        return {**held, "hashes": self.hashes(), "zeros": zeros, "nans": nans}

    def apply(self, data: bytes) -> tuple[int, str]:
        """Take a payload; the version and root that the consumer gives back."""
        self.refits += 1
        before = {name: value.detach().clone() for name, value in self.weights.items()} if self.fault else {}
        done = self.consumer.apply(data)
        if self.fault and self.refits > 1:
            self._break(before)
        self.look()
        return done.version, done.root

    def _break(self, before: dict[str, Any]) -> None:
        """The faults that no acknowledgement shows."""
        import torch

        # Matrices of two layers: their shapes are equal and their contents are not.
        one, two = [name for name in self.weights if name.endswith("q_proj.weight")][:2]
        first, second = self.weights[one].data, self.weights[two].data
        if self.fault == "skip-refit":
            self.load(before.items())
        elif self.fault == "skip-tensor":
            self.load([(one, before[one])])
        elif self.fault == "flip-bit":
            first.view(torch.uint8).view(-1)[0] ^= 1
        elif self.fault == "swap-layers":
            kept = first.clone()
            first.copy_(second)
            second.copy_(kept)
        elif self.fault == "shift-layer":
            second.copy_(first)
        elif self.fault == "zero-tensor":
            first.zero_()
        elif self.fault == "nan-tensor":
            first.view(-1)[0] = float("nan")
        elif self.fault == "restarted-replica" and self.refits == 3:
            self.incarnation = f"{self.incarnation}-again"
        elif self.fault == "dead-generator" and self.refits == 3:
            os._exit(9)

    def answer(self, request: dict[str, Any]) -> Any:
        """Serve one request."""
        import torch

        given = request["arguments"]
        with torch.no_grad():
            if request["do"] == "sample":
                return sample(self.model, *given), self.consumer.version
            if request["do"] == "logprobs":
                return logprobs(self.model, *given).tolist()
            known: dict[str, Any] = {"map": self.map, "cover": self.cover, "state": self.state, "apply": self.apply}
            return known[request["do"]](*given)


def serve(connection: Connection, generator: Generator) -> None:
    """Answer until the policy closes the socket. Errors are sent back, not swallowed; a refusal with its reason."""
    while True:
        try:
            request = connection.recv()
        except EOFError:
            return
        try:
            connection.send(("ok", generator.answer(request)))
        except RefitRefused as error:
            connection.send(("refused", (error.reason, error.names, error.fix, error.detail)))
        except (RuntimeError, OSError, ValueError, KeyError) as error:
            connection.send(("error", f"{type(error).__name__}: {error}"))


def main() -> None:
    """Load the model, connect to the policy, serve."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--socket", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--fault")
    arguments = parser.parse_args()
    with provenance.uncollected():
        from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype="auto", local_files_only=True).eval()
    with Client(arguments.socket, family="AF_UNIX", authkey=bytes.fromhex(os.environ["SEATRIAL_SOCKET_KEY"])) as connection:
        serve(connection, Generator(model, arguments.fault))


if __name__ == "__main__":
    main()
