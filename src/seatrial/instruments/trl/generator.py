"""The generation process of level 2: that of the refit probe, with the import proofs and the sampling of this loop."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch

from seatrial.instruments import facts
from seatrial.instruments.engines.transformers_generator import Generator, connect
from seatrial.instruments.trl import seeded_rollouts
from seatrial.instruments.trl.import_proofs import GENERATOR, Imports


class SeededGenerator(Generator):
    """Samples that depend only on weights, prompt, step and index."""

    def sample(self, *arguments: Any) -> tuple[list[list[int]], list[list[float]]]:
        """Completions, and the log-probabilities of their tokens."""
        made: tuple[list[list[int]], list[list[float]]] = seeded_rollouts.sample(self.model, *arguments)
        return made

    def logprobs(self, *arguments: Any) -> list[list[float]]:
        """Of given completions."""
        found: list[list[float]] = seeded_rollouts.logprobs_of(self.model, *arguments)
        return found


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
    connect(arguments.socket, SeededGenerator(model, arguments.fault))
    imports.close(GENERATOR)


if __name__ == "__main__":
    main()
