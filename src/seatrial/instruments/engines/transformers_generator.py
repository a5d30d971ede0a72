"""A generation process that holds a plain transformers model, refitted by payloads over a local socket; and `Remote`, its client.

It takes payloads by `weight_transfer.Consumer`, and hashes what its live parameters really hold. Weights go in by name; the coordinate map
adds that every other tensor of the model is watched, too: a buffer that moved is in the hashes under its own name, with a mark.
- Most seeded faults act here, after the consumer has proven its work: that is where engines lose weights (caches, copies, late writes).
- `Remote` uses the standard library only. Every wait has a deadline; leaving the context ends the process.
"""

from __future__ import annotations

import argparse
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

from seatrial.instruments import provenance
from seatrial.instruments.bits import fingerprint
from seatrial.instruments.refit import map_learner, tensor_coverage
from seatrial.instruments.refit.payload_header import RefitRefused
from seatrial.instruments.refit.refit_driver import say
from seatrial.instruments.refit.weight_transfer import Consumer

ANSWER_SECONDS = 300.0
GENERATOR = "seatrial.instruments.engines.transformers_generator"
SHARED = Path("/dev/shm")


class Remote:
    """One process that runs `module` with `arguments`. It starts at once, and the first question waits until it has loaded its model."""

    def __init__(self, arguments: Sequence[str], module: str = GENERATOR) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="seatrial-", dir=SHARED if SHARED.is_dir() else None)
        self.payload = Path(self._directory.name, "payload")
        key, socket = secrets.token_bytes(16), str(Path(self._directory.name, "socket"))
        self._listener = Listener(socket, family="AF_UNIX", authkey=key)
        command = [sys.executable, "-m", module, "--socket", socket, *arguments]
        self.process = subprocess.Popen(command, env={**os.environ, "SEATRIAL_SOCKET_KEY": key.hex()})
        self.connection: Connection | None = None

    def __enter__(self) -> Remote:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        if self.connection is not None:
            self.connection.close()  # it ends when its socket does
        try:
            self.process.wait(timeout=10 if self.connection is not None else 0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._listener.close()
        self._directory.cleanup()

    def _accept(self) -> Connection:
        say(f"waiting up to {ANSWER_SECONDS:.0f} s for the generation process to connect")
        self._listener._listener._socket.settimeout(1.0)  # type: ignore[attr-defined]  # the only way to wait with a deadline
        stops = time.monotonic() + ANSWER_SECONDS
        while time.monotonic() < stops:
            try:
                return self._listener.accept()
            except TimeoutError:
                if self.process.poll() is not None:
                    raise RuntimeError(f"the generation process ended with code {self.process.returncode} before it connected") from None
        raise RuntimeError(f"the generation process did not connect within {ANSWER_SECONDS:.0f} s")

    def expect(self, export: dict[str, Any]) -> None:
        """It reads its weights by their own names."""

    def ask(self, do: str, *arguments: Any) -> Any:
        """One request and its answer; a refusal there is one here, and a death is the refusal "dead"."""
        if self.connection is None:
            self.connection = self._accept()
        try:
            self.connection.send({"do": do, "arguments": arguments})
            if not self.connection.poll(ANSWER_SECONDS):
                raise RuntimeError(f"the generation process did not answer {do!r} within {ANSWER_SECONDS:.0f} s")
            status, value = self.connection.recv()
        except (EOFError, OSError):
            raise RefitRefused("dead", detail=f"the generation process ended with code {self._code()} at {do!r}") from None
        if status == "refused":
            raise RefitRefused(*value)
        if status != "ok":
            raise RuntimeError(f"the generation process failed at {do!r}: {value}")
        return value

    def _code(self) -> int | None:
        """How the process ended; None when it closed the socket and lives."""
        try:
            return self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            return None


FAULTS = {
    "skip-refit": "the generator acknowledges and keeps its old weights",
    "skip-tensor": "one tensor keeps its old weights",
    "flip-bit": "one bit of one weight is wrong after each refit",
    "swap-layers": "the same tensor of two layers changes places",
    "shift-layer": "a layer holds the tensor of the layer before it",
    "zero-tensor": "one tensor is zero after each refit",
    "nan-tensor": "one element is NaN after each refit",
    "wrong-base": "one bit of the generator differs before the third refit",
    "restarted-replica": "the generator says at the third refit that it was started anew",
    "dead-generator": "the generator is killed in the middle of the third refit",
}
"""Faults of the generator."""
FAULTY = 3  # the refit, counted from 1, that faults hit which happen once


class Covered:
    """What the live `model` holds: its hashes, its coordinate map, and the coverage over all refits."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.weights = dict(model.named_parameters())
        self._buffers = fingerprint.tensors(model.named_buffers())
        self._watch: tensor_coverage.LoaderWatch | None = None

    def load(self, pairs: Iterable[tuple[str, Any]]) -> None:
        """The loader of this engine: each name into its parameter."""
        for name, value in pairs:
            self.weights[name].data.copy_(value)

    def hashes(self) -> dict[str, str]:
        buffers = fingerprint.tensors(self.model.named_buffers())
        moved = {name: f"moved-{buffers.get(name)}" for name in fingerprint.differing(self._buffers, buffers)}
        return fingerprint.tensors(self.weights.items()) | moved

    def map(self) -> dict[str, Any]:
        """Learn the coordinate map through the loader, and watch all tensors from here on; the fact."""
        before = fingerprint.model(self.model)
        learned = map_learner.learn(self.model, self.load, dict(self.weights))
        elements = sum(value.numel() for value in self.weights.values())
        restored = not fingerprint.differing(before, fingerprint.model(self.model))
        self._watch = tensor_coverage.LoaderWatch(self.model, learned)
        mapped = {"elements": elements, "runs": learned.count, "duplicates": learned.duplicates, "restored": restored}
        return {**mapped, "misplaced": tensor_coverage.misplaced(learned)}

    def look(self) -> None:
        if self._watch is not None:
            self._watch.look()

    def cover(self) -> dict[str, Any]:
        """The coverage over all refits so far; the fact. The policy adds what only it knows."""
        assert self._watch is not None, "the map comes first"
        self.look()
        return tensor_coverage.classify(self.model, self._watch.map, self._watch.touched, self._watch.moved).row("0", [])


class _Dying(Consumer):
    """Kills its process while the second tensor of the third refit is written."""

    refits = 0

    def apply(self, data: Any) -> Any:
        self.refits += 1
        return super().apply(data)

    def _write(self, target: Any, entry: Any, given: Any, ready: Any) -> None:
        if self.refits == FAULTY and entry is given.header.tensors[1]:
            os.kill(os.getpid(), signal.SIGKILL)
        super()._write(target, entry, given, ready)


def logprobs(model: Any, rows: Sequence[Sequence[int]], start: int) -> Any:
    """Log-probabilities of the tokens from `start` on, of rows of equal length; with gradient where there is one."""
    import torch

    ids = torch.tensor(rows, device=model.device)
    table = torch.log_softmax(model(input_ids=ids, use_cache=False).logits.float(), -1)
    return table[:, start - 1 : -1].gather(-1, ids[:, start:, None])[..., 0]


def sample(model: Any, prompts: Sequence[Sequence[int]], length: int, seed: int) -> tuple[list[list[int]], list[list[float]]]:
    """Completions of equal length at temperature 1, and the log-probabilities of their tokens."""
    import torch

    draw = torch.Generator().manual_seed(seed)
    ids = torch.tensor(prompts, device=model.device)
    given: list[Any] = []
    for _ in range(length):
        table = torch.log_softmax(model(input_ids=ids, use_cache=False).logits[:, -1].float(), -1).cpu()
        drawn = torch.multinomial(table.exp(), 1, generator=draw)
        given.append(table.gather(-1, drawn))
        ids = torch.cat([ids, drawn.to(ids.device)], dim=1)
    return ids[:, len(prompts[0]) :].tolist(), torch.cat(given, dim=1).tolist()


class Generator(Covered):
    """The live model, its consumer, and the fault that acts on it."""

    def __init__(self, model: Any, fault: str | None) -> None:
        super().__init__(model)
        self.fault = fault if fault in FAULTS else None  # the others act elsewhere
        self.consumer = (_Dying if fault == "dead-generator" else Consumer)(self.weights)
        self.incarnation = f"{os.getpid()}-{time.time_ns()}"
        self.refits = 0

    def held(self) -> dict[str, Any]:
        return {"version": self.consumer.version, "incarnation": self.incarnation}

    def state(self) -> dict[str, Any]:
        """What the live model holds right now, and what of it a hash cannot say. Every weight is read; a buffer that moved is none."""
        zeros = [name for name, value in self.weights.items() if value.numel() and not bool(value.any())]
        nans = {name: int(value.isnan().sum()) for name, value in self.weights.items() if bool(value.isnan().any())}
        return {**self.held(), "hashes": self.hashes(), "methods": dict.fromkeys(self.weights, "read"), "zeros": zeros, "nans": nans}

    def apply(self, path: str) -> None:
        import torch

        self.refits += 1
        before = {name: value.detach().clone() for name, value in self.weights.items()} if self.fault else {}
        if self.fault == "wrong-base" and self.refits == FAULTY:
            next(iter(self.weights.values())).data.view(torch.uint8).view(-1)[0] ^= 1
        self.consumer.apply(path)
        if self.fault and self.refits > 1:
            self._break(before)
        self.look()

    def _break(self, before: dict[str, Any]) -> None:
        """The faults that no acknowledgement shows."""
        import torch

        # Matrices of two layers: their shapes are equal and their contents are not.
        one, two = [name for name in self.weights if name.endswith("q_proj.weight")][:2]
        first, second = self.weights[one].data, self.weights[two].data
        if self.fault == "restarted-replica" and self.refits == FAULTY:
            self.incarnation = f"{self.incarnation}-again"
        elif self.fault == "flip-bit":
            first.view(torch.uint8).view(-1)[0] ^= 1
        elif self.fault == "zero-tensor":
            first.zero_()
        elif self.fault == "nan-tensor":
            first.view(-1)[0] = float("nan")
        loaded = {
            "skip-refit": before,
            "skip-tensor": {one: before[one]},
            "swap-layers": {one: second.clone(), two: first.clone()},
            "shift-layer": {two: first.clone()},
        }
        self.load(loaded.get(self.fault or "", {}).items())

    def sample(self, *arguments: Any) -> tuple[list[list[int]], list[list[float]]]:
        return sample(self.model, *arguments)

    def logprobs(self, *arguments: Any) -> list[list[float]]:
        found: list[list[float]] = logprobs(self.model, *arguments).tolist()
        return found

    def _stamped(self, *arguments: Any) -> dict[str, Any]:
        held = self.held()  # taken first: these weights make the samples
        tokens, given = self.sample(*arguments)
        return {"tokens": tokens, "logprobs": given, **held}

    def answer(self, request: dict[str, Any]) -> Any:
        import torch

        known: dict[str, Any] = {"map": self.map, "cover": self.cover, "state": self.state, "apply": self.apply, "explain": dict}
        with torch.no_grad():
            return (known | {"sample": self._stamped, "logprobs": self.logprobs})[request["do"]](*request["arguments"])


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
            connection.send(("refused", error.args))
        except (RuntimeError, OSError, ValueError, KeyError) as error:
            connection.send(("error", f"{type(error).__name__}: {error}"))


def connect(socket: str, generator: Generator) -> None:
    with Client(socket, family="AF_UNIX", authkey=bytes.fromhex(os.environ["SEATRIAL_SOCKET_KEY"])) as connection:
        serve(connection, generator)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--socket", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--fault")
    arguments = parser.parse_args()
    with provenance.uncollected():
        from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype="auto", local_files_only=True).eval()
    connect(arguments.socket, Generator(model, arguments.fault))


if __name__ == "__main__":
    main()
