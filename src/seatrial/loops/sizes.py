"""Parallel sizes of Megatron, under the names that its configuration has in every loop."""

from __future__ import annotations

from dataclasses import dataclass

KEYS = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
}


@dataclass(frozen=True)
class Sizes:
    """Parallel sizes of one model."""

    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1

    def problem(self, count: int) -> str | None:
        """Why these sizes cannot be had on so many GPUs."""
        dense = (f"TP {self.tp} x PP {self.pp} x CP {self.cp}", self.tp * self.pp * self.cp)
        experts = (f"ETP {self.etp} x EP {self.ep} x PP {self.pp}", self.etp * self.ep * self.pp)
        wrong = [f"{text} = {size} does not divide {count} GPUs" for text, size in (dense, experts) if count % size]
        return wrong[0] if wrong else None
