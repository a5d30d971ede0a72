"""The separate generation process of level 2: owns its own copy of the model and answers over a local socket.

It loads weights in place and strictly: a name it does not have, a parameter that was not sent, another shape or
dtype is an error. It hashes what it really holds, after loading, from its own live parameters.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

import torch

from seatrial.loops.trl.drive import sampler
from seatrial.loops.trl.drive.imports import GENERATOR, Imports
from seatrial.probes import facts, fingerprint


def load(model: Any, weights: Mapping[str, Any]) -> int:
    """Copy the weights into the live model; returns the bytes copied."""
    own = dict(model.named_parameters())
    unknown, absent = sorted(weights.keys() - own.keys()), sorted(own.keys() - weights.keys())
    if unknown or absent:
        raise RuntimeError(f"refit: names unknown to the generator: {unknown[:5]}; parameters not sent: {absent[:5]}")
    for name, value in weights.items():
        if value.shape != own[name].shape or value.dtype != own[name].dtype:
            raise RuntimeError(f"refit: {name}: sent {value.dtype}{tuple(value.shape)}, own {own[name].dtype}{tuple(own[name].shape)}")
        own[name].data.copy_(value)
    return sum(value.numel() * value.element_size() for value in weights.values())


def break_refit(model: Any, fault: str | None) -> None:
    """Injected faults after a load."""
    first = next(iter(model.parameters()))
    if fault == "flip-bit":
        first.data.view(torch.int32).view(-1)[0] ^= 1
    elif fault == "swap-layers":
        layers = model.model.layers
        one, two = layers[0].input_layernorm.weight, layers[1].input_layernorm.weight
        kept = one.data.clone()
        one.data.copy_(two.data)
        two.data.copy_(kept)


def answer(model: Any, request: dict[str, Any], state: dict[str, Any], fault: str | None) -> Any:
    """Serve one request."""
    from safetensors.torch import load_file

    match request["do"]:
        case "hash":
            return fingerprint.tensors(model.named_parameters())
        case "load":
            state["loads"] = state.get("loads", 0) + 1
            if fault == "skip-refit" and state["loads"] > 1:
                return 0
            size = load(model, load_file(request["path"]))
            break_refit(model, fault if state["loads"] > 1 else None)
            return size
        case "sample":
            return sampler.sample(model, *request["arguments"])
        case "logprobs":
            return sampler.logprobs_of(model, *request["arguments"])
    raise RuntimeError(f"generator: unknown request {request['do']!r}")


def serve(connection: Connection, model: Any, fault: str | None) -> None:
    """Answer until the trainer closes the socket or says stop. Errors are sent back, not swallowed."""
    state: dict[str, Any] = {}
    while True:
        try:
            request = connection.recv()
        except EOFError:
            return
        if request["do"] == "stop":
            connection.send(("ok", None))
            return
        try:
            connection.send(("ok", answer(model, request, state, fault)))
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
        serve(connection, model, arguments.fault)
    imports.close(GENERATOR)


if __name__ == "__main__":
    main()
