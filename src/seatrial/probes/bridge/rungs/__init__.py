"""The rungs of the conformance ladder, in the order in which they run: each a module of this folder with a function `run(rank)`.

A rung measures and writes facts; whether they are good enough is judged outside. It runs in processes of its own, one per rank.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Rung:
    """One question to the Bridge under test."""

    title: str
    module: str
    """Below this package."""
    ranks: int = 1
    minutes: float = 5


TABLE: dict[str, Rung] = {
    "build": Rung("provider builds from the configuration", "build"),
    "import": Rung("HF weights reach every parameter", "import_"),
    "roundtrip": Rung("export is the checkpoint, bit for bit", "roundtrip"),
    "reload": Rung("saved checkpoint reloads in transformers", "reload"),
    "mapping": Rung("every name is mapped exactly once", "mapping"),
    "order": Rung("refit export has the names and order that vLLM expects", "order"),
    "parity": Rung("logits are transformers' logits", "parity"),
    "tp": Rung("tensor parallel, 2 ranks", "parallel", ranks=2),
    "pp": Rung("pipeline parallel, 2 ranks", "parallel", ranks=2),
    "ep": Rung("expert parallel, 2 ranks", "parallel", ranks=2),
    "cp": Rung("context parallel, 2 ranks", "parallel", ranks=2),
    "sp": Rung("sequence parallel, 2 ranks", "parallel", ranks=2),
    "optimizer": Rung("DDP and distributed optimizer step like a plain one", "optimizer", ranks=2),
    "checkpoint": Rung("distributed checkpoint and resume, bit for bit", "checkpoint"),
    "lora": Rung("LoRA adapters", "lora"),
    "policy": Rung("policy-gradient steps agree with transformers", "policy"),
    "loop": Rung("closed loop: generate, reward, step, export, refit", "loop", minutes=15),
}
