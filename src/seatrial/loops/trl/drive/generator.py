"""The separate generation process of level 2: owns its own copy of the model and answers over a local socket.

Weights come as payloads of `probes.refit`, and are applied to the live parameters whole or not at all: a refusal is
sent back with its reason. It hashes what it really holds, after loading, from its own live parameters.
"""

from __future__ import annotations

import argparse
import os
import signal
from dataclasses import asdict
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

import torch

from seatrial.loops.trl.drive import sampler
from seatrial.loops.trl.drive.imports import GENERATOR, Imports
from seatrial.probes import facts
from seatrial.probes.engines.transformers_cover import Covered
from seatrial.probes.refit import payload
from seatrial.probes.refit.consumer import Consumer
from seatrial.probes.refit.errors import RefitRefused

FAULTY_LOAD = 3
"""The load that faults of the payload hit: the first sparse one."""


class Loader(Consumer):
    """The live parameters, and the faults that act on a load."""

    def __init__(self, model: Any, fault: str | None) -> None:
        super().__init__(dict(model.named_parameters()))
        self.model, self.fault, self.loads = model, fault, 0
        self.last = b""
        self.covered = Covered(model)

    def load(self, path: Path) -> dict[str, Any]:
        """Apply one payload."""
        self.loads += 1
        if self.fault == "skip-refit" and self.loads > 1:
            header = payload.read(path).header
            return {"version": header.version, "root": header.target_root, "changed": 0, "bytes": 0}
        applied = asdict(self.apply(self._spoiled(path)))
        if self.loads > 1:
            self._spoil_weights()
        self.covered.look()
        return applied

    def _spoiled(self, path: Path) -> Path | bytes:
        """The payload, or what a fault makes of it on its way."""
        last, self.last = self.last, path.read_bytes() if self.fault == "replayed-payload" else b""
        if self.loads != FAULTY_LOAD:
            return path
        if self.fault == "truncated-payload":
            os.truncate(path, path.stat().st_size - 1)
        elif self.fault == "wrong-base":
            next(iter(self.model.parameters())).data.view(torch.int32).view(-1)[0] ^= 1
        return last if self.fault == "replayed-payload" else path

    def _write(self, target: Any, entry: Any, given: Any, ready: Any) -> None:
        if self.fault == "dead-generator" and self.loads == FAULTY_LOAD and entry is given.header.tensors[1]:
            os.kill(os.getpid(), signal.SIGKILL)
        super()._write(target, entry, given, ready)

    def _spoil_weights(self) -> None:
        """Faults after a load."""
        if self.fault == "flip-bit":
            next(iter(self.model.parameters())).data.view(torch.int32).view(-1)[0] ^= 1
        elif self.fault == "swap-layers":
            one, two = (self.model.model.layers[index].input_layernorm.weight for index in (0, 1))
            kept = one.data.clone()
            one.data.copy_(two.data)
            two.data.copy_(kept)


def answer(loader: Loader, request: dict[str, Any]) -> Any:
    """Serve one request."""
    match request["do"]:
        case "hash":
            return loader.covered.hashes()
        case "map":
            return loader.covered.map()
        case "cover":
            return loader.covered.cover()
        case "load":
            return loader.load(Path(request["path"]))
        case "sample":
            # The version is taken first: it is the one that the samples are made with.
            return loader.version, *sampler.sample(loader.model, *request["arguments"])
        case "logprobs":
            return sampler.logprobs_of(loader.model, *request["arguments"])
    raise RuntimeError(f"generator: unknown request {request['do']!r}")


def serve(connection: Connection, loader: Loader) -> None:
    """Answer until the trainer closes the socket or says stop. Refusals and errors are sent back, not swallowed."""
    while True:
        try:
            request = connection.recv()
        except EOFError:
            return
        if request["do"] == "stop":
            connection.send(("ok", None))
            return
        try:
            connection.send(("ok", answer(loader, request)))
        except RefitRefused as error:
            connection.send(("refused", error.args))
        except (RuntimeError, OSError, ValueError, KeyError) as error:
            connection.send(("error", f"{type(error).__name__}: {error}"))


def main() -> None:
    """Connect to the trainer, prove the imports, load the model, serve."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--socket", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--facts", type=Path, required=True)
    parser.add_argument("--imports", type=Path, required=True)
    parser.add_argument("--under-test", action="append", default=[])
    parser.add_argument("--fault")
    arguments = parser.parse_args()
    imports = Imports(arguments.imports, "generator", arguments.under_test)
    imports.prove(GENERATOR)
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32, local_files_only=True)
    model.to(arguments.device).eval()
    tied = model.get_output_embeddings().weight.data_ptr() == model.get_input_embeddings().weight.data_ptr()
    row = {"fact": "process", "process": "generator", "tied": tied, "pid": os.getpid(), "parent": os.getppid(), "device": str(model.device)}
    facts.append(arguments.facts, row)
    with Client(arguments.socket, family="AF_UNIX", authkey=bytes.fromhex(os.environ["SEATRIAL_SOCKET_KEY"])) as connection:
        serve(connection, Loader(model, arguments.fault))
    imports.close(GENERATOR)


if __name__ == "__main__":
    main()
